"""The text of a proposed plan file: the one writer, for `init` and `import-plan`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDEST_KEY = 60
"""A key that is longer stands in no column."""


@dataclass(frozen=True)
class PlanLine:
    """One rule: a glob, the texts of its styles, and a comment."""

    glob: str
    styles: tuple[str, ...]
    comment: str = ""


@dataclass(frozen=True)
class Section:
    """Lines whose comments stand in one column, and comments above and below them."""

    lines: tuple[PlanLine, ...]
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """How lines are set. `width` is the widest line, `room` the columns of it that a comment needs, `widest_styles` what has
    a comment in the common column; `gap` and `comment` stand before the styles and before a comment. Where a rule is too
    long for one line, its styles stand below its key (`styles_below`), or else its comment stands above it.
    """

    width: int
    gap: str
    comment: str
    room: int = 0
    widest_styles: int | None = None
    styles_below: bool = False


def plan_text(
    form: Form,
    header: Sequence[str],
    sections: Sequence[Section],
    *,
    layouts: Sequence[str] = (),
    buffers: Mapping[str, Mapping[str, str]] | None = None,
    about_buffers: str = "",
) -> str:
    """The YAML text of a plan. `header` are the lines of the comment on top, `layouts` those of the layouts, `buffers` the
    entries of the batch and of the model as texts, with `about_buffers` as their comment.
    """
    text = [f"# {line}".rstrip() for line in header]
    text.append("version: 1")
    if layouts:
        text += ["layouts:", *(f"  {line}" for line in layouts)]
    text.append("rules:")
    keys = (len(_key(line.glob)) for section in sections for line in section.lines)
    column = max((length for length in keys if length <= WIDEST_KEY), default=0)
    for section in sections:
        text += [f"  # {line}" for line in section.above]
        text += _aligned(section.lines, column, form)
        text += [f"  # {line}" for line in section.below]
    if buffers:
        text.append(f"buffers:{form.comment}{about_buffers}" if about_buffers else "buffers:")
        for kind, entries in buffers.items():
            text.append(f"  {kind}: {{{', '.join(f'{name}: {value}' for name, value in entries.items())}}}")
    return "\n".join(text) + "\n"


def _aligned(lines: Sequence[PlanLine], keys: int, form: Form) -> list[str]:
    """The lines of a section: keys, styles and comments in columns, and what is too long for its line on several."""
    start = 2 + keys + len(form.gap)
    lengths = [len(_styles(line.styles)) for line in lines]
    short = [
        length
        for length in lengths
        if start + length <= form.width - form.room and length <= (form.widest_styles or length)
    ]
    column = start + max(short, default=0)
    return [text for line in lines for text in _set(line, keys, column, form)]


def _set(line: PlanLine, keys: int, column: int, form: Form) -> list[str]:
    """One rule, on as few lines as it fits on."""
    key, styles = _key(line.glob), _styles(line.styles)
    comment = f"{form.comment}{line.comment}" if line.comment else ""
    row = f"  {key:<{keys}}{form.gap}{styles}"
    if form.styles_below:
        if len(row) <= form.width - form.room:
            return [f"{row:<{column}}{comment}".rstrip()]
        if not comment and len(row) <= form.width:
            return [row]
        return [f"  {key}{comment}", f"    {styles}"]
    beside = (f"{row:<{column}}{comment}", f"{row}{comment}") if comment else (row,)
    fitting = next((text for text in beside if len(text) <= form.width), None)
    if fitting is not None:
        return [fitting]
    above = textwrap.wrap(line.comment, form.width, initial_indent="  # ", subsequent_indent="  # ")
    if len(row) <= form.width or len(line.styles) == 1:
        return [*above, row]
    return [*above, f"  {key}", *(f"    - {style}" for style in line.styles)]


def _styles(styles: Sequence[str]) -> str:
    return styles[0] if len(styles) == 1 else f"[{', '.join(styles)}]"


def _key(glob: str) -> str:
    """The glob as a key that YAML takes for text."""
    plain = re.fullmatch(r"[A-Za-z_][\w.*{},\[\]-]*", glob)
    return f"{glob}:" if plain else f'"{glob}":'


def quoted_in_a_map(glob: str) -> str:
    """The glob as a key in a map of one line, where braces and commas are YAML's."""
    return f'"{glob}"' if re.search(r"[*{}\[\],]", glob) else glob
