"""Heads are split by splitting features, so features that divide are not enough: a rank must hold whole heads.

The model runs once on meta tensors while its calls of `scaled_dot_product_attention` are noted with the module they happen in;
names play no part. Where the projections around a call are split over tp, query and key heads must divide by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.diagnostics import Diagnostic, Related

if TYPE_CHECKING:
    from parallelizer.compiler import Application, Compilation


class _Calls(TorchFunctionMode):
    """Notes (module path, query heads, key heads) of each attention call."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.heads: dict[str, tuple[int, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.inside:
            query = args[0] if args else kwargs["query"]
            key = args[1] if len(args) > 1 else kwargs["key"]
            if query.ndim == 4:
                self.heads.setdefault(self.inside[-1], (query.shape[1], key.shape[1]))
        return func(*args, **kwargs)


def attention_heads(state: Compilation) -> Iterator[Diagnostic]:
    """Query and key-value heads must divide by tp where projections are split over it."""
    tp = state.mesh.sizes["tp"]
    split = {a.module: a for a in state.applications if a.slot == "params" and "tp" in a.axes and a.style in ("colwise", "rowwise")}
    if tp == 1 or state.workload is None or not split or not any(p.is_meta for p in state.parameters.values()):
        return
    wrong: dict[tuple[str, int], tuple[str, Application, int]] = {}
    for path, (queries, keys) in _heads(state).items():
        application = _projection(path, split)
        if application is None:
            continue
        for what, heads in (("query", queries), ("key-value", keys)):
            if heads % tp:
                first, rule, count = wrong.get((what, heads), (path, application, 0))
                wrong[what, heads] = (first, rule, count + 1)
    for (what, heads), (path, application, count) in wrong.items():
        more = f" ({count - 1} more like it)" if count > 1 else ""
        legal = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        span = state.mesh.spans.get("tp")
        yield Diagnostic("heads-not-divisible", f"{path} has {heads} {what} heads, which tp={tp} does not divide{more}", span,
                         f"tp may be {', '.join(legal)}", related=(Related(application.rule.span, "this rule splits its projections"),))


def _heads(state: Compilation) -> dict[str, tuple[int, int]]:
    work = state.workload
    if work is None:
        return {}
    calls = _Calls()
    handles = []
    for path, module in state.modules.items():
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: calls.inside.append(path)))
        handles.append(module.register_forward_hook(lambda *_: calls.inside.pop() and None, always_call=True))
    names = _forward_inputs(state.model)
    batch = {k: v for k, v in work.example(1, work.seq_len, "meta").items() if names is None or k in names}
    try:
        with torch.no_grad(), calls:
            state.model(**batch)
    except Exception:
        # A model that cannot run on meta tensors is reported by the trace; here it only means that heads stay unknown.
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return calls.heads


def _forward_inputs(model: nn.Module) -> tuple[str, ...] | None:
    from parallelizer.styles.base import forward_names

    return forward_names(model)


def _projection(path: str, split: dict[str, Application]) -> Application | None:
    """The nearest module around the call under which projections are split."""
    while True:
        prefix = f"{path}." if path else ""
        found = next((a for m, a in split.items() if m.startswith(prefix) or m == path), None)
        if found or not path:
            return found if path else None
        path = path.rpartition(".")[0]
