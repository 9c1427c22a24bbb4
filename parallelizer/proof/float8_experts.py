"""Stacked experts in float8 on one process: the reference of a proof, written without torchao.

An expert is multiplied as a linear of its own. Under recipes that scale along tokens, the forward of the module runs once for
each group of tokens that ranks bring together: those of a rank, or of all ranks that share its experts out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.proof.float8_reference import RECIPES, Casts, round_product
from parallelizer.proof.float8_tokens import LowPrecision, ScaleGroups, unproven
from parallelizer.styles.float8.recipes import stacked_weights
from parallelizer.styles.wrap_forward import wrap_forward
from parallelizer.torch_private import is_grouped_mm, storage_key

Tensor = torch.Tensor
Groups = Callable[[torch.Size], Tensor]
"""The row-major numbers of the tokens of each group, by the leading dims of a tensor."""


def round_experts(model: nn.Module, precision: LowPrecision) -> None:
    """From now on the named modules of stacked experts compute in float8."""
    tokens = ScaleGroups(precision)
    tokens.follow(model)
    for path, experts in precision.experts.items():
        groups = functools.partial(tokens.groups, joined=experts.joined)
        _round(model.get_submodule(path), RECIPES[precision.recipes[path]], experts.names, groups)


def _round(module: nn.Module, casts: Casts, names: tuple[str, str, str], groups: Groups) -> None:
    """`names` are the arguments of forward with the tokens, their experts and the weights of these."""
    signature = inspect.signature(module.forward)

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        products = Products(module, casts)
        # If no tokens share a scale, the groups make no difference.
        if casts.scales_tokens_alone:
            with products:
                return forward(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        tokens, *others = (given.arguments.get(name) for name in names)
        if tokens is None or any(t is None for t in others):
            raise unproven(f"{type(module).__name__} has no arguments {', '.join(names)}")
        of_tokens = groups(tokens.shape[:-1])
        ahead = (1,) * (tokens.ndim - 2)
        flat = [t.reshape(-1, t.shape[-1]) for t in (tokens, *others)]
        results = []
        for group in of_tokens:
            parts = [t[group].view(*ahead, len(group), -1) for t in flat]
            given.arguments.update(zip(names, parts, strict=True))
            with products:
                results.append(forward(*given.args, **given.kwargs).view(len(group), -1))
        order = of_tokens.flatten().argsort()
        return torch.cat(results)[order].view(*tokens.shape[:-1], -1)

    wrap_forward(module, around)


class Products(TorchFunctionMode):
    """Inside of it, experts are multiplied one by one."""

    def __init__(self, module: nn.Module, casts: Casts) -> None:
        super().__init__()
        self.module, self.casts = module, casts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_grouped_mm(func):
            return self.grouped(*args, **kwargs)
        if func is F.linear and self._is_expert(args[1]):
            x, weight, *more = args
            bias = more[0] if more else kwargs.get("bias")
            made = self.product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.size(0))
            return made if bias is None else made + bias
        return func(*args, **kwargs)

    def grouped(
        self, rows: Tensor, weights: Tensor, offs: Tensor, bias: Tensor | None = None, **_: Any
    ) -> Tensor:
        """rows [S, K] in groups that end at `offs` [G], with weights [G, K, N]."""
        stops: Sequence[int] = offs.tolist()
        parts = [
            self.product(rows[begin:end], weight.t())
            for begin, end, weight in zip([0, *stops], stops, weights, strict=False)
        ]
        made = torch.cat([*parts, rows.new_zeros(len(rows) - stops[-1], weights.size(2))])
        return made if bias is None else made + bias

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows [S, K] times the weight [N, K] of their expert."""
        return round_product(rows.unsqueeze(0), weight, self.casts).squeeze(0)

    def _is_expert(self, weight: Tensor) -> bool:
        keys = [storage_key(getattr(self.module, name)) for name in stacked_weights(self.module)]
        return storage_key(weight) in keys
