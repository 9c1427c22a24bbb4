"""A composed configuration, read key by key: what cannot be read is reported, and reading goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallelizer.configuration.origins import NOWHERE, Origins
from parallelizer.diagnostics.diagnostic import Findings, Span, quoted
from parallelizer.language.yaml_nodes import MappingNode, Scalar


@dataclass
class Reading:
    """A composed configuration, and what is found wrong in it."""

    config: DictConfig
    origins: Origins
    findings: Findings = field(default_factory=Findings)

    def span(self, key: str) -> Span:
        """The place that set a key."""
        return self.origins.span(key) or NOWHERE

    def error(self, code: str, message: str, key: str, help_text: str) -> None:
        """Report the value of a key."""
        self.findings.error(code, message, self.span(key), help_text)

    def unknown(self, code: str, message: str, key: str, help_text: str) -> None:
        """Report a key itself."""
        self.findings.error(code, message, self.origins.key_span(key) or self.span(key), help_text)

    def get(self, key: str, default: Any = None, *, resolve: bool = True) -> Any:
        """The value of a dotted key in plain Python; `default` if it is not there, None if it has none."""
        try:
            value = OmegaConf.select(self.config, key, default=default)
            return OmegaConf.to_container(value, resolve=resolve) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            reason = str(error).split("\n")[0]
            message = f"the value of {key} cannot be resolved: {reason}"
            self.error("interpolation", message, key, "write the value, or a key that exists")
            return None

    def mapping(self, key: str, *, resolve: bool = True) -> MappingNode:
        """The map under a key, as nodes; an empty one when nothing stands there, or something else."""
        value = self.get(key, resolve=resolve)
        if isinstance(value, Mapping):
            node = self.origins.node(key, value)
            if isinstance(node, MappingNode):
                return node
        elif value is not None:
            shown = "a list" if isinstance(value, list) else quoted(str(value))
            message = f"{key} takes a map, not {shown}"
            self.error("wrong-type", message, key, f"set its parts, as in {key}.<name>=<value>")
        return MappingNode((), NOWHERE)

    def whole_number(self, key: str, what: str, default: int | None = None) -> int | None:
        """The number, from 1, under a key; None, reported about `what`, for anything else."""
        before = len(self.findings.items)
        value = self.get(key, default)
        if is_whole(value) and value >= 1:
            self._as_written(key, value)
            return int(value)
        if len(self.findings.items) == before:
            shown = quoted(value) if isinstance(value, str) else "missing" if value is None else str(value)
            self.error("wrong-type", f"{what} is {shown}", key, "it is a whole number from 1")
        return None

    def _as_written(self, key: str, value: int) -> None:
        """Report a number that YAML reads as another than is written: `012` is 10, `12:30` is 750."""
        node = self.origins.written(key)
        if isinstance(node, Scalar) and node.plain and _RETYPED.fullmatch(node.text):
            message = f"YAML reads `{node.text}` as the number {value}"
            self.findings.error("yaml-retyped", message, node.span, "write the number in decimal digits")


_RETYPED = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+)")
"""Octal and sexagesimal numbers of YAML 1.1. (Hexadecimal and binary ones are written on purpose.)"""


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)
