"""Views of what can be split whose sizes are numbers that no plan can divide, and the edit after which they follow."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Span

_SIZES = re.compile(r"shape '\[(-?\d+(?:, -?\d+)*)\]'")


_SHAPES = "[attention-shape]"
"""The code of a refusal of the shapes that an attention has come to."""


@dataclass(frozen=True)
class CountedView:
    """A call of `view` or `reshape` with a number for the dimension `dim`, counted from the end, that a rank has a part of.

    `sizes` are the sizes that it was given, without those of the batch and the sequence, which have None.
    """

    at: Span
    dim: int
    sizes: tuple[int | None, ...]

    def fails_in(self, text: str) -> bool:
        """Whether an error is about these sizes."""
        return any(
            len(sizes := [int(n) for n in found.split(", ")]) == len(self.sizes)
            and all(own in (None, n) for own, n in zip(self.sizes, sizes, strict=True))
            for found in _SIZES.findall(text)
        )


def reason(views: Iterable[CountedView], refusal: str) -> str | None:
    """What of these views is in the way where a plan is refused, in words, and what would follow; None where none is."""
    known = list(dict.fromkeys(views))
    if _SHAPES not in refusal and not any(view.fails_in(refusal) for view in known):
        return None
    said: dict[str, list[str]] = {}
    for view in known:
        written = f"`{source(view.at)}`"
        if (edit := _edit(view)) is not None:
            written += f", which could be `{edit}`"
        else:
            written += ", where the plan could divide an attribute of the module instead of a number"
        said.setdefault(written, []).append(f"{view.at.file}:{view.at.line}")
    if not said:
        return None
    lines = "; ".join(f"{', '.join(dict.fromkeys(places))}: {written}" for written, places in said.items())
    return f"the forward contains a size of the whole model, and a rank has only a part: {lines}"


def source(span: Span) -> str:
    """What is written there, on one line, without what a method is called on."""
    line = linecache.getline(span.file, span.line)
    text = line[span.column - 1 : span.end_column - 1] if span.end_column > span.column else ""
    call = _call(text)
    if call is None:
        return " ".join((text or line).split())
    return _written(call, call.args)


def _edit(view: CountedView) -> str | None:
    line = linecache.getline(view.at.file, view.at.line)
    call = _call(line[view.at.column - 1 : view.at.end_column - 1])
    if call is None:
        return None
    sizes = list(call.args)
    if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
        sizes = list(sizes[0].elts)
    if -view.dim > len(sizes) or any(isinstance(s, ast.Starred) for s in sizes[view.dim :]):
        return None
    sizes[view.dim] = ast.parse("-1", mode="eval").body
    return _written(call, sizes)


def _call(text: str) -> ast.Call | None:
    """A call of a method `view` or `reshape`."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    is_view = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute)
    return tree if is_view and tree.func.attr in ("view", "reshape") and not tree.keywords else None  # type: ignore[attr-defined, return-value]


def _written(call: ast.Call, sizes: Sequence[ast.expr]) -> str:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else "view"
    return f"{name}({', '.join(ast.unparse(s) for s in sizes)})"
