"""Which numbers a forward that failed had read, and which of them count what tensor parallelism splits: what to
`divide`.

A forward that says `view(..., self.heads, self.head_dim)` has sizes of the whole model in it, and meets the features of
one rank. What it read is told by its code, and what failed by the sizes in the error.
"""

from __future__ import annotations

import ast
import linecache
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from parallelizer.program import Application, Program
from parallelizer.styles.attributes import numbers, read

_LIST = re.compile(r"\[(-?\d+(?:, -?\d+)*)\]")
_NUMBER = re.compile(r"(?<![\w.])\d+")
_SIZES = re.compile(r"shape|size|split|reshape|unpack|view|dimension|expand")


@dataclass(frozen=True)
class WholeNumbers:
    """Attributes of the module that failed, with their values, in the order of the code that reads them.

    `certain` says that their values are the sizes that did not fit; otherwise some of them may be.
    """

    values: dict[str, int]
    certain: bool

    @property
    def names(self) -> str:
        """As `divide` lists them."""
        return ", ".join(self.values)


def whole_numbers_of(error: BaseException, degree: int) -> WholeNumbers | None:
    """The numbers that the failing forward of a user's module read and that `degree` divides, those that did not fit
    alone if that can be told; None if the error is about something else.
    """
    if degree < 2 or not _SIZES.search(str(error)):
        return None
    for frame, line in reversed(list(_frames(error))):
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module) or frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl"):
            continue
        read_here = {n: v for n, v in _read_by(frame.f_code, module).items() if v > 1 and v % degree == 0}
        return _told_apart(read_here, str(error), _statement(frame.f_code, line)) if read_here else None
    return None


def advice(found: WholeNumbers, rule: Application | None, glob: str, degree: int) -> str:
    """What to write. `rule` is what stands on the module already, `glob` names it and its like."""
    what = ", ".join(f"`{name}` ({value})" for name, value in found.values.items())
    divided = ", ".join(str(value // degree) for value in found.values.values())
    reads = f"its forward reads {what}, of the whole model, and a rank has {divided}"
    if not found.certain:
        reads = f"its forward reads {what}, of the whole model: those that count what tp={degree} splits must be divided"
    style = f"{{style: shard-params, divide: [{found.names}]}}"
    if rule is not None and rule.style in ("shard-params", "colwise", "rowwise"):
        return f"{reads}: write `divide: [{found.names}]` in the rule `{rule.rule.key}`"
    if rule is not None and rule.rule.key:
        return f"{reads}: add `{style}` to the rule `{rule.rule.key}`"
    return f"{reads}: add the rule `{glob}: {style}`"


def advised(
    program: Program, module: str, found: WholeNumbers | None
) -> tuple[str, Application | None] | None:
    """The advice for a module of the program, and what stands on it already. None where nothing in it is split, or it
    is divided already.
    """
    split = [a for a in program.of_slot("params") if _is_inside(a.module, module) and _is_split(a)]
    own = [a for a in program.of_slot("params", "io") if a.module == module]
    if found is None or not split or any(found.values.keys() & a.divided.keys() for a in own):
        return None
    rule = next((a for a in own if a.slot == "params"), own[0] if own else None)
    return advice(found, rule, _glob(module), program.mesh.sizes["tp"]), rule or split[0]


def _frames(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame, entry.tb_lineno
        entry = entry.tb_next


def _read_by(code: types.CodeType, module: nn.Module) -> dict[str, int]:
    """The whole numbers of a module whose names its code has as attributes."""
    names = set(code.co_names)
    found = {}
    for name in numbers(module):
        value = read(module, name)
        if value is not None and set(name.split(".")) <= names:
            found[name] = value
    order = {name: index for index, name in enumerate(code.co_names)}
    return dict(sorted(found.items(), key=lambda item: order[item[0].rpartition(".")[2]]))


def _told_apart(values: dict[str, int], text: str, statement: frozenset[str]) -> WholeNumbers | None:
    """Those of the numbers read that are the sizes in the error, or stand in the statement."""
    listed = _LIST.search(text)
    sizes = [int(n) for n in listed[1].split(", ")] if listed else [int(n) for n in _NUMBER.findall(text)]
    if -1 in sizes:
        # That dimension takes what there is: it is an earlier size that does not fit.
        rest = {name: value for name, value in values.items() if value not in sizes}
        return WholeNumbers(rest, False) if rest else None
    matching = [size for size in sizes if size in values.values()]
    if matching and "split" not in text:
        # Neighbouring features share a head: of what features are viewed as, the outermost is split.
        matching = matching[:1]
    exact = {name: value for name, value in values.items() if value in matching}
    if exact:
        return WholeNumbers(exact, True)
    stated = {name: value for name, value in values.items() if name.rpartition(".")[2] in statement}
    return WholeNumbers(stated, len(stated) == 1) if stated else WholeNumbers(values, False)


def _statement(code: types.CodeType, line: int) -> frozenset[str]:
    """The names of attributes in the statement of a line."""
    lines = linecache.getlines(code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return frozenset()
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return frozenset()
    innermost = max(around, key=lambda node: node.lineno)
    return frozenset(node.attr for node in ast.walk(innermost) if isinstance(node, ast.Attribute))


def _is_inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _is_split(a: Application) -> bool:
    return any(p.dim is not None for by_axis in a.params.values() for p in by_axis.values())


def _glob(path: str) -> str:
    segments: Sequence[str] = path.split(".")
    return ".".join("*" if segment.isdigit() else segment for segment in segments) or '""'
