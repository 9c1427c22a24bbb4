"""HTML by construction: whatever is not markup already is escaped, so that no name or text of a user's can
become markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

VOID = frozenset({"meta", "link", "input", "br", "col", "path", "line", "rect"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Markup | int | None | Iterable[Any]


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """One element. Text is escaped, lists are laid out flat, None is left out.

    Attributes: `class_` is `class`, `data_label` is `data-label`; True writes the bare name, None and False
    nothing.
    """
    written = "".join(
        _attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    if name in VOID:
        return Markup(f"<{name}{written}>" if name not in ("path", "line", "rect") else f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Children one after the other, escaped where they are not markup."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str | int):
            parts.append(escape(str(child)))
        elif child is not None:
            parts.append(join(*child))
    return Markup("".join(parts))


def data(identifier: str, value: Any) -> Markup:
    """A block of JSON for a script to read. No text in it can end the block: `<` is written as an escape."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{escape(identifier)}">{text}</script>')


def _attribute(key: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    return f" {key}" if value is True else f' {key}="{escape(str(value))}"'
