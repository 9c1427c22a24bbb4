"""The attention calls of a model, from one forward on meta tensors: the modules that make them, and their
heads.

Calls of `scaled_dot_product_attention` and `flex_attention` are recorded with the module that makes them;
names of modules do not matter.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.compiler.observe.calling import inputs_of
from parallelizer.compiler.observe.equal_layers import short_copy
from parallelizer.compiler.observe.flex_attention import fused
from parallelizer.compiler.observe.running_module import Running
from parallelizer.language.plan import REPLICATE, Placement, Plan
from parallelizer.torch_private import NOT_FLEX, FlexAnswer, FlexCall, FlexCalls

if TYPE_CHECKING:
    from parallelizer.language.workload import Workload
    from parallelizer.styles.application import Application


@dataclass(frozen=True)
class CallShape:
    """The sizes of one attention call: query [batch, queries, rows, size], key [batch, keys, key_rows, size] and value
    [batch, keys, key_rows, value_size].
    """

    batch: int
    queries: int
    keys: int
    rows: int
    key_rows: int
    size: int
    value_size: int

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> CallShape | None:
        """Of tensors of four dimensions; None of others."""
        if not query.ndim == key.ndim == value.ndim == 4:
            return None
        batch, queries, rows, size = query.shape
        return cls(batch, queries, key.shape[1], rows, key.shape[2], size, value.shape[3])


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, of the innermost module that it was made in, over whole sequences and all heads.

    `key_bytes` are those of the keys and values of one sequence, in `dtype`; `begun` is when each module had begun to run last.
    """

    path: str
    shape: CallShape
    is_causal: bool
    masked: bool
    key_bytes: int
    dtype: str
    begun: Mapping[str, int]

    @property
    def queries(self) -> int:
        """The number of query heads."""
        return self.shape.queries

    @property
    def keys(self) -> int:
        """The number of key-value heads."""
        return self.shape.keys


def attention_calls(
    applications: Iterable[Application], model: nn.Module, work: Workload
) -> Iterator[tuple[AttentionCall, tuple[str, ...]]]:
    """The first attention call of each module in one forward on meta, and the modules that it stands for: itself, and its
    like in equal layers, of which few are run. None when the model does not run there.
    """
    short, run = short_copy(applications, model)
    calls = _calls_of(short, work)
    if calls is None and run is not None:  # a forward may count its layers
        calls, run = _calls_of(copy.deepcopy(model), work), None
    for path, (call, *_) in (calls or {}).items():
        yield call, (path,) if run is None else tuple(run.stands_for(path))


def every_call(
    model: nn.Module, work: Workload, rows: int, plan: Plan | None = None
) -> dict[str, list[AttentionCall]]:
    """All attention calls of each module in one forward of `rows` sequences on meta, in order; nothing when the model does
    not run there. The model is left as it is. It is given the batch entries that a `plan` makes, masks above all: some
    models repeat grouped heads under a mask.
    """
    return _calls_of(copy.deepcopy(model), work, rows, plan) or {}


def split_projections(applications: Iterable[Application]) -> dict[str, Application]:
    """The modules that hand on a part of the features to each rank of tp."""
    return {
        a.module: a
        for a in applications
        if a.slot == "params" and any(_on_tp(p) for p in a.params.values()) and _hands_on_parts(a)
    }


def projection_of(
    call: AttentionCall, modules: Mapping[str, nn.Module], split: Mapping[str, Application]
) -> Application | None:
    """A split projection that ran before the call, in the nearest module around it that has parameters."""
    around = call.path
    while around and not any(True for _ in modules[around].parameters()):
        around = around.rpartition(".")[0]
    prefix = f"{around}." if around else ""
    ran = (
        p
        for p, begun in call.begun.items()
        if begun >= call.begun[around] and (p == around or p.startswith(prefix))
    )
    return next((split[path] for path in ran if path in split), None)


def is_inside(path: str, module: str) -> bool:
    """Whether a path is that of a module, or of one in it."""
    return path == module or not module or path.startswith(f"{module}.")


class _Calls(TorchFunctionMode):
    """Notes the attention calls of each module, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running = Running(model)
        self.running.started.append(self._begin)
        self.clock = 0
        self.begun = {"": 0}
        self.found: dict[str, list[AttentionCall]] = {}
        self.flex = FlexCalls(self._flex)

    def __exit__(self, *error: Any) -> None:
        self.flex.close()
        super().__exit__(*error)

    def _begin(self, path: str) -> None:
        self.clock += 1
        self.begun[path] = self.clock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._note(*args, **kwargs)
        answer = self.flex(func, args, kwargs)
        return func(*args, **kwargs) if answer is NOT_FLEX else answer

    def _flex(self, call: FlexCall) -> FlexAnswer:
        masked = call.score_mod is not None or call.block_mask is not None
        self._note(call.query, call.key, call.value, call.query if masked else None)
        return fused(call)

    def _note(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> None:
        shape = CallShape.of(query, key, value)
        if shape is not None:
            path, masked = self.running.current, attn_mask is not None
            size = sum(t[0].numel() * t.element_size() for t in (key, value))
            dtype = str(key.dtype).removeprefix("torch.")
            call = AttentionCall(path, shape, is_causal, masked, size, dtype, dict(self.begun))
            self.found.setdefault(path, []).append(call)


def _hands_on_parts(a: Application) -> bool:
    """Whether what comes out is split by features: not that of `rowwise`, nor what is gathered."""
    flow = a.options.get("output", {}).get("")
    return a.style != "rowwise" and (flow is None or flow.wanted is None or flow.wanted.kind != "replicate")


def _on_tp(placements: Mapping[str, Placement]) -> bool:
    return placements.get("tp", REPLICATE).dim is not None


def _calls_of(
    model: nn.Module, work: Workload, rows: int = 1, plan: Plan | None = None
) -> dict[str, list[AttentionCall]] | None:
    """The calls of each module in one forward, which may leave things behind in the model; None when it does not run."""
    from parallelizer.styles.context_parallel.buffers import shard_tokens

    calls = _Calls(model)
    example: Mapping[str, torch.Tensor] = work.example(rows, work.seq_len, "meta")
    try:
        batch = inputs_of(model, shard_tokens(example, plan, None) if plan is not None else example)
        with torch.no_grad(), redirect_stdout(sys.stderr), calls:  # what it prints is no answer of ours
            model(**batch)
    except (Exception, SystemExit):
        # A model that cannot run on meta tensors is reported by the trace; here it only means that heads stay
        # unknown.
        return None
    return calls.found
