"""The table of styles: what each is called, which slot it fills and which options it takes, without importing torch.

The parser and the checks of form stand on this table alone. A style declares itself in its own file, which says as well
what it checks, does and exports: `STYLE_FILES` lists them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from parallelizer.language.plan import SLOTS


@dataclass(frozen=True)
class OptionKind:
    """The kind of an option's value, and one line on what it does.

    Kinds: `argument` (a parameter name of forward), `bool`, `int` (not negative), `bool-or-int`, `bool-or-name`, `choice`,
    `dtype` (of parameters or gradients), `names` (attribute names),
    `placement`, `input` and `output` (flows by parameter name, index or key), `params` (placements by
    parameter and axis), `parts` (sizes of a fused dimension), `parts-by-param` (the same, or by parameter), `size`
    (a number or an attribute name), `axis`.
    """

    kind: str
    doc: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class StyleDeclaration:
    """A style's name, slot, the axis it stands on unless `axis:` says otherwise, and its options.

    `defaults` are, as text, the values that options have where nothing sets them; one that is not there does
    nothing then.
    """

    name: str
    slot: str
    axis: str | None
    doc: str
    options: Mapping[str, OptionKind] = field(default_factory=dict)
    takes_parameters: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)


STYLE_FILES = {
    "stage": "stage",
    "float8": "float8.style",
    "shard-params": "shard_params",
    "colwise": "colwise",
    "rowwise": "rowwise",
    "sequence": "sequence",
    "replicate": "replicate",
    "local-random": "local_random",
    "prepare-input": "prepare_input",
    "prepare-output": "prepare_output",
    "prepare-io": "prepare_io",
    "context-parallel": "context_parallel.style",
    "experts": "experts.style",
    "checkpoint": "checkpoint",
    "compile": "compile",
    "fsdp": "fsdp",
}
"""The file of parallelizer/styles/ that declares each style, in the order of the documentation."""


class StyleTable(MutableMapping[str, StyleDeclaration]):
    """Every declared style by name: those of this package in the order of `STYLE_FILES`, then those of others."""

    def __init__(self) -> None:
        self._declared: dict[str, StyleDeclaration] = {}
        self._loaded = False

    def __getitem__(self, name: str) -> StyleDeclaration:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __setitem__(self, name: str, declaration: StyleDeclaration) -> None:
        declared = {**self._declared, name: declaration}
        ours = {name: declared[name] for name in STYLE_FILES if name in declared}
        self._declared = {**ours, **declared}

    def __delitem__(self, name: str) -> None:
        del self._declared[name]

    def load(self) -> None:
        """Import the files of this package's styles, which register what the styles do. A process that has unpickled a
        program has not imported them.
        """
        self._all()

    def _all(self) -> dict[str, StyleDeclaration]:
        if not self._loaded:
            self._loaded = True  # before: the files that are loaded look here themselves
            for file in STYLE_FILES.values():
                # By name, since the styles' room stands to the right of this one. None of them imports torch by itself.
                importlib.import_module(f"parallelizer.styles.{file}")
        return self._declared


STYLES = StyleTable()


def declare(declaration: StyleDeclaration) -> None:
    """Add a style. Raises ValueError when the name is taken or the slot is none of the known ones."""
    if declaration.name in STYLES:
        raise ValueError(f"a style named {declaration.name!r} exists")
    if declaration.slot not in SLOTS:
        raise ValueError(f"unknown slot {declaration.slot!r}: the slots are {', '.join(SLOTS)}")
    STYLES[declaration.name] = declaration
