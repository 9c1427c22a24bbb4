"""The forward of the model before anything was split, beside the followed one, call by call.

A dimension that is cut over W ranks is W times as long in the whole model, every other one is as long, and a number that a
forward computes with is the same. Where a forward writes a width out, counts with the width of a rank's part, or leaves groups
undivided, the first call that is otherwise says so at its line. Only axes that split the model are compared: a rank's part of
the sequence is what both are given.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from parallelizer.compiler.observe.running_module import Running
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.package_folder import ROOT
from parallelizer.language.plan import TENSOR_AXES
from parallelizer.runtime.step import outcome_for_loss
from parallelizer.simulate.follow.parts import Part
from parallelizer.simulate.follow.varying import Varying, tensors_in
from parallelizer.simulate.follow.whole import lays_of
from parallelizer.styles.application import Program

TORCH, OURS, MODELS = str(Path(torch.__file__).parent), str(ROOT), str(ROOT / "models")
DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")

FILLED = ("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
          "new_full", "new_empty")  # fmt: skip
"""What makes a tensor of one value, which may have any length."""
KEPT = ("to", "float", "type_as", "view", "reshape", "unsqueeze", "squeeze", "contiguous", "requires_grad_", "__getitem__",
        "narrow", "select", "chunk", "split", "unbind", "transpose", "permute", "flatten", "detach", "clone")  # fmt: skip
"""What keeps it one of one value."""
COPIES = ("expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile")
"""What makes copies of the same values, as many as a rank has use for."""

ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "rsub",
    "rdiv",
    "radd",
    "rmul",
    "rpow",
    "truediv",
    "rtruediv",
    "true_divide",
)
"""Functions whose numbers are compared, without underscores."""

_OFF, _FILLED, _COPIED = "_parallelizer_other_size", "_parallelizer_filled", "_parallelizer_copied"

Key = tuple[str, str, int, str]
"""The module that runs, the file and line of the model, and the function."""


@dataclass(frozen=True)
class Made:
    """What one call of a function made: the shapes of its tensors; and the numbers that it was given, of arithmetic."""

    shapes: tuple[tuple[int, ...], ...]
    numbers: tuple[float, ...]


Calls = Mapping[Key, Sequence[Made]]


@dataclass(frozen=True)
class OtherSize:
    """`function` in `module` made a tensor of `shape` on a rank, where the whole model made one of shape `whole`; or computed
    with a number `shape` where the whole model had `whole`. `written` is the line of the model, `axes` what splits it.
    """

    module: str
    function: str
    axes: tuple[str, ...]
    shape: tuple[int, ...] | float
    whole: tuple[int, ...] | float
    written: Span | None


def copy_alone(program: Program, model: nn.Module) -> nn.Module | None:
    """The model before anything is done to it; None where no axis that is compared splits it, or it is not on meta."""
    sizes = program.mesh.sizes
    if sizes["cp"] > 1 or all(sizes[axis] == 1 for axis in TENSOR_AXES):
        return None
    return copy.deepcopy(model) if any(p.is_meta for p in model.parameters()) else None


def calls_alone(alone: nn.Module | None, batch: Mapping[str, torch.Tensor]) -> Calls:
    """The calls of a forward of the model alone on a batch of this shape, up to where it fails on meta."""
    if alone is None:
        return {}
    given = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in batch.items()}
    noted = _Noted(Running(alone))
    with contextlib.suppress(Exception), noted:
        outcome_for_loss(alone, given)
    return noted.calls


@contextmanager
def watch_sizes(
    program: Program, alone: Calls, varying: Varying, running: Running, seq_len: int
) -> Iterator[list[OtherSize]]:
    """Watch a forward. What is yielded fills with calls that made no part of what the whole model made. A part of a sequence of
    `seq_len` tokens is right wherever it is: what counts them is another check's.
    """
    found: list[OtherSize] = []
    if not alone:
        yield found
        return
    with _Compared(program, alone, varying, running, seq_len, found):
        yield found


class _Noted(TorchFunctionMode):
    """Notes what the calls of a model made."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self.running = running
        self.calls: dict[Key, list[Made]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = tensors_in(result)
        if made and (key := _key(self.running, func, sys._getframe(1))):
            self.calls.setdefault(key, []).append(_made(key, made, args))
        return result


class _Compared(TorchFunctionMode):
    """Compares what calls make with what the same calls of the whole model made. What comes of a call that differs is left
    alone.
    """

    def __init__(
        self,
        program: Program,
        alone: Calls,
        varying: Varying,
        running: Running,
        seq_len: int,
        found: list[OtherSize],
    ) -> None:
        super().__init__()
        self.sizes = {axis: program.mesh.sizes[axis] for axis in TENSOR_AXES if program.mesh.sizes[axis] > 1}
        # Of fewer key heads than ranks, each has a whole one.
        self.shared = any(a.options.get("replicate_kv") for a in program)
        self.alone, self.varying, self.running, self.found = alone, varying, running, found
        self.seq_len = seq_len
        self.times: Counter[Key] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = tensors_in(result)
        key = _key(self.running, func, sys._getframe(1)) if made else None
        if key is None:
            return result
        index, known = self.times[key], self.alone.get(key, ())
        self.times[key] += 1
        read = tensors_in((args, kwargs))
        if any(isinstance(t, DTensor) for t in (*read, *made)):
            return result
        off = any(getattr(t, _OFF, False) for t in read)
        alike = not any(self.sizes.keys() & self.varying.tags(t).keys() for t in made)
        filled = key[3] in FILLED or (key[3] in KEPT and all(getattr(t, _FILLED, False) for t in read))
        copied = key[3] in COPIES or any(getattr(t, _COPIED, False) for t in read)
        filled, copied = alike and filled, alike and copied
        if not (off or filled or copied) and index < len(known):
            off = self._differs(key, made, _made(key, made, args), known[index])
        for tensor in made:
            setattr(tensor, _OFF, off)
            setattr(tensor, _FILLED, filled)
            setattr(tensor, _COPIED, copied)
        return result

    def _differs(self, key: Key, made: Sequence[torch.Tensor], here: Made, whole: Made) -> bool:
        """Whether a call made something else. The first call of its kind is noted."""
        pairs: list[tuple[Any, Any]] = []
        if len(here.shapes) == len(whole.shapes):
            each = zip(made, here.shapes, whole.shapes, strict=True)
            pairs += [(shape, other) for tensor, shape, other in each if not self._is_part(tensor, other)]
        if len(here.numbers) == len(whole.numbers):
            pairs += [
                (a, b) for a, b in zip(here.numbers, whole.numbers, strict=True) if not math.isclose(a, b)
            ]
        if not pairs:
            return False
        mark = f"other {len(self.found)}"
        for tensor in made:
            self.varying.mark(tensor, mark)
        self.found.append(OtherSize(key[0], key[3], tuple(self.sizes), *pairs[0], written_here()))
        return True

    def _is_part(self, tensor: torch.Tensor, whole: Sequence[int]) -> bool:
        """Whether a tensor has the shape of a rank's part."""
        if tensor.ndim != len(whole):
            return False
        factors, spare = [1] * tensor.ndim, 1
        lays = lays_of(tensor)
        for axis in self.sizes.keys() & self.varying.tags(tensor).keys():
            lay = lays.get(axis)
            if isinstance(lay, Part) and not lay.packed and lay.outer == 1:
                factors[lay.dim] *= self.sizes[axis]
            elif lay is None or isinstance(lay, Part):
                spare *= self.sizes[axis]
        for size, factor, length in zip(tensor.shape, factors, whole, strict=True):
            if length == size * factor:
                continue
            ratio = length // size if size and length % size == 0 else 0
            if length == self.seq_len and ratio and math.prod(self.sizes.values()) % ratio == 0:
                continue
            if self.shared and ratio and factor % ratio == 0:
                continue
            ratio, left = divmod(ratio, factor)
            if left or not ratio or spare % ratio:
                return False
            spare //= ratio
        return True


def reaching(found: Sequence[OtherSize], varying: Varying, result: torch.Tensor) -> list[OtherSize]:
    """Those whose result has come into a tensor."""
    tags = varying.tags(result)
    return [one for index, one in enumerate(found) if f"other {index}" in tags]


def _made(key: Key, made: Sequence[torch.Tensor], args: Sequence[Any]) -> Made:
    numbers = [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]
    arithmetic = key[3].strip("_") in ARITHMETIC
    return Made(tuple(tuple(t.shape) for t in made), tuple(map(float, numbers)) if arithmetic else ())


def _key(running: Running, func: Any, frame: FrameType | None) -> Key | None:
    """Where the model calls a function; None where a hook calls it, ours or torch's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "__torch_function__":  # another watcher hands the call on
            frame = frame.f_back
            continue
        if file.startswith(MODELS):
            break
        if file.startswith((DISTRIBUTED, OURS)):
            return None
        if not file.startswith(("<", TORCH)):
            break
        frame = frame.f_back
    return frame and (
        running.current,
        frame.f_code.co_filename,
        frame.f_lineno,
        getattr(func, "__name__", ""),
    )
