"""One traced layer for a class of candidates: its operators by sizes, and its memory.

The candidates of a class differ in the rows of a data rank and in the number of shards. A class is traced once: a short model,
on two shards. Sizes that are numbers of tokens grow with the rows. What FSDP shards shrinks with the shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from parallelizer.compiler.observe.equal_layers import SHORT, Run
from parallelizer.simulate.record.memory import MemoryChange
from parallelizer.simulate.record.operators import ATTENTION, GEMM, Issued, Moment, Operator
from parallelizer.simulate.record.trace import Recording

SHARDED = ("parameters", "gradients", "optimizer")
"""What FSDP shards."""

WEIGHTS = "weights"
"""Temporaries with the sizes of whole weights: gradients that are not reduced yet, and what is sent for them."""

BY_ROWS = ("activations", "temporaries", "collectives", "received")
"""What grows with the rows, and is there while a layer or the head runs."""

ROWS = (0.25, 1.0, 4.0, 16.0)
"""How many times the traced rows the moments are compared at: another may be the highest there."""

KEPT = ("activations", "collectives")
"""What a layer keeps for its backward."""

IN_STEP = ("forward", "loss", "backward")


@dataclass(frozen=True)
class Spot:
    """A moment of the step at which memory is in use: bytes of the categories, and the number of layers whose activations a
    longer model holds there and the short one does not, as a share of those: 1 until the backward of the last layer, 0 behind.
    `whole` is the number of the short model's layers whose activations are there, without the layer that runs.
    """

    phase: str
    held: float
    use: Mapping[str, int]
    whole: int = 0


@dataclass(frozen=True)
class ClassTrace:
    """`line` is the step of a model with SHORT of the `layers` equal layers, or of the whole model without any. `tokens` are
    those of a rank, of `rows` rows; `shards` is the number of shards. `numel` are the parameters of a layer, and of all
    others. `spots` are the moments that may be the highest, for `ROWS` each, `layer` the activations of one layer behind forward.
    `experts` are modules whose rows are several for each token, and `sizes` the sizes of parameters.
    """

    line: tuple[Moment, ...]
    rows: int
    tokens: int
    shards: int
    run: Run | None
    layers: int
    numel: tuple[int, int]
    spots: tuple[Spot, ...]
    layer: int
    experts: frozenset[str] = frozenset()
    sizes: frozenset[int] = frozenset()

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.numel[0] + self.numel[1]

    @property
    def traced_parameters(self) -> int:
        """Of the short model."""
        return (SHORT if self.run else 0) * self.numel[0] + self.numel[1]

    def at_rows(self, rows: int) -> Iterator[Moment]:
        """The line of another number of rows, without FSDP's collectives."""
        factor = rows / self.rows
        for moment in self.line:
            if isinstance(moment, Operator):
                yield _resized(moment, self._rows_of(moment), factor)
            elif isinstance(moment, Issued):
                if not moment.unit:
                    yield _more_bytes(moment, factor)
            else:
                yield moment

    def _rows_of(self, operator: Operator) -> frozenset[int]:
        """The sizes of a product that are numbers of rows: the tokens, and of experts their copies."""
        if operator.kind != GEMM or not operator.sizes or operator.module not in self.experts:
            return frozenset((self.tokens,))
        copies = (n for n in operator.sizes[1:] if n % self.tokens == 0 and n not in self.sizes)
        return frozenset((self.tokens, *copies))

    @functools.cached_property
    def highest(self) -> tuple[Spot, ...]:
        """The spots, each once: one may be the highest for several numbers of rows."""
        return tuple(
            {(spot.phase, spot.held, spot.whole, *spot.use.items()): spot for spot in self.spots}.values()
        )

    @functools.cached_property
    def workspace(self) -> tuple[int, int]:
        """Bytes in use beyond what lasts, the states, the gathered parameters and the layers' activations: while a layer runs,
        and while the head does.
        """
        layer = self._workspace("backward", held=True)
        return layer, max(self._workspace("loss"), self._workspace("backward"))

    @functools.cached_property
    def whole_weights(self) -> int:
        """The most bytes of temporaries with the sizes of whole weights while a layer runs backward."""
        return max((s.use[WEIGHTS] for s in self.spots if s.phase == "backward" and s.held == 1.0), default=0)

    def _workspace(self, phase: str, *, held: bool = False) -> int:
        found = [
            sum(spot.use[category] for category in BY_ROWS) - 3 * self.layer
            for spot in self.spots
            if spot.phase == phase and (not held or spot.held == 1.0)
        ]
        return max(found, default=0)

    def place(self, path: str) -> int | None:
        """The index of the layer that a module belongs to; None for others."""
        return None if self.run is None else self.run.split(path)[1]


def class_trace(
    recording: Recording,
    model: nn.Module,
    run: Run | None,
    rows: int,
    tokens: int,
    shards: int,
    experts: frozenset[str] = frozenset(),
    parts: Sequence[int] = (1,),
) -> ClassTrace:
    """What a recording says of its class. `model` is the whole one, unsharded; over tp and ep its weights are cut into one of
    the numbers of `parts`.
    """
    inside = outside = 0
    for name, param in model.named_parameters():
        index = None if run is None else run.split(name)[1]
        if index is None:
            outside += param.numel()
        elif index == 1:
            inside += param.numel()
    short = None if run is None else dataclasses.replace(run, count=SHORT)
    spots, layer = _memory(recording, short, _weight_sizes(recording, model, parts))
    sizes = frozenset(size for param in model.parameters() for size in param.shape)
    return ClassTrace(
        recording.line,
        rows,
        tokens,
        shards,
        short,
        run.count if run else 0,
        (inside, outside),
        spots,
        layer,
        experts,
        sizes,
    )


