"""Which numbers a forward that failed had read, and which of them count what tensor parallelism splits: what to
`divide`.

A forward that says `view(..., self.heads, self.head_dim)` has sizes of the whole model in it, and meets the features of
one rank. What it read is told by its code, and what failed by the sizes in the error.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from parallelizer.compiler.observe.attribute_reads import flowing_into, named_in
from parallelizer.styles.application import Application, Program
from parallelizer.styles.attributes import read

_LIST = re.compile(r"\[(-?\d+(?:, -?\d+)*)\]")
_SIZES = re.compile(r"shape|size|split|unpack|view|dim|expand")
IN_PLACE = "is a view and is being modified inplace"
"""What autograd says of the plain form of a DTensor, which torch hands on as a view: its sizes do not matter."""
_TORCH = str(Path(torch.__file__).parent)
QUOTED_ROOT = '""'


@dataclass(frozen=True)
class WholeNumbers:
    """Attributes that the forward of `module` reads, with their values, in the order of its code. One that the degree of tp does
    not divide is alone: the number of heads of which ranks share one.

    `certain` says that their values are the sizes that did not fit; otherwise some of them may be.
    """

    module: str
    values: dict[str, int]
    certain: bool


def whole_numbers_of(
    error: BaseException, degree: int, path_of: Callable[[nn.Module], str | None]
) -> WholeNumbers | None:
    """The numbers that flow into the statement that failed and that `degree` divides, those that did not fit alone if that can
    be told; None if the error is about something else. A number that merely equals a size in the error is left out.

    What fails in a module of torch's own was said by the module around it.
    """
    if degree < 2 or not _SIZES.search(str(error)) or IN_PLACE in str(error):
        return None
    for frame, line in reversed(list(_frames(error))):
        module, code = frame.f_locals.get("self"), frame.f_code
        if not isinstance(module, nn.Module) or type(module).__module__.startswith("torch."):
            continue
        path = path_of(module)
        if path is None or code.co_filename.startswith(_TORCH):
            continue
        flowing = {name: read(module, name) for name in flowing_into(code, line)}
        counting = {n: v for n, v in flowing.items() if v is not None and v > 1}
        if few := _fewer(counting, degree, str(error), named_in(code, line)):
            return WholeNumbers(path, few, True)
        read_here = {n: v for n, v in counting.items() if v % degree == 0}
        found = _told_apart(read_here, str(error), named_in(code, line))
        return WholeNumbers(path, *found) if found[0] else None
    return None


def heads_read(
    path: str, module: nn.Module, heads: Iterable[int], size: int, degree: int
) -> WholeNumbers | None:
    """The numbers that the forward of the module at `path` reads and that are one of these numbers of heads; None if it
    reads none. Where a head's `size` is the same number, a name that says so is not taken for a number of
    heads.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or degree < 2:
        return None
    counts = {n for n in heads if n > 1 and n % degree == 0}
    found = {name: value for name, value in _read_by(code, module).items() if value in counts}
    counting = {n: v for n, v in found.items() if v != size or not n.endswith(("dim", "size"))}
    return WholeNumbers(path, counting or found, True) if found else None


def advised(program: Program, found: WholeNumbers | None, otherwise: str) -> tuple[str, Application | None]:
    """What to write, and what stands at the module or in it; `otherwise`, and None, where nothing in it is split, or
    it is divided already.
    """
    if found is None:
        return otherwise, None
    module = found.module
    split = [a for a in program.of_slot("params") if _is_inside(a.module, module) and _is_split(a)]
    own = [a for a in program.of_slot("params", "io") if a.module == module]
    if not split or any(found.values.keys() & a.divided.keys() for a in own):
        return otherwise, None
    rule = next((a for a in own if a.slot == "params"), own[0] if own else None)
    text = _advice(found, rule, program.mesh.sizes["tp"])
    return (text, rule or split[0]) if found.certain else (f"{otherwise}; or {text}", None)


