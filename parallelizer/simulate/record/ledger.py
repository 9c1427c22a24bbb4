"""The ledger: every collective of a step in order, with what caused it. The same recorder serves the fake and
the real world.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.compiler.observe import phase
from parallelizer.compiler.observe.running_module import Running, within
from parallelizer.language.plan import EXPERT, full_name
from parallelizer.runtime.pipeline import progress
from parallelizer.runtime.pipeline.channels import moving
from parallelizer.runtime.redistribution import wire_bytes
from parallelizer.runtime.state import state_of
from parallelizer.simulate.collectives import KINDS, axes_by_ranks, expert_meshes
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel.ring_operator import OPERATORS
from parallelizer.styles.float8.gathers import measured
from parallelizer.styles.tied_parameters import parameter_names
from parallelizer.torch_private import TorchDispatchMode, tree_leaves


@dataclass(frozen=True)
class Collective:
    """One collective on one rank.

    `payload_bytes` is the whole tensor that is gathered, scattered, reduced, exchanged or sent; `wire_bytes` what
    this rank sends of it: (W-1)/W of the payload, twice that for an all-reduce, for a group of W ranks, which is what
    it receives, too; of an all-to-all that does not give all ranks alike, all but its own share; the payload for a
    send, and nothing for a recv. `rule` is (key, file, line).

    `module` is the module that was running; for FSDP's collectives the unit, for the reduction of one
    parameter's gradient the owner of the parameter, in whatever phase it happens. `overlapped` is true for
    FSDP's collectives whose result is not needed at once: an all-gather that is issued before a module runs
    that lies outside its unit and before it (backward's prefetch; forward's if it was asked for), and a
    reduction of gradients behind which another module still runs in backward. On a device with streams those
    run beside computation.

    `largest` is true for a reduction that keeps the largest values. `turn` numbers the phases of the process, where
    accumulated parts have several of one name; it is no part of what two entries are compared by.
    """

    phase: str
    kind: str
    axis: str
    ranks: int
    payload_bytes: int
    wire_bytes: int
    dtype: str
    module: str
    rule: tuple[str, str, int] | None
    overlapped: bool
    largest: bool = field(default=False, repr=False)
    turn: int = field(default=0, compare=False, repr=False)

    def as_json(self) -> dict[str, Any]:
        """One entry of the documented form."""
        rule = {"key": self.rule[0], "file": self.rule[1], "line": self.rule[2]} if self.rule else None
        return {**{k: v for k, v in vars(self).items() if k not in ("largest", "turn")}, "rule": rule}


DISPATCHED = {"all-to-all": ("all_to_all",), "all-gather": ("all_gather", "reduce_scatter")}
"""The collectives of experts, by their option `dispatch`."""


class Listener(Protocol):
    """What a ledger tells of every operator, and of every collective that it has entered at an index."""

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...

    def dispatch(self) -> None: ...

    def issue(
        self, index: int, entry: Collective, unit: bool, plain: bool, tensors: Sequence[torch.Tensor]
    ) -> None: ...


class Ledger(TorchDispatchMode):
    """Records the collectives that run while it is active. `label` must have been called before, on the model
    with its parameters in place: as `apply` made it and with memory.
    """

    def __init__(self, program: Program, mesh: DeviceMesh, running: Running) -> None:
        super().__init__()
        self.running = running
        self.entries: list[Collective] = []
        self.axes = axes_by_ranks(mesh)
        self.experts = {
            a.module: str(a.options.get("dispatch", "all-to-all")) for a in program.of_slot("experts")
        }
        self.expert_ranks = {
            tuple(dist.get_process_group_ranks(each.get_group(EXPERT))) for each in expert_meshes(mesh)
        }
        self.rules = _Rules(program)
        self.unit: str | None = None
        self.units: dict[object, str] = {}
        self.parameter: str | None = None
        self.whole = [
            full_name(a.module, name)
            for a in program.of_slot("fsdp")
            for name in a.params
            if a.reasons.get(name)
        ]
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.ahead: dict[int, bool] = {}
        self._listening: list[AbstractContextManager[None]] = []
        self.operators: Listener | None = None
        running.started.append(self._module_begins)

    def __enter__(self) -> Self:
        self._listening.append(progress.listening(self._action_begins))
        self._listening[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._listening.pop().__exit__(*error)

    def _action_begins(self, mark: Any) -> None:
        """What an action of a pipeline has gathered is not overlapped by one that comes later, and its modules have ended."""
        if isinstance(mark[0], int):
            self.ahead.clear()
            self.running.nothing_runs()

    def label(self, model: nn.Module) -> None:
        """Have FSDP say which unit it gathers or reduces for, through its hooks for custom collectives,
        and parameters that it leaves whole when their gradient comes.
        """
        state = state_of(model)
        pipeline = None if state is None else state.pipeline
        # The outermost unit of a stage lies around the model.
        around = [] if pipeline is None else [("", stage) for stage in pipeline.models.values()]
        for path, module in (*around, *model.named_modules()):
            if isinstance(module, FSDPModule):
                self.units[module] = path
                module.set_custom_all_gather(_LabelledAllGather(self, path))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_LabelledReduceScatter(self, path))  # type: ignore[arg-type]
        self.model = model
        there = parameter_names(model)
        for name in self.whole:
            if name in there:  # others are on other stages
                self._announce(there[name], name)

    def _announce(self, param: nn.Parameter, name: str) -> None:
        """Hooks before those that reduce the gradient, and behind all."""

        def begin(_: torch.Tensor) -> None:
            self.parameter = name

        def end(_: torch.Tensor) -> None:
            self.parameter = None

        if param.requires_grad:
            param.register_hook(begin)
            param.register_post_accumulate_grad_hook(end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(torch_private.is_made_of_tensors, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if func in OPERATORS:  # of compiled code: its collectives are inside
            with self:
                return OPERATORS[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
            name = func._schema.name.split("::")[1]
            if name in KINDS:
                self._record(KINDS[name], args, kwargs, result, plain=func.namespace == "c10d")
            elif name.endswith(("_coalesced", "_coalesced_")):
                self._unknown(str(func))
        if self.operators is not None:
            self.operators.see(func, args, kwargs, result)
        return result

    def _unknown(self, operator: str) -> None:
        raise RuntimeError(f"the ledger does not know the collective {operator}")

    def _record(self, kind: str, args: Any, kwargs: Any, result: Any, *, plain: bool = False) -> None:
        leaves = tree_leaves((args, kwargs))
        group = next((g for a in leaves if (g := torch_private.group_name(a))), None)
        if group is None:
            group = [a for a in leaves if isinstance(a, str)][
                -1
            ]  # functional collectives end with the group's name
        if group not in self.ranks:
            self.ranks[group] = torch_private.group_ranks(group)
        members = self.ranks[group]
        ranks = len(members)
        if ranks == 1:
            return
        payload, dtype = _payload(kind, leaves, result)
        axis = self._axis(members)
        dispatched = kind in DISPATCHED.get(self.experts.get(self.running.current, ""), ())
        if dispatched and members in self.expert_ranks and self.unit is None:
            axis = EXPERT  # its ranks may be those of another axis too
        wire = wire_bytes(kind, payload, ranks)
        if kind == "all_to_all" and (sizes := _split_sizes((*args, *kwargs.values()), ranks)):
            wire = payload - payload * sizes[members.index(dist.get_rank())] // sum(sizes)
        unit, module = self._cause(kind, axis, leaves)
        of_unit = unit or self.parameter is not None or measured() is not None
        rule = self.rules.of(module, axis, fsdp=of_unit) if module or unit else None
        # A unit that has begun already needs its parameters right now.
        begun = kind == "all_gather" and module != "" and within(self.running.current, module)
        if unit and not begun and phase.current() in ("forward", "backward"):
            self.ahead[len(self.entries)] = False
        self.entries.append(
            Collective(
                phase.current(),
                kind,
                axis,
                ranks,
                payload,
                wire,
                dtype,
                module,
                rule,
                False,
                measured() is not None or "max" in [a for a in leaves if isinstance(a, str)],
                phase.begun(),
            )
        )
        if self.operators is not None:
            written = [t for t in (*leaves, *tree_leaves(result)) if isinstance(t, torch.Tensor)]
            self.operators.issue(len(self.entries) - 1, self.entries[-1], unit, plain, written)

    def _cause(self, kind: str, axis: str, leaves: list[Any]) -> tuple[bool, str]:
        """Whether FSDP issues it for a unit, and the module that it is for."""
        if self.unit is not None:
            return True, self.unit
        if (unit := measured()) is not None:
            return False, self.units.get(unit, self.running.current)  # without labels: the module that runs
        if kind in ("send", "recv") and (cut := moving()) is not None:
            return False, cut
        if self.parameter is not None:
            return False, self.parameter.rpartition(".")[0]
        now, current = phase.current(), self.running.current
        if kind == "all_reduce" and now in ("backward", "clip"):
            owner = self._owner_of_gradient(next(a for a in leaves if isinstance(a, torch.Tensor)))
            if owner is not None:
                return False, owner
        if kind == "all_reduce" and now == "backward" and axis == "dp_replicate":
            return True, self._unit_around(current)  # HSDP sums what it has scattered
        return False, current

    def _axis(self, members: tuple[int, ...]) -> str:
        """The axis of a group: that whose ranks it has, or a part of them as copies of a parameter on some stages."""
        if members not in self.axes:
            wide = (axis for ranks, axis in self.axes.items() if set(members) < set(ranks))
            self.axes[members] = next(wide, "world")
        return self.axes[members]

    def _owner_of_gradient(self, tensor: torch.Tensor) -> str | None:
        """The module of the parameter whose gradient this is."""
        key = torch_private.storage_key(tensor)
        for name, param in self.model.named_parameters():
            gradient = param.grad
            if isinstance(gradient, DTensor) and torch_private.storage_key(gradient.to_local()) == key:
                return name.rpartition(".")[0]
        return None

    def _unit_around(self, path: str) -> str:
        while path and not isinstance(self.model.get_submodule(path), FSDPModule):
            path = path.rpartition(".")[0]
        return path

    def _module_begins(self, path: str) -> None:
        """Something runs: what FSDP has issued so far is overlapped, or needed right now."""
        for index, passed in list(self.ahead.items()):
            entry = self.entries[index]
            if entry.phase != phase.current():
                del self.ahead[index]
            elif entry.kind != "all_gather" or (passed and within(path, entry.module)):
                self.entries[index] = dataclasses.replace(entry, overlapped=True)
                del self.ahead[index]
            elif within(path, entry.module):
                del self.ahead[index]
            else:
                self.ahead[index] = True


def _split_sizes(arguments: tuple[Any, ...], ranks: int) -> list[int]:
    """How much of an all-to-all goes to each rank, where that is said: the last list of sizes among its arguments."""
    lists = [a for a in arguments if isinstance(a, list) and len(a) == ranks]
    sizes = next((a for a in reversed(lists) if isinstance(a[0], int)), [])
    return sizes if sum(sizes) else []


def _payload(kind: str, leaves: list[Any], result: Any) -> tuple[int, str]:
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    sizes = [t.numel() * t.element_size() for t in tensors]
    if isinstance(result, torch.Tensor):
        sizes.append(result.numel() * result.element_size())
        tensors.append(result)
    # The larger side of a gather or a scatter is the whole; the others have sides of one size.
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    if kind in ("all_gather", "reduce_scatter", "all_to_all") and len(tensors) > 2:
        by_half = sum(sizes) - max(sizes)
        whole = max(max(sizes), by_half)
        return whole, str(tensors[largest].dtype).removeprefix("torch.")
    return sizes[largest], str(tensors[largest].dtype).removeprefix("torch.")


class _Rules:
    """The rule behind a collective: that of the nearest module around it whose style stands on the axis."""

    def __init__(self, program: Program) -> None:
        self.by_module: dict[tuple[str, bool], list[tuple[tuple[str, ...], tuple[str, str, int]]]] = {}
        for a in program:
            rule = (a.rule.key, a.rule.span.file, a.rule.span.line)
            self.by_module.setdefault((a.module, a.slot == "fsdp"), []).append((a.axes, rule))
        self.known: dict[tuple[str, str, bool], tuple[str, str, int] | None] = {}

    def of(self, module: str, axis: str, *, fsdp: bool) -> tuple[str, str, int] | None:
        key = (module, axis, fsdp)
        if key not in self.known:
            self.known[key] = self._find(*key)
        return self.known[key]

    def _find(self, module: str, axis: str, fsdp: bool) -> tuple[str, str, int] | None:
        parts = set(axis.split("+"))
        while True:
            for axes, rule in self.by_module.get((module, fsdp), ()):
                if parts & set(axes):
                    return rule
            if not module:
                return None
            module = module.rpartition(".")[0]


class _LabelledAllGather:
    """FSDP's own all-gather, said to be for one unit."""

    def __init__(self, ledger: Ledger, unit: str) -> None:
        self.ledger, self.unit = ledger, unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.ledger.unit = self.unit
        try:
            function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return function(output_tensor, input_tensor, group=group, async_op=async_op)
        finally:
            self.ledger.unit = None


class _LabelledReduceScatter(_LabelledAllGather):
    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.ledger.unit = self.unit
        try:
            function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return function(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        finally:
            self.ledger.unit = None