def _resized(operator: Operator, tokens: frozenset[int], factor: float) -> Operator:
    if factor == 1.0 or operator.phase not in IN_STEP:
        return operator
    if operator.kind == GEMM and operator.sizes:
        batch, m, n, k = operator.sizes
        if tokens & {m, n, k}:
            m, n, k = (round(x * factor) if x in tokens else x for x in (m, n, k))
        elif batch > 1:
            batch = round(batch * factor)
        return dataclasses.replace(operator, sizes=(batch, m, n, k))
    if operator.kind == ATTENTION and operator.sizes:
        batch, *others = operator.sizes
        return dataclasses.replace(operator, sizes=(round(batch * factor), *others))
    if operator.copies:
        return operator
    return dataclasses.replace(operator, moved=round(operator.moved * factor))


def _more_bytes(issued: Issued, factor: float) -> Issued:
    entry = issued.entry
    if factor == 1.0 or entry.phase not in IN_STEP:
        return issued
    sizes = {name: round(getattr(entry, name) * factor) for name in ("payload_bytes", "wire_bytes")}
    return dataclasses.replace(issued, entry=dataclasses.replace(entry, **sizes))


@dataclass
class _Course:
    use: dict[str, int]
    best: dict[tuple[object, ...], Spot] = field(default_factory=dict)
    heights: dict[tuple[object, ...], float] = field(default_factory=dict)

    def note(self, phase: str, held: float, group: object, whole: int) -> None:
        """Keep the highest of the moments that a longer model or more shards move alike, for fewer rows and for more."""
        fixed = sum(n for category, n in self.use.items() if category not in (*SHARDED, *BY_ROWS))
        grows = sum(self.use[category] for category in BY_ROWS)
        spot: Spot | None = None
        for times in ROWS:
            key, height = (phase, held, group, times), fixed + times * grows
            if height > self.heights.get(key, -1):
                spot = spot or Spot(phase, held, dict(self.use), whole)
                self.heights[key], self.best[key] = height, spot


def _weight_sizes(recording: Recording, model: nn.Module, parts: Sequence[int]) -> frozenset[int]:
    """The bytes of whole weights and of FSDP's units, in 16 and in 32 bits."""
    found = {
        param.numel() // part * width for param in model.parameters() for part in parts for width in (2, 4)
    }
    found |= {
        m.entry.payload_bytes * times // 2
        for m in recording.line
        if isinstance(m, Issued) and m.unit
        for times in (1, 2, 4)
    }
    return frozenset(found)


def _memory(recording: Recording, run: Run | None, weights: frozenset[int]) -> tuple[tuple[Spot, ...], int]:
    """The spots of a recorded step, and the activations that a layer in the middle leaves."""
    course = _Course({**recording.before, WEIGHTS: 0})
    behind: dict[int | None, int] = {}
    at_forward: dict[int, int] = {}
    backward_began = False
    last = SHORT - 1
    for change in recording.changes:
        _apply(course.use, change, weights)
        index = None if run is None else run.split(change.module)[1]
        if change.phase == "forward" and index is not None:
            at_forward[index] = sum(course.use[category] for category in KEPT)
        if change.phase == "backward" and index is not None:
            backward_began = backward_began or index == last
        held = _held(change.phase, index, last, at_forward, backward_began, behind)
        course.note(change.phase, held, index, _whole(change.phase, index, at_forward, behind))
    layer = at_forward.get(1, 0) - at_forward.get(0, 0)
    return tuple(course.best.values()), max(layer, 0)


def _held(
    phase: str,
    index: int | None,
    last: int,
    at_forward: Mapping[int, int],
    backward_began: bool,
    behind: dict[int | None, int],
) -> float:
    """The share of the layers that the short model lacks whose activations are there."""
    if phase == "forward":
        return 1.0 if last in at_forward else 0.0
    if phase == "loss":
        return 1.0
    if phase != "backward":
        return 0.0
    if index is not None:
        behind[None] = index
        return 1.0 if index >= 1 else 0.0
    # Between layers, and behind them: what is outside of all comes before the first and after the last.
    return 0.0 if backward_began and behind.get(None) == 0 else 1.0


def _whole(
    phase: str, index: int | None, at_forward: Mapping[int, int], behind: Mapping[int | None, int]
) -> int:
    """How many layers have left their activations, but for the one that runs."""
    if phase in ("forward", "backward") and index is not None:
        return index
    if phase == "forward":
        return len(at_forward)
    if phase == "backward":
        return behind.get(None, len(at_forward))
    return len(at_forward) if phase == "loss" else 0


def _apply(use: dict[str, int], change: MemoryChange, weights: frozenset[int]) -> None:
    whole = change.category in ("temporaries", "collectives") and abs(change.delta) in weights
    use[WEIGHTS if whole else change.category] += change.delta


def rows_to_trace(sequence: int, cp: int, shapes: Collection[Sequence[int]]) -> int:
    """The rows of a traced class: so few that no parameter has as many elements as a token's features of all tokens, or the
    number of tokens as a dimension.
    """
    sizes = {size for shape in shapes for size in shape}
    counts = {math.prod(shape) for shape in shapes}

    def confused(tokens: int) -> bool:
        return tokens in sizes or any(tokens * size * k in counts for size in sizes for k in (1, 2))

    return next((n for n in (1, 3, 5, 7, 11) if not confused(n * sequence // cp)), 1)
