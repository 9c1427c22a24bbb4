"""Heads are split by splitting features, so features that divide are not enough: a rank must hold whole
heads.

The model runs once on meta tensors while its calls of `scaled_dot_product_attention` are noted with the
module they happen in; names play no part. Where the projections around a call are split over tp, query and
key heads must divide by it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.diagnostics import Diagnostic, Related
from parallelizer.plan import REPLICATE, Mesh, Placement
from parallelizer.simulate.layers import short_copy
from parallelizer.styles.base import forward_names

if TYPE_CHECKING:
    from parallelizer.program import Application, Compilation
    from parallelizer.workload import Workload


@dataclass(frozen=True)
class _Call:
    """One attention call: the innermost module it was made in, its heads, and when each module had begun to
    run last.
    """

    path: str
    queries: int
    keys: int
    begun: Mapping[str, int]


class _Calls(TorchFunctionMode):
    """Notes attention calls, the first of each module."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.clock = 0
        self.begun: dict[str, int] = {}
        self.found: dict[str, _Call] = {}

    def enter(self, path: str) -> None:
        self.inside.append(path)
        self.clock += 1
        self.begun[path] = self.clock

    def leave(self) -> None:
        self.inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.inside and self.inside[-1] not in self.found:
            query = args[0] if args else kwargs["query"]
            key = args[1] if len(args) > 1 else kwargs["key"]
            if query.ndim == 4:
                path = self.inside[-1]
                self.found[path] = _Call(path, query.shape[1], key.shape[1], dict(self.begun))
        return func(*args, **kwargs)


def attention_heads(state: Compilation) -> Iterator[Diagnostic]:
    """Query and key-value heads must divide by tp where projections are split over it."""
    tp = state.mesh.sizes["tp"]
    split = {
        a.module: a
        for a in state.applications
        if a.slot == "params" and any(_on_tp(p) for p in a.params.values()) and _hands_on_parts(a)
    }
    dealt_out = [
        a
        for a in state.applications
        if a.slot == "attention" and a.options.get("method") == "ulysses" and state.mesh.sizes["cp"] > 1
    ]
    if (
        ((tp == 1 or not split) and not dealt_out)
        or state.workload is None
        or not any(p.is_meta for p in state.parameters.values())
    ):
        return
    wrong: dict[tuple[str, int], list[tuple[str, Application]]] = {}
    not_dealt: dict[tuple[str, int, int], list[tuple[str, Application]]] = {}
    for call, layers in _calls(state, state.workload):
        projection = _projection(call, state, split) if tp > 1 else None
        each = tp if projection else 1
        for what, heads in (("query", call.queries), ("key-value", call.keys)):
            rule = _around(call, dealt_out)
            if rule is not None and heads % each == 0 and heads // each % state.mesh.sizes["cp"]:
                not_dealt.setdefault((what, heads, each), []).extend([(call.path, rule)] * layers)
        for what, heads in (("query", call.queries), ("key-value", call.keys)):
            if projection is not None and heads % tp:
                wrong.setdefault((what, heads), []).extend([(call.path, projection)] * layers)
    for (what, heads, each), places in not_dealt.items():
        yield _cannot_be_dealt_out(what, heads, each, places, state.mesh)
    for (what, heads), places in wrong.items():
        path, projection = places[0]
        more = f" ({len(places) - 1} more like it)" if len(places) > 1 else ""
        legal = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        span = state.mesh.spans.get("tp")
        yield Diagnostic(
            "heads-not-divisible",
            f"{path} has {heads} {what} heads, which tp={tp} does not divide{more}",
            span,
            f"tp may be {', '.join(legal)}",
            related=(Related(projection.rule.span, "this rule splits its projections"),),
        )


def _around(call: _Call, applications: list[Application]) -> Application | None:
    inside = (a for a in applications if call.path == a.module or call.path.startswith(f"{a.module}."))
    return next(inside, None)


def _cannot_be_dealt_out(
    what: str, heads: int, tp: int, places: list[tuple[str, Application]], mesh: Mesh
) -> Diagnostic:
    """Ulysses gives each rank of cp whole heads, of those that a rank of tp has."""
    path, rule = places[0]
    more = f" ({len(places) - 1} more like it)" if len(places) > 1 else ""
    shared = f" ({tp} ranks of tp share them)" if tp > 1 else ""
    span = mesh.spans.get("cp")
    return Diagnostic(
        "heads-not-divisible",
        f"{path} has {heads} {what} heads{shared}, which ulysses cannot deal out to cp={mesh.sizes['cp']}{more}",
        rule.spans.get("method", rule.rule.span),
        "take `method: all-gather` or `ring`, or `auto`, which takes ulysses only where it fits",
        related=(Related(span, f"cp={mesh.sizes['cp']} is set here"),) if span else (),
    )


def _hands_on_parts(a: Application) -> bool:
    """Whether what comes out is split by features: not that of `rowwise`, nor what is gathered."""
    flow = a.options.get("output", {}).get("")
    return a.style != "rowwise" and (flow is None or flow.wanted is None or flow.wanted.kind != "replicate")


def _on_tp(placements: Mapping[str, Placement]) -> bool:
    return placements.get("tp", REPLICATE).dim is not None


def _calls(state: Compilation, work: Workload) -> Iterator[tuple[_Call, int]]:
    """The attention calls of one forward on meta, each with the number of layers that it stands for; none when
    the model does not run there.
    """
    short, run = short_copy(state.applications, state.model)
    calls = _calls_of(short, work)
    if calls is None and run is not None:  # a forward may count its layers
        calls, run = _calls_of(copy.deepcopy(state.model), work), None
    for call in calls or ():
        yield call, 1 if run is None else len(list(run.stands_for(call.path)))


def _calls_of(model: nn.Module, work: Workload) -> list[_Call] | None:
    """The calls of one forward, which may leave things behind in the model; None when it does not run."""
    calls = _Calls()
    names = forward_names(model)
    batch = {k: v for k, v in work.example(1, work.seq_len, "meta").items() if names is None or k in names}
    try:
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: calls.enter(path))
            module.register_forward_hook(lambda *_: calls.leave(), always_call=True)
        with torch.no_grad(), redirect_stdout(sys.stderr), calls:  # what it prints is no answer of ours
            model(**batch)
    except (Exception, SystemExit):
        # A model that cannot run on meta tensors is reported by the trace; here it only means that heads stay
        # unknown.
        return None
    return list(calls.found.values())


def _projection(call: _Call, state: Compilation, split: Mapping[str, Application]) -> Application | None:
    """A split projection that ran before the call, in the nearest module around it that has parameters."""
    around = call.path
    while around and not any(True for _ in state.modules[around].parameters()):
        around = around.rpartition(".")[0]
    prefix = f"{around}." if around else ""
    ran = (
        p
        for p, begun in call.begun.items()
        if begun >= call.begun[around] and (p == around or p.startswith(prefix))
    )
    return next((split[path] for path in ran if path in split), None)
