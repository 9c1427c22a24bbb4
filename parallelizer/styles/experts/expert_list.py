"""Experts that are modules: a list of equal modules whose weights lie stacked, so that ranks can share them out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from parallelizer.styles.experts.counts import rows_of_experts
from parallelizer.styles.experts.travel import combine, spread
from parallelizer.torch_private import has_values

Tensor = torch.Tensor


class ExpertList(nn.Module):
    """Takes the place of an `nn.ModuleList` of experts. The parameters of all experts are stacked, [experts, ...]: those that
    each expert calls `up.weight` are `up_weight` here. A state dict of the `nn.ModuleList` can be loaded.

    Call it once with all tokens in place of a loop over experts: it computes each row by itself, with the experts' own
    forward. `self.experts[3](rows)` works where no ranks share the experts out.

    Raises ValueError if the experts are not modules of one class with parameters of the same shapes, or have buffers.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        made = list(experts)
        every = [dict(expert.named_parameters()) for expert in made]
        _check_equal(made, every)
        self.num_experts = len(made)
        self._leaves = {name.replace(".", "_"): name for name in every[0]}
        if len(self._leaves) < len(every[0]):
            raise ValueError("two parameters of an expert have the same name once their dots are underscores")
        for leaf, name in self._leaves.items():
            stacked = torch.stack([one[name].detach() for one in every])
            self.register_parameter(leaf, nn.Parameter(stacked, every[0][name].requires_grad))
        # In a tuple, so that it is no child: its parameters have no values, and those of an expert take their place.
        self._pattern = (made[0].to("meta"),)
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
        own = {leaf: getattr(self, leaf).unbind(0) for leaf in self._leaves}
        parts = [
            self._call({leaf: slices[number] for leaf, slices in own.items()}, part)
            for number, part in enumerate(rows.split(self._counted(ids)))
        ]
        results = torch.cat(parts) * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1)
        return combine(results, order, inverse, copies).view(*hidden_states.shape[:-1], -1)

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, number: int) -> Callable[..., Any]:
        if not -self.num_experts <= number < self.num_experts:
            raise IndexError(f"there are {self.num_experts} experts, and none of number {number}")

        def expert(*args: Any, **kwargs: Any) -> Any:
            own = {leaf: getattr(self, leaf) for leaf in self._leaves}
            if any(isinstance(p, DTensor) and Shard(0) in p.placements for p in own.values()):
                raise RuntimeError(
                    f"expert {number} lies on one of the ranks that share the experts out, and is called by itself: call the "
                    "list once, in place of the loop: self.experts(tokens, ids, weights), with ids and weights [tokens, k]"
                )
            return self._call({leaf: param[number] for leaf, param in own.items()}, *args, **kwargs)

        return expert

    def __iter__(self) -> Iterator[Callable[..., Any]]:
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


def _check_equal(experts: list[nn.Module], every: list[dict[str, nn.Parameter]]) -> None:
    if not experts or not every[0]:
        raise ValueError("ExpertList needs experts with parameters")
    first = {name: (param.shape, param.dtype) for name, param in every[0].items()}
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


def _stack_loaded(module: ExpertList, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names of an `nn.ModuleList` become those of the stacked parameters."""
    for leaf, name in module._leaves.items():
        names = [f"{prefix}{number}.{name}" for number in range(module.num_experts)]
        if all(one in state for one in names):
            state[prefix + leaf] = torch.stack([state.pop(one) for one in names])
