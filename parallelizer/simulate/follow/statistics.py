"""Statistics over the tokens of a batch, followed through a forward of the unsharded model.

Ranks have different rows. A sum over rows is a term of the sum over all ranks, and so is all that is linear in it; anything
else of it, as the product of two such sums in a balancing loss, is another number on every mesh. So is a buffer that a forward
updates from its tokens.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelizer import torch_private
from parallelizer.compiler.observe.equal_layers import SHORT, Run, longest_run, shorten
from parallelizer.compiler.observe.flex_attention import FlexAttention
from parallelizer.compiler.observe.running_module import Running
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Workload
from parallelizer.mesh import build_mesh
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import allocate
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.step import Loss, outcome_for_loss
from parallelizer.runtime.sum_over_batch import summing_by
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.simulate.follow.parts import Call, Lay, NeedsWhole, Part, Terms, after
from parallelizer.styles.application import Program
from parallelizer.torch_private import TorchDispatchMode, tree_leaves

ROWS = 4
"""The batch that is followed: more than one row, so that its dimension can be followed through views."""

_LAY, _OF_TOKENS, _LOCAL = "_parallelizer_rows", "_parallelizer_of_tokens", "_parallelizer_local_statistics"
_KEPT_APART = ("gather", "scatter", "scatter_add")
_COUNTS = ("histc", "bincount")
_NONE: frozenset[int] = frozenset()
_LOOKS_ALONG = ("amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "std_mean", "logsumexp", "norm",
                "linalg_vector_norm", "median", "_softmax", "_log_softmax", "_safe_softmax", "topk")  # fmt: skip


@dataclass(frozen=True)
class LocalStatistic:
    """In `module`, `operator` uses a sum over the tokens of one rank, at the line `written` of the model. With a `buffer`, it
    is this that is computed from these tokens.
    """

    module: str
    operator: str
    written: Span | None
    buffer: str = ""


@dataclass(frozen=True)
class FollowedStatistics:
    """What was `found` in a forward, and the run of layers of which only SHORT were followed."""

    found: tuple[LocalStatistic, ...] = ()
    folded: Run | None = None

    def paths(self, path: str) -> tuple[str, ...]:
        """The paths in the whole model that a path in the followed one stands for."""
        return (path,) if self.folded is None else tuple(self.folded.stands_for(path))


def follow_statistics(
    program: Program, model: nn.Module, workload: Workload, loss: Loss
) -> FollowedStatistics:
    """The statistics over the tokens of one rank that come into the output of a forward, into a buffer or into the loss. Uses the
    model up, and this process, which enters a fake world. Raises what the forward or the loss raises.
    """
    warnings.filterwarnings("ignore")
    run = longest_run(program, model)
    if run is not None:
        program = shorten(program, model, run, SHORT)
    alone = dataclasses.replace(program, applications=(), mesh=Mesh({}), stages=None)
    enter_fake_world(1, 0)
    apply(alone, model, build_mesh(alone.mesh, "cpu"))
    watch = _Statistics(Running(model))
    fake = torch_private.FakeTensors()
    with fake:
        allocate(model, "cpu")
        batch = {n: torch.empty_like(t) for n, t in workload.example(ROWS, workload.seq_len, "cpu").items()}
    for name, tensor in batch.items():
        shape = workload.entries[name].shape
        if "batch" in shape:
            _mark(tensor, Part(shape.index("batch"), ROWS), True, _NONE)
    watch.buffers = {torch_private.storage_key(b): n for n, b in model.named_buffers()}
    with FlexAttention(), fake, watch, summing_by(_whole):
        output = outcome_for_loss(model, batch)
        watch.in_loss = True
        total, _ = loss_sums(loss, output, batch)
        for name, buffer in model.named_buffers():
            if torch_private.storage_key(buffer) not in watch.buffers and getattr(buffer, _OF_TOKENS, False):
                watch.note("a new value", name)
    return FollowedStatistics(tuple(watch.reaching((output, total))), run)


def statistics_facts(workload: Workload) -> object:
    """What of a workload the outcome of `follow_statistics` depends on, for one model of which one run of layers is equal and one
    loss.
    """
    return workload.seq_len, workload.entries


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """What all ranks have added up is a statistic of all tokens."""
    summed = tensor.clone()
    _mark(summed, None, False, _NONE)
    return summed


def _mark(tensor: torch.Tensor, lay: Lay | None, of_tokens: bool, local: frozenset[int]) -> None:
    setattr(tensor, _LAY, lay)
    setattr(tensor, _OF_TOKENS, of_tokens)
    setattr(tensor, _LOCAL, local)


def _dim(lay: Lay | None) -> int | None:
    return lay.dim if isinstance(lay, Part) else None


class _Statistics(TorchDispatchMode):
    """Marks what is computed while it is active: how it lies over rows, whether it depends on the tokens at all, and on
    which statistics of theirs.
    """

    def __init__(self, running: Running) -> None:
        super().__init__()
        self.running = running
        self.found: list[LocalStatistic] = []
        self.buffers: Mapping[Any, str] = {}
        self.in_loss = False

    def note(self, operator: str, buffer: str = "") -> int:
        """Something was found. Returns its number."""
        self.found.append(LocalStatistic(self.running.current, operator, written_here(), buffer))
        return len(self.found) - 1

    def reaching(self, output: Any) -> list[LocalStatistic]:
        """What has come into an output or a buffer: what is only looked at changes nothing."""
        local = {n for leaf in tree_leaves(output) for n in getattr(leaf, _LOCAL, _NONE)}
        return [one for number, one in enumerate(self.found) if number in local or one.buffer]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = func._schema.name.partition("::")[2]
        of_tokens = any(getattr(t, _OF_TOKENS, False) for t in read)
        if not of_tokens or name.removesuffix("_") in (
            "empty_like",
            "zeros_like",
            "ones_like",
            "full_like",
            "zero",
            "fill",
        ):
            for tensor in made:
                _mark(tensor, None, False, _NONE)
            return result
        local = frozenset[int]().union(*(getattr(t, _LOCAL, _NONE) for t in read))
        lay: Lay | None = None
        try:
            lay = self._after(Call(func, args, made, lambda t: getattr(t, _LAY, None), sums=True))
        except NeedsWhole:
            terms = any(isinstance(getattr(t, _LAY, None), Terms) for t in read)
            looks = terms or name.strip("_") in {one.strip("_") for one in _LOOKS_ALONG}
            if looks and made and made[0].is_floating_point() and not self._weighs(made[0]):
                local |= {self.note(name.strip("_"))}
        for tensor in made:
            _mark(tensor, lay, True, local)
        if not name.startswith(("native_batch_norm", "_native_batch_norm", "batch_norm", "cudnn_batch_norm")):
            self._written(func, args, name)
        return result

    def _weighs(self, made: torch.Tensor) -> bool:
        """Whether it may be the mean of a loss times its count, which is a sum again: that is tried with numbers."""
        return self.in_loss and made.numel() == 1

    def _after(self, call: Call) -> Lay | None:
        """As `after`, but for operators whose result a sum over rows does not tell apart."""
        tensors = call.tensors()
        first = tensors[0] if tensors else None
        lay = call.lay(first) if first is not None else None
        if (
            call.name == "mean"
            and first is not None
            and isinstance(lay, Part)
            and lay.dim in call.dims(first.ndim)
        ):
            return Terms()
        if (
            call.name == "cat"
            and isinstance(lay, Part)
            and all(_dim(call.lay(t)) == lay.dim for t in tensors)
        ):
            return lay
        lays = [call.lay(t) for t in tensors]
        if call.name in ("add", "sub", "rsub") and Terms() in lays:
            return None if any(isinstance(own, Part) for own in lays) else Terms()
        if call.name in _COUNTS:
            return Terms()
        if call.name in _KEPT_APART and first is not None:
            index = tensors[1] if len(tensors) > 1 else first
            part = call.lay(index) or lay
            same = isinstance(part, Part) and part.dim != call.argument("dim", 0) % max(1, first.ndim)
            return part if same else None
        return after(call)

    def _written(self, func: Any, args: Any, name: str) -> None:
        """A buffer is changed from tokens of this rank."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(value):
                buffer = (
                    self.buffers.get(torch_private.storage_key(tensor))
                    if isinstance(tensor, torch.Tensor)
                    else None
                )
                if buffer is not None:
                    self.note(name.strip("_"), buffer)
