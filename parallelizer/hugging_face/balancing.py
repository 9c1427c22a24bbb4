"""The balancing loss of a mixture of transformers, which its configuration asks for by `output_router_logits`.

transformers adds it inside of the model's own forward, from the tokens of one process, and only where that forward is given
labels. Here the routers' logits are collected and handed to the loss, which adds up over all ranks
(`runtime/load_balancing.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.compiler.experts import layout_over_tp
from parallelizer.compiler.observe.calling import Routed
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.hugging_face.architecture import is_model
from parallelizer.hugging_face.transformers_private import routers
from parallelizer.language.plan import TENSOR_AXES
from parallelizer.styles.context_parallel.order import order_of, padded
from parallelizer.styles.experts.stream import Stream

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from parallelizer.compiler.compilation import Compilation
    from parallelizer.styles.application import Program

FORMULA = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""The parameters of the `load_balancing_loss_func` that most architectures share; those of the others differ."""

SWITCH = "output_router_logits"

_RECORDER, _SPREAD = "_parallelizer_router_logits", "_parallelizer_router_places"

Tensor = torch.Tensor


@dataclass
class _Recorder:
    """A forward hook of a router: its logits go to whoever collects them."""

    path: str
    index: int
    into: dict[str, list[Tensor]] | None = field(default=None)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.into is not None:
            self.into.setdefault(self.path, []).append(
                output[self.index] if isinstance(output, tuple) else output
            )


def balanced(model: Any, batch: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """`call(model, batch)`: the logits; or a `Routed`, where the model's configuration asks for a balancing loss."""
    recorders = _recorders(model) if is_added(model) else []
    if not recorders:
        return call(model, batch)
    seen: dict[str, list[Tensor]] = {}
    for recorder in recorders:
        recorder.into = seen
    try:
        logits = call(model, batch)
    finally:
        for recorder in recorders:
            recorder.into = None  # a checkpoint that computes again collects nothing
    places: tuple[dict[str, Stream], int] = getattr(model, _SPREAD, ({}, 0))
    streams, rank = places
    router = tuple(_whole(one, streams.get(path)) for path, each in seen.items() for one in each)
    parts = max((s.ranks for s in streams.values() if s.layout == "split"), default=1)
    return Routed(
        logits, router, model.num_experts_per_tok, model.router_aux_loss_coef, _counted(batch, parts, rank)
    )


def asked_for(model: Any) -> bool:
    """Whether the configuration has `output_router_logits`."""
    return bool(getattr(model.config, SWITCH, False))


def is_added(model: Any) -> bool:
    """Whether `balanced` adds the balancing loss: the configuration asks for it, and it has the form that most share."""
    return asked_for(model) and _known(model)


def _formula(model: nn.Module) -> Any:
    """What the file of the model's architecture calls `load_balancing_loss_func`; None where there is no balancing loss. FSDP
    gives the model a class of its own, of another file.
    """
    for kind in type(model).__mro__:
        if (found := getattr(sys.modules.get(kind.__module__), "load_balancing_loss_func", None)) is not None:
            return found
    return None


def _known(model: Any) -> bool:
    """Whether the balancing loss of the architecture is the one that most share."""
    formula = _formula(model)
    return (
        formula is not None
        and tuple(inspect.signature(formula).parameters) == FORMULA
        and isinstance(getattr(model, "num_experts_per_tok", None), int)
        and isinstance(getattr(model, "router_aux_loss_coef", None), float)
    )


def _recorders(model: nn.Module) -> list[_Recorder]:
    """The hooks of the model's routers, made once."""
    made = []
    for path, router, index in routers(model):
        recorder = getattr(router, _RECORDER, None)
        if not isinstance(recorder, _Recorder):
            recorder = _Recorder(path, index)
            setattr(router, _RECORDER, recorder)
            router.register_forward_hook(recorder)
        made.append(recorder)
    return made


def know_places(model: nn.Module, program: Program, mesh: DeviceMesh) -> None:
    """Note where the tokens of this rank lie in the batch, of a model that is made parallel: how each router has them over tp,
    and the own rank on cp.
    """
    if not is_added(model):
        return
    sizes = program.mesh.sizes
    axes = tuple(a for a in TENSOR_AXES if sizes[a] > 1)
    streams = {
        path: Stream(mesh[axes], layout_over_tp(program.mesh, program.applications, path))
        for path, _, _ in (routers(model) if axes else ())
    }
    setattr(model, _SPREAD, (streams, mesh.get_local_rank("cp") if sizes["cp"] > 1 else 0))


def _whole(logits: Tensor, stream: Stream | None) -> Tensor:
    """A router's logits of all tokens of the ranks of tp, [tokens, experts], with gradients as the layer has them."""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    elif stream is not None and stream.layout == "split":
        logits = logits.reshape(-1, logits.shape[-1])
        logits = stream.joined(logits, logits.size(0) * stream.ranks)
    elif stream is not None and stream.layout in ("terms", "joined"):
        logits = _AsTerm.apply(logits, stream.ranks)
    return logits.reshape(-1, logits.shape[-1])


class _AsTerm(torch.autograd.Function):
    """Gradients of what lies inside are terms of a sum over tp: this one is computed by all of its ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.ranks, None


def _counted(batch: Mapping[str, Any], parts: int, rank: int) -> Tensor | None:
    """Which tokens are no padding, in the order of the routers' rows: by a mask [rows, tokens], and by what cp has filled the
    sequence up with. `parts` are those of a sequence that is split over tp, `rank` is the own one on cp.
    """
    mask, tokens = batch.get("attention_mask"), batch.get("input_ids")
    mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
    order = order_of(tokens) if isinstance(tokens, torch.Tensor) else None
    if order is not None and isinstance(tokens, torch.Tensor):
        length = tokens.size(1) * order.ranks
        if mask is None and order.length is not None:
            mask = torch.ones(tokens.size(0), order.length, device=tokens.device)
        if mask is not None and mask.size(1) != tokens.size(1):
            mask = order.split(padded(mask, 1, length, 0), 1, rank)
    return None if mask is None else mask.unflatten(1, (parts, -1)).transpose(0, 1).reshape(-1)


def check(state: Compilation) -> Iterable[Diagnostic]:
    """A balancing loss that is not computed, or that is another number where the batch is cut."""
    model: Any = state.model
    if not is_model(model) or not asked_for(model) or _formula(model) is None:
        return
    yield from _found(state, model)


def _found(state: Compilation, model: Any) -> Iterator[Diagnostic]:
    name = type(model).__name__
    if not _known(model) or not routers(model):
        yield Diagnostic(
            "balancing-loss",
            f"the configuration of {name} asks for router logits, and its balancing loss has a form of its own: it is not added "
            "to the loss",
            None,
            "add it in a loss of your own, with parallelizer.sum_over_batch; or set model.config.output_router_logits=false",
            "warning",
        )
        return
    if state.mesh.sizes["pp"] > 1:
        yield Diagnostic(
            "balancing-loss",
            f"the balancing loss of {name} needs the router's logits of all layers, and pp={state.mesh.sizes['pp']} cuts these "
            "into stages",
            state.mesh.spans.get("pp"),
            "set model.config.output_router_logits=false, or take a mesh without pp",
        )
    elif state.workload is not None and state.workload.accumulate > 1:
        parts = state.workload.accumulate
        yield Diagnostic(
            "balancing-loss",
            f"the balancing loss of {name} is that of each of the {parts} parts of the batch, as in transformers: it is not the "
            "loss of the whole batch",
            state.workload.spans.get("accumulate"),
            "set train.accumulate=1 if the loss must be that of the whole batch",
            "warning",
        )
