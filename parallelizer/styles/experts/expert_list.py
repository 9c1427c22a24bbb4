"""Experts that are modules: a list of equal modules whose weights lie stacked, so that ranks can share them out."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from parallelizer.language.plan import EXPERT
from parallelizer.styles.experts.counts import rows_of_experts
from parallelizer.styles.experts.travel import combine, spread
from parallelizer.torch_private import has_values, twin

Tensor = torch.Tensor


class ExpertList(nn.Module):
    """Takes the place of an `nn.ModuleList` of experts. The parameters of all experts are stacked, [experts, ...]: those that
    each expert calls `up.weight` are `up_weight` here. A state dict of the `nn.ModuleList` can be loaded.

    Call it once with all tokens in place of a loop over experts: it computes each row by itself, with the experts' own
    forward. `self.experts[3](rows)` works where no ranks share the experts out, and a loop also where they do, if it is in the
    forward that the rule `experts` names.

    Raises ValueError if the experts are not modules of one class with parameters of the same shapes, have buffers, or differ
    in a number or a text that they hold.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        made = list(experts)
        check_equal(made)
        every = [dict(expert.named_parameters()) for expert in made]
        self.in_loop = False  # True where a loop calls the experts one by one, and never the list
        self._held: dict[str, tuple[Tensor, ...]] | None = None
        self._leaves = {name.replace(".", "_"): name for name in every[0]}
        for leaf, name in self._leaves.items():
            stacked = torch.stack([one[name].detach() for one in every])
            self.register_parameter(leaf, nn.Parameter(stacked, every[0][name].requires_grad))
        # In a tuple, so that it is no child: its parameters have no values, and those of an expert take their place.
        self._pattern = (made[0].to("meta"),)
        if not all(map(_fills_itself, made[0].modules())):
            self.reset_parameters = None  # type: ignore[assignment]  # only the constructor of an expert can fill it
        self.register_load_state_dict_pre_hook(_stack_loaded)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the results of its experts for each token: tokens [..., D], the numbers of their experts [..., k]
        and the weights of these [..., k]; [..., Dout]. The host reads the number of rows of each expert, once.
        """
        copies = top_k_index.shape[-1]
        ids, tokens = top_k_index.reshape(-1), hidden_states.reshape(-1, hidden_states.shape[-1])
        order = ids.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        rows = spread(tokens, order, inverse, copies)
        own = self._held or self._slices()
        parts = [
            self._call({leaf: slices[number] for leaf, slices in own.items()}, part)
            for number, part in enumerate(rows.split(self._counted(ids)))
        ]
        results = torch.cat(parts) * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1)
        return combine(results, order, inverse, copies).view(*hidden_states.shape[:-1], -1)

    @property
    def num_experts(self) -> int:
        """How many there are: inside of a forward of experts that are shared out, those of this rank."""
        leaf = next(iter(self._leaves))
        return len(self._held[leaf]) if self._held else int(getattr(self, leaf).shape[0])

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, number: int | Tensor) -> OneExpert:
        at = operator.index(number)
        if not -self.num_experts <= at < self.num_experts:
            raise IndexError(f"there are {self.num_experts} experts, and none of number {at}")
        return OneExpert(self, at)

    def __iter__(self) -> Iterator[OneExpert]:
        return (self[number] for number in range(self.num_experts))

    def train(self, mode: bool = True) -> ExpertList:
        """Also of the experts."""
        self._pattern[0].train(mode)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Fill the experts one after another, each by its modules' own `reset_parameters`."""
        for number in range(self.num_experts):
            expert = copy.deepcopy(self._pattern[0]).to_empty(device="cpu")
            with torch.no_grad():
                for param in expert.parameters():
                    param.fill_(torch.nan)  # what no module fills is found
                for module in expert.modules():
                    if callable(reset := getattr(module, "reset_parameters", None)):
                        reset()
                for leaf, name in self._leaves.items():
                    getattr(self, leaf)[number].copy_(expert.get_parameter(name))

    def extra_repr(self) -> str:
        """How many, and of which class."""
        return f"{self.num_experts} x {type(self._pattern[0]).__name__}"

    def _slices(self) -> dict[str, tuple[Tensor, ...]]:
        """The parameters of each expert. At once: the gradient of one slice is a tensor as large as all."""
        return {leaf: _local(getattr(self, leaf)).unbind(0) for leaf in self._leaves}

    def _call(self, own: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        named = {self._leaves[leaf]: tensor for leaf, tensor in own.items()}
        return torch.func.functional_call(self._pattern[0], named, args, kwargs)

    def _counted(self, ids: Tensor) -> list[int]:
        if has_values(ids):
            counts: list[int] = rows_of_experts(ids, self.num_experts).tolist()
            return counts
        # A dry run has no tokens: as many for each, which is as much memory and work whatever the routing.
        each, more = divmod(ids.numel(), self.num_experts)
        return [each + (number < more) for number in range(self.num_experts)]


@contextmanager
def in_a_loop(experts: ExpertList) -> Iterator[None]:
    """Inside, calls of single experts take them from this rank's, whose weights are taken apart once."""
    experts._held = experts._slices()
    try:
        yield
    finally:
        experts._held = None


class OneExpert:
    """An expert of a list, taken out by its number: it is called as the module that it was, and has the attributes of it.

    Raises RuntimeError where its weights lie on one of the ranks that share the experts out, outside of their forward.
    """

    def __init__(self, experts: ExpertList, number: int) -> None:
        self._experts, self._number = experts, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._experts._call(self._own(), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copies and pickles, before there is an expert
            raise AttributeError(name)
        pattern, leaves = self._experts._pattern[0], self._experts._leaves
        own = {id(pattern.get_parameter(leaves[leaf])): tensor for leaf, tensor in self._own().items()}
        return getattr(_with_parameters(pattern, own), name)

    def _own(self) -> dict[str, Tensor]:
        if held := self._experts._held:
            return {leaf: slices[self._number] for leaf, slices in held.items()}
        own = {leaf: getattr(self._experts, leaf) for leaf in self._experts._leaves}
        if any(isinstance(p, DTensor) and Shard(0) in p.placements for p in own.values()):
            raise RuntimeError(
                f"expert {self._number} lies on one of the ranks that share the experts out, and is called by itself: call the "
                "list once, in place of the loop: self.experts(tokens, ids, weights), with ids and weights [tokens, k]. Or put "
                "the loop into a module whose forward takes these three, and write the rule for that module"
            )
        return {leaf: param[self._number] for leaf, param in own.items()}


def _local(param: Tensor) -> Tensor:
    """This rank's experts of those that ranks share out."""
    if isinstance(param, DTensor) and EXPERT in (param.device_mesh.mesh_dim_names or ()):
        own: Tensor = param.to_local(grad_placements=[Shard(0)])
        return own
    return param


def _with_parameters(module: nn.Module, own: Mapping[int, Tensor]) -> nn.Module:
    """A module, and those in it, with these tensors in the place of its parameters, by their ids."""
    return twin(
        module,
        type(module),
        parameter=lambda param: own[id(param)],  # type: ignore[arg-type, return-value]
        child=lambda child: _with_parameters(child, own),
    )


def _fills_itself(module: nn.Module) -> bool:
    own = next(module.parameters(recurse=False), None)
    return own is None or callable(getattr(module, "reset_parameters", None))


def check_equal(experts: Sequence[nn.Module]) -> None:
    """Whether one forward computes all of them, each with its own parameters. Raises ValueError, with what differs."""
    every = [dict(expert.named_parameters()) for expert in experts]
    if not experts or not every[0]:
        raise ValueError("ExpertList needs experts with parameters")
    first = {name: (param.shape, param.dtype) for name, param in every[0].items()}
    if len({name.replace(".", "_") for name in first}) < len(first):
        raise ValueError("two parameters of an expert have the same name once their dots are underscores")
    for number, (expert, own) in enumerate(zip(experts, every, strict=True)):
        if type(expert) is not type(experts[0]):
            raise ValueError(
                f"expert {number} is a {type(expert).__name__} and expert 0 a {type(experts[0]).__name__}: the weights of "
                "one class can be stacked"
            )
        if {name: (param.shape, param.dtype) for name, param in own.items()} != first:
            raise ValueError(
                f"the parameters of expert {number} have other names or shapes than those of expert 0"
            )
        if (buffer := next(expert.named_buffers(), None)) is not None:
            raise ValueError(f"expert {number} has a buffer ({buffer[0]}), and parameters alone are stacked")
        _check_attributes(experts[0], expert, number)


def _check_attributes(first: nn.Module, expert: nn.Module, number: int) -> None:
    """The forward of expert 0 computes the others, so they hold the same numbers. Raises ValueError."""
    others = dict(expert.named_modules())
    for path, module in first.named_modules():
        other = others.get(path)
        called = f"expert {number}" + (f".{path}" if path else "")
        if type(other) is not type(module):
            raise ValueError(
                f"{called} is a {type(other).__name__}, and that of expert 0 a {type(module).__name__}"
            )
        for name, value in vars(module).items():
            if isinstance(value, int | float | str | None) and (held := vars(other).get(name)) != value:
                raise ValueError(
                    f"{called} has {name}={held!r} and expert 0 {value!r}, and one forward computes all"
                )


def _stack_loaded(module: ExpertList, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names of an `nn.ModuleList` become those of the stacked parameters."""
    for leaf, name in module._leaves.items():
        names = [f"{prefix}{number}.{name}" for number in range(module.num_experts)]
        if all(one in state for one in names):
            state[prefix + leaf] = torch.stack([state.pop(one) for one in names])
