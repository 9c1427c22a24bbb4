"""The shapes that attention is called with in a followed step, against those of the model before anything was split.

Tensor parallelism gives a rank some of the heads, context parallelism some of the rows, and neither changes anything else.
A forward that makes heads with `view(batch, -1, heads, size)` and reads `heads` of the whole model turns features that are
missing into rows that are missing: every size fits, nothing fails, and attention is among wrong rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer import torch_private
from parallelizer.compiler.observe.attention_calls import CallShape, every_call
from parallelizer.compiler.observe.flex_attention import fused
from parallelizer.compiler.observe.running_module import Running
from parallelizer.language.plan import TENSOR_AXES
from parallelizer.language.workload import Workload
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel import intercept

Calls = Mapping[str, list[CallShape]]


@dataclass(frozen=True)
class OtherShape:
    """An attention call in `module` that has another shape than a rank's part of the `whole` model's; `expected` is that
    part, with its heads split.
    """

    module: str
    seen: CallShape
    expected: CallShape
    whole: CallShape

    @property
    def heads(self) -> tuple[int, int]:
        """The whole model's query and key-value heads."""
        return self.whole.queries, self.whole.keys

    def described(self) -> str:
        """What it is given, and what it should be."""
        seen, expected = self.seen, self.expected
        said = f"is given {_queries(seen)}"
        keys = seen.queries == expected.queries and seen.rows == expected.rows and seen.size == expected.size
        if keys:
            said += f" and {_keys(seen)}"
        said += f", and a rank should have {_queries(expected)}"
        return f"{said} and {_keys(expected)}" if keys else said


@dataclass(frozen=True)
class Rank:
    """What one rank has of a sequence and of heads.

    `lengths` are those of whole sequences with those of a rank's parts, `cp` is the number of parts, `splits` are the
    numbers of ranks that heads may be shared out over, and `batch` is the number of sequences. `inside` says that a rule
    splits the sequence somewhere in the model.
    """

    lengths: Mapping[int, int]
    cp: int
    splits: tuple[int, ...]
    batch: int
    inside: bool

    def fits(self, seen: CallShape, whole: CallShape) -> bool:
        """Whether a call is a rank's part of the whole model's."""
        return (
            (seen.size, seen.value_size) == (whole.size, whole.value_size)
            and seen.batch in {whole.batch, *(() if whole.batch == self.batch else (whole.batch // self.cp,))}
            and seen.rows in self.rows(whole.rows)
            and seen.key_rows in self.rows(whole.key_rows)
            and any(
                # Of fewer key heads than ranks, each has the one that its query heads share.
                seen.queries * n == whole.queries and seen.keys == max(1, whole.keys // n)
                for n in self.splits
            )
        )

    def rows(self, whole: int) -> tuple[int, ...]:
        """How many rows a rank may have of so many, the likeliest first."""
        if self.cp == 1:
            return (whole,)
        padded = -(-whole // (2 * self.cp)) * 2
        if self.inside:
            return (padded, whole)
        if whole in self.lengths:
            return (self.lengths[whole],)
        return (whole, whole // self.cp) if whole % self.cp == 0 else (whole,)

    def part_of(self, whole: CallShape) -> CallShape:
        """A rank's part of a call, its heads split as far as they can be."""
        n = max(n for n in self.splits if whole.queries % n == 0)
        keys, rows = max(1, whole.keys // n), self.rows(whole.rows)[0]
        return CallShape(
            whole.batch, whole.queries // n, keys, rows, self.rows(whole.key_rows)[0], whole.size, whole.value_size
        )  # fmt: skip


def whole_attention(program: Program, model: nn.Module, workload: Workload, rows: int) -> Calls:
    """The attention calls of a model that nothing was done to, by module, on `rows` sequences; none where nothing that
    splits heads or rows is in the program, or the model is not on meta.
    """
    if program.mesh.size("cp", *TENSOR_AXES) == 1 or not any(p.is_meta for p in model.parameters()):
        return {}
    calls = every_call(model, workload, rows, program.plan)
    return {path: [call.shape for call in made] for path, made in calls.items()}


@contextmanager
def watch_attention(
    program: Program,
    whole: Calls,
    batch: Mapping[str, torch.Tensor],
    local: Mapping[str, torch.Tensor],
    running: Running,
) -> Iterator[list[OtherShape]]:
    """Watch a forward of `local`, a rank's part of a `batch`; what is yielded has the calls of another shape when it ends,
    by an error too.
    """
    found: list[OtherShape] = []
    if not whole:
        yield found
        return
    sizes, plan = program.mesh.sizes, program.plan.batch
    split = {n: b.dim for n, b in plan.items() if b.dim is not None and b.make is None and n in batch}
    lengths = {batch[n].shape[dim]: local[n].shape[dim] for n, dim in split.items()}
    axes = [sizes[a] for a in TENSOR_AXES if sizes[a] > 1]
    splits = [math.prod(some) for n in range(len(axes) + 1) for some in itertools.combinations(axes, n)]
    inside = any(a.slot == "io" and "cp" in a.axes for a in program)
    rows = next(iter(batch.values())).shape[0] if batch else 1
    rank = Rank(lengths, sizes["cp"], tuple(sorted(set(splits))), rows, inside)
    seen = _Shapes(running)
    try:
        with seen, intercept.observed(seen.note):
            yield found
    finally:
        found += _compared(seen.found, whole, rank)


def _compared(seen: Calls, whole: Calls, rank: Rank) -> Iterator[OtherShape]:
    """The calls that do not fit, the first of each module. A forward that ended early has made fewer."""
    for path, calls in seen.items():
        known = whole.get(path, [])
        for index, call in enumerate(calls):
            if index >= len(known):
                break
            if not rank.fits(call, known[index]):
                yield OtherShape(path, call, rank.part_of(known[index]), known[index])
                break


class _Shapes(TorchFunctionMode):
    """Notes the shapes of attention calls by the module that is running."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self.running = running
        self.found: dict[str, list[CallShape]] = {}
        self.flex = torch_private.FlexCalls(self._flex)

    def __exit__(self, *error: Any) -> None:
        self.flex.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What context parallelism takes is shown by it, and what it calls itself is no call of the model's.
        if func is F.scaled_dot_product_attention and not intercept.is_running():
            self.note(*_first_three(*args, **kwargs))
        answer = self.flex(func, args, kwargs)
        return func(*args, **kwargs) if answer is torch_private.NOT_FLEX else answer

    def _flex(self, call: torch_private.FlexCall) -> torch_private.FlexAnswer:
        if not intercept.is_running():
            self.note(call.query, call.key, call.value)
        return fused(call)

    def note(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Note one call of the module that is running."""
        shape = CallShape.of(query, key, value)
        if shape is not None:
            self.found.setdefault(self.running.current, []).append(shape)


def _first_three(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    return query, key, value


def _queries(shape: CallShape) -> str:
    return f"{shape.queries} query heads of size {shape.size} for {shape.rows} rows"


def _keys(shape: CallShape) -> str:
    return f"{shape.keys} key heads for {shape.key_rows} rows"