def _advice(found: WholeNumbers, rule: Application | None, degree: int) -> str:
    what = ", ".join(f"`{name}` ({value})" for name, value in found.values.items())
    if any(value % degree for value in found.values.values()):
        [(name, value)] = found.values.items()
        return (
            f"the forward of {found.module or 'the root'} reads {what} of the unsharded model, which tp={degree} does not "
            f"divide: write -1 in place of `{name}` in the forward, as in `view(batch, sequence, -1, size)`, which takes the "
            f"heads that a rank has, or use a tp that divides {value}"
        )
    reads = f"the forward of {found.module or 'the root'} reads {what} of the unsharded model"
    names = ", ".join([*(rule.divided if rule else ()), *found.values])
    if found.certain:
        reads += f", but a rank has {', '.join(str(v // degree) for v in found.values.values())}"
    else:
        reads += "; divide those that count what tp splits"
        names = f"{next(iter(found.values))}, ..." if len(found.values) > 1 else names
    style = f"{{style: shard-params, divide: [{names}]}}"
    if rule is not None and rule.style in ("shard-params", "colwise", "rowwise"):
        return f"{reads}: write `divide: [{names}]` in the rule `{rule.rule.key}`"
    if rule is not None and rule.rule.key:
        return f"{reads}: add `{style}` to the rule `{rule.rule.key}`"
    glob = ".".join("*" if segment.isdigit() else segment for segment in found.module.split("."))
    return f"{reads}: add the rule `{glob or QUOTED_ROOT}: {style}`"


def _frames(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame, entry.tb_lineno
        entry = entry.tb_next


def _read_by(code: types.CodeType, module: nn.Module) -> dict[str, int]:
    """The whole numbers of a module that a function's code names, or a method that it calls."""
    names: list[str] = []
    for name in named_in(code):
        method = getattr(type(module), name, None)
        names += named_in(method.__code__) if isinstance(method, types.FunctionType) else [name]
    found = {name: read(module, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _fewer(values: Mapping[str, int], degree: int, text: str, statement: Sequence[str]) -> dict[str, int]:
    """The outermost size of a view, if ranks are a multiple of that number: each has one of them, which `divide` cannot say."""
    listed = _LIST.search(text)
    if listed is None or "shape" not in text:
        return {}
    sizes = [int(n) for n in listed[1].split(", ")]
    first = next(iter(_in_place(values, sizes, statement).items()), None) if -1 not in sizes else None
    return {first[0]: first[1]} if first and first[1] < degree and degree % first[1] == 0 else {}


def _told_apart(values: dict[str, int], text: str, statement: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Those of the numbers read that are the sizes in the error, or stand in the statement; and whether it is certain."""
    listed = _LIST.search(text)
    sizes = [int(n) for n in listed[1].split(", ")] if listed else []
    if -1 in sizes:
        # That dimension takes what there is: it is an earlier size that does not fit.
        return {name: value for name, value in values.items() if value not in sizes}, False
    exact = _in_place(values, sizes, statement)
    if "split" not in text:
        # Neighbouring features share a head: of what features are viewed as, the outermost is split.
        exact = dict([*exact.items()][:1])
    if exact:
        return exact, "split" in text or "shape" in text
    factors = {n: v for n, v in values.items() if not sizes or any(size % v == 0 for size in sizes)}
    stated = {name: value for name, value in factors.items() if name in statement}
    return (stated, len(stated) == 1) if stated else (factors, False)


def _in_place(values: Mapping[str, int], sizes: Sequence[int], statement: Sequence[str]) -> dict[str, int]:
    """The numbers that are sizes, where each stands: from the last on, because the sizes of the batch and of the sequence, which
    may be equal to others, come first.
    """
    placed: dict[str, int] = {}
    names = sorted(values, key=lambda n: statement.index(n) if n in statement else -1)
    end = len(sizes)
    for name in reversed(names):
        at = next((i for i in reversed(range(end)) if sizes[i] == values[name]), None)
        if at is not None:
            placed, end = {name: values[name], **placed}, at
    return placed


def _is_inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _is_split(a: Application) -> bool:
    return any(p.dim is not None for by_axis in a.params.values() for p in by_axis.values())
