"""Checks that a model's forward treats equal layers in the same way.

A forward that counts its layers (`if i == 4: keep.append(x)`) does this in a short model too, at another
layer or not at all. Before layers are folded, one forward of the whole model on meta tensors is therefore
compared operator by operator: the operators in and after each layer, and the sources of their inputs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelizer.compiler.observe.calling import call
from parallelizer.compiler.observe.equal_layers import Run
from parallelizer.compiler.observe.remembered_results import RememberedResults
from parallelizer.compiler.observe.running_module import Running
from parallelizer.language.workload import Workload
from parallelizer.torch_private import GroupedProducts, tree_leaves

BEFORE = -1
"""The segment of what runs before the first layer of the run."""


@dataclass(frozen=True)
class _Operation:
    """`facts` are the operator, the module without its layer's index, and the shapes that come out; `sources`
    the segments that its inputs were made in.
    """

    facts: tuple[Any, ...]
    sources: tuple[int, ...]


@dataclass
class _Segment:
    """One layer of the run, and what follows up to the next."""

    index: int
    operations: list[_Operation] = field(default_factory=list)


def treated_alike(model: nn.Module, workload: Workload, run: Run) -> bool:
    """Whether every layer of the run but the first and the last does the same with inputs from places that are
    as far away, or the same.

    `model` is on meta; it gets hooks: for a child process. False too when the forward does not run on meta.
    """
    watch = _OperationWatch(Running(model), run)
    try:
        with torch.device("meta"), torch.no_grad(), GroupedProducts(), watch:
            call(model, workload.example(1, workload.seq_len, "meta"))
    except Exception:  # the trace will say what is wrong, or that nothing is
        return False
    _, *layers = watch.segments
    if [s.index for s in layers] != list(range(run.count)):
        return False
    middle, last = layers[1:-1], layers[-1]
    following = all(_follows(a, b) for a, b in itertools.pairwise(middle))
    return following and all(_even(o.sources, len(middle) - 1) for o in last.operations)


class _OperationWatch(RememberedResults):
    """Notes every operation, by layer."""

    def __init__(self, running: Running, run: Run) -> None:
        super().__init__()
        self.running, self.run = running, run
        self.segments = [_Segment(BEFORE)]
        self.made: dict[int, tuple[int, torch.Tensor]] = {}  # held, so that nothing else gets its id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.result(func, args, kwargs or {})
        path, index = self.run.split(self.running.current)
        if index is not None and index != self.segments[-1].index:
            self.segments.append(_Segment(index))
        here = self.segments[-1]
        known = [self.made.get(id(value)) for value in tree_leaves((args, kwargs))]
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        facts = (func, path, tuple((tuple(t.shape), t.dtype) for t in tensors))
        here.operations.append(_Operation(facts, tuple(k[0] for k in known if k is not None)))
        for tensor in tensors:
            self.made.setdefault(id(tensor), (here.index, tensor))
        return result


def _follows(one: _Segment, other: _Segment) -> bool:
    """Whether `other` is `one`, one layer further."""
    return len(one.operations) == len(other.operations) and all(
        a.facts == b.facts and len(a.sources) == len(b.sources) and all(map(_moved, a.sources, b.sources))
        for a, b in zip(one.operations, other.operations, strict=True)
    )


def _moved(one: int, other: int) -> bool:
    """Whether a source is one layer further, or before them all."""
    return other == one + 1 or one == other <= 0


def _even(sources: Sequence[int], middle: int) -> bool:
    """Whether an operation behind the layers uses all middle ones, but for the last, equally often."""
    uses = Counter(s for s in sources if 1 <= s <= middle)
    return not uses or (len(uses) == middle and len(set(uses.values())) == 1)
