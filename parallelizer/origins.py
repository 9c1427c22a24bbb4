"""Where a key of the composed configuration was written: on the command line, or in which line of which file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parallelizer.diagnostics import PlanError, Span
from parallelizer.source import MappingNode, Node, Scalar, SequenceNode, read_file, shown_path


@dataclass(frozen=True)
class Origins:
    """The overrides of the command line, the chosen option of each config group, and the folders that are searched, in order."""

    overrides: Sequence[str] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[Path] = ()
    root: str = "train"

    def span(self, key: str) -> Span | None:
        """The narrowest place that set `key`, a dotted path; None when nothing is known of it."""
        return self._override(key) or self._file(key)

    def _override(self, key: str) -> Span | None:
        for override in reversed(self.overrides):
            name, _, value = override.partition("=")
            name = name.lstrip("+~")
            if name in self.choices and name != key:
                continue
            if name == key or key.startswith(name + "."):
                start = len(override) - len(value) + 1
                return Span(f"<override {override}>", 1, start, max(start + len(value), start + 1))
        return None

    def _file(self, key: str) -> Span | None:
        parts = key.split(".")
        group = parts[0]
        if group in self.choices:
            found = self._search(f"{group}/{self.choices[group]}", parts[1:])
            if found:
                return found
        return self._search(self.root, parts)

    def _search(self, name: str, parts: Sequence[str], depth: int = 0) -> Span | None:
        """The key's place in a config file, or in the files of its defaults list, the last one first."""
        path = next((f / f"{name}.yaml" for f in self.folders if (f / f"{name}.yaml").is_file()), None)
        if path is None or depth > 8:
            return None
        shown = shown_path(path)
        try:
            node = read_file(str(path), shown)
        except PlanError:
            return None
        if not isinstance(node, MappingNode):
            return None
        found = _locate(node, parts)
        if found:
            return found
        defaults = node.get("defaults")
        for item in reversed(defaults.items if isinstance(defaults, SequenceNode) else ()):
            if isinstance(item, Scalar) and item.text != "_self_":
                base = item.text.lstrip("/") if item.text.startswith("/") else f"{name.rpartition('/')[0]}/{item.text}".lstrip("/")
                found = self._search(base, parts, depth + 1)
                if found:
                    return found
        return Span(shown) if depth == 0 and not parts else None


def _locate(node: Node, parts: Sequence[str]) -> Span | None:
    for part in parts:
        if isinstance(node, MappingNode):
            below = node.get(part)
        elif isinstance(node, SequenceNode) and part.isdigit() and int(part) < len(node.items):
            below = node.items[int(part)]
        else:
            return None
        if below is None:
            return None
        node = below
    return node.span

