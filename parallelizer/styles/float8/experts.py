"""Stacked experts in float8: the products of rows with their weights, inside the module's own forward.

The parameters stay what they are, [experts, ...]. In forward, grouped products and products with the weights of one expert are
replaced; all else of forward stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from parallelizer.language.plan import EXPERT
from parallelizer.styles.float8.grouped import GroupedProduct, GroupedRecipe
from parallelizer.styles.float8.recipes import stacked_weights
from parallelizer.styles.wrap_forward import wrap_forward
from parallelizer.torch_private import is_grouped_mm, is_sharded, local_tensor, storage_key

Tensor = torch.Tensor


def run_experts_in_float8(
    module: nn.Module,
    recipe: str,
    *,
    emulate: bool = False,
    error: Callable[[str], Exception] = RuntimeError,
) -> None:
    """From now on the products of a module's stacked weights, [experts, ...], are in float8, forward and backward.

    `recipe` is torchao's name of one with scales of rows. With `emulate` factors are rounded to float8, and products are made
    in float32. Forward must multiply by `grouped_mm`, or by `linear` with the weights of one expert. If it multiplies
    otherwise, it raises what `error` makes of the message.
    """

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        products = ExpertProducts(module, recipe != "rowwise_with_gw_hp", emulate, error)
        with products:
            made = forward(*args, **kwargs)
        products.check()
        return made

    # Compiled code would see neither where a weight comes from, nor the ranks that have other parts of it.
    wrap_forward(module, torch.compiler.disable(around))


class ExpertProducts(TorchFunctionMode):
    """Inside one forward, multiplies stacked weights in float8."""

    def __init__(
        self,
        module: nn.Module,
        round_weight_gradient: bool,
        emulate: bool,
        error: Callable[[str], Exception],
    ) -> None:
        super().__init__()
        self.module, self.round_weight_gradient = module, round_weight_gradient
        self.emulate, self.error = emulate, error
        self.multiplied: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_grouped_mm(func):
            return self.grouped(*args, **kwargs)
        if func is F.linear and self.name_of(weight := args[1] if len(args) > 1 else kwargs["weight"]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return self.linear(args[0] if args else kwargs["input"], weight, bias)
        return func(*args, **kwargs)

    def grouped(
        self,
        rows: Tensor,
        weights: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`grouped_mm` of rows [S, K] and weights [G, K, N]."""
        if offs is None or rows.ndim != 2 or weights.ndim != 3:
            raise self.error(
                f"grouped_mm of {list(rows.shape)} and {list(weights.shape)} is no product of rows in groups with one matrix "
                "for each"
            )
        made = self.product(rows, weights, offs.to(torch.int32))
        made = made if bias is None else made + bias
        return made if out_dtype is None else made.to(out_dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` with the weight [N, K] of one expert: a product of one group."""
        rows = x.reshape(-1, x.shape[-1])
        ends = torch.full((1,), rows.size(0), dtype=torch.int32, device=x.device)
        made = self.product(rows, weight.t().unsqueeze(0), ends).view(*x.shape[:-1], weight.size(0))
        return made if bias is None else made + bias

    def product(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """rows [S, K] times weights [G, K, N], with the scales of whole rows."""
        name = self.name_of(weights)
        splits = self.splits()
        if name is None and splits:
            raise self.error(
                "a product takes weights that were made of parameters, and ranks have parts of these: the largest value of a "
                "row cannot be found"
            )
        self.multiplied.update([name] if name else self.weights())
        dims: dict[int, list[dist.ProcessGroup]] = {1: [], 2: []}
        for stride, group in splits.get(name or "", []):
            for dim, of_dim in dims.items():
                if weights.stride(dim) == stride:
                    of_dim.append(group)
        recipe = GroupedRecipe(self.round_weight_gradient, self.emulate, tuple(dims[1]), tuple(dims[2]))
        made: Tensor = GroupedProduct.apply(rows, weights, ends, recipe)
        return made

    def weights(self) -> dict[str, Tensor]:
        """The stacked weights as forward sees them, by name."""
        return {name: getattr(self.module, name) for name in stacked_weights(self.module)}

    def name_of(self, tensor: Any) -> str | None:
        """The name of the stacked weight that a tensor is a view of."""
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            return None
        key, at = storage_key(tensor), tensor.storage_offset()
        for name, weight in self.weights().items():
            if isinstance(weight, DTensor):
                weight = local_tensor(weight)
            first = weight.storage_offset()
            if storage_key(weight) == key and first <= at < first + max(1, weight.numel()):
                return name
        return None

    def splits(self) -> dict[str, list[tuple[int, dist.ProcessGroup]]]:
        """Of each weight whose features lie on several ranks, the stride of the dim that is split, with the ranks."""
        found: dict[str, list[tuple[int, dist.ProcessGroup]]] = {}
        seen = self.weights()
        for name, param in self.module.named_parameters(recurse=False):
            if name not in seen or not isinstance(param, DTensor):
                continue
            mesh, strides = param.device_mesh, seen[name].stride()
            names = mesh.mesh_dim_names or ("",) * mesh.ndim
            placements: Sequence[Any] = param.placements
            for axis, placement in enumerate(placements):
                # An expert that lies on another rank of ep lies there whole.
                if is_sharded(placement) and mesh.size(axis) > 1 and names[axis] != EXPERT:
                    found.setdefault(name, []).append((strides[placement.dim], mesh.get_group(axis)))
        return found

    def check(self) -> None:
        """Raise the error unless forward has multiplied every weight."""
        missed = [name for name in self.weights() if name not in self.multiplied]
        if missed:
            raise self.error(
                f"the forward of {type(self.module).__name__} multiplies {missed[0]} by neither grouped_mm nor linear, and "
                "float8 replaces no other product"
            )
