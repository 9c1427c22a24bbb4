"""An embedding whose rows are split over an axis: each rank looks up the rows that it holds.

DTensor's own rule gives the right sums, but its backward makes the gradient of the whole vocabulary on every rank before it
takes the rank's rows of it: 2 GiB in float32 for a vocabulary of 128,256 and 4,096 features. Here the lookup and its backward
run on the local rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.overrides import TorchFunctionMode

from parallelizer.styles.wrap_forward import wrap_forward


def embed_own_rows(ids: torch.Tensor, weight: DTensor, padding_idx: int | None = None) -> DTensor:
    """`F.embedding` with this rank's rows of `weight`, and zero for the ids of other rows: terms of a sum over the mesh.

    `weight` is sharded by rows over a mesh of one axis, and `ids` are the same on all its ranks. An id that the whole weight
    has no row for is looked up here, and fails as in the whole embedding: IndexError on a CPU, an assertion of the kernel on
    a GPU.
    """
    mesh, rows, whole = weight.device_mesh, weight.to_local(), weight.size(0)
    # DTensor gives each rank as many rows as the first one has; the last ranks may have fewer, or none.
    first, count = mesh.get_local_rank() * -(-whole // mesh.size()), rows.size(0)
    if isinstance(ids, DTensor):
        ids = ids.full_tensor()
    own = ids - first
    elsewhere = ((own < 0) | (own >= count)) & (ids >= 0) & (ids < whole)
    if padding_idx is not None:
        padding_idx = padding_idx % whole - first
        padding_idx = padding_idx if 0 <= padding_idx < count else None
    if count == 0:
        rows = F.pad(rows, (0, 0, 0, 1))  # row 0 stands in for the rows of other ranks
    found = F.embedding(own.masked_fill(elsewhere, 0), rows, padding_idx)
    return DTensor.from_local(
        found.masked_fill_(elsewhere.unsqueeze(-1), 0), mesh, [Partial()], run_check=False
    )


class OwnRows(TorchFunctionMode):
    """While it is on, `F.embedding` on a weight that is sharded by rows is `embed_own_rows`.

    DTensor answers calls with options that count ids or write into the weight. With `whole` it is the sum over the mesh, a plain
    tensor.
    """

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.embedding:
            return func(*args, **kwargs)
        found = embedding(*args, **kwargs)
        return found.full_tensor() if self.whole and isinstance(found, DTensor) else found


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """`F.embedding`, which looks up own rows where it can."""
    plain = max_norm is None and not scale_grad_by_freq and not sparse
    if plain and isinstance(weight, DTensor) and [p.is_shard(0) for p in weight.placements] == [True]:
        return embed_own_rows(input, weight, padding_idx)
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def look_up_own_rows(module: nn.Module) -> None:
    """Let forward look up the rows that this rank holds, also if it is the forward of a subclass of `nn.Embedding`. If modules
    lie inside of the embedding, as a norm, they get the whole sum as a plain tensor: none of them is linear for sure.
    """
    whole = any(True for _ in module.children())

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with OwnRows(whole):
            return forward(*args, **kwargs)

    wrap_forward(module, around)


class RowwiseEmbedding(RowwiseParallel):
    """torch's class for the weight, the input and the output of an embedding, and a lookup of this rank's rows. A module inside
    of the embedding, as a norm, keeps its parameters whole.
    """

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Embedding):
            weight = distribute_tensor(
                module.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
            )
            module.register_parameter("weight", nn.Parameter(weight, module.weight.requires_grad))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if any(True for _ in module.children()):
            # Before torch's own hook, which takes a DTensor.
            module.register_forward_hook(
                lambda _module, _args, made: DTensor.from_local(
                    made, device_mesh, [Replicate()], run_check=False
                )
            )
        module = super()._apply(module, device_mesh)
        look_up_own_rows(module)
        return module
