"""A rank's part of a batch: its rows, distributed over the data axes, and its tokens of them under context
parallelism.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.language.plan import BATCH_AXES, Plan
from parallelizer.mesh import batch_rank, describe, rename_axes
from parallelizer.runtime.equal_values import unequal_over
from parallelizer.styles.context_parallel.buffers import shard_tokens, unknown_names

Tensor = torch.Tensor


def shard_batch(
    batch: Mapping[str, Tensor],
    plan: Plan,
    mesh: DeviceMesh | None,
    *,
    rows: Literal["global", "local"] = "global",
    device: torch.device | str | None = None,
    axes: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """This rank's part of a batch: its rows (dim 0, in equal blocks over `dp_replicate` and `dp_shard`),
    and in these rows the tokens of its context-parallel rank, in the order of the plan's `balance`.

    `batch` is the global batch of whole sequences, the same on every rank. If the loader reads only the
    rows of each data rank, as `batch_rank` numbers them, pass `rows="local"`: then only tokens are split,
    and ranks of `cp` and `tp` must have the same rows. The first batch of a mesh is compared by a checksum
    between the ranks that must have the same: the first call is collective, later calls do not communicate.
    Outside of a process group, such as in a loader's worker, nothing is compared.

    Entries in the plan's `buffers.batch` are split along their dim; an entry of one row applies to all
    rows. An entry made by `positions` is the global position of each local token, int64 [rows, local
    sequence]. An entry made by `document-mask` says which tokens attend to which in packed documents, bool
    [rows, 1, local sequence, sequence]. It has no elements until an operator reads them: attention does not.
    Both are also made without context parallelism and without a mesh.
    If an entry has a `pad`, a length that does not divide is padded, and `unshard` removes the padding.
    With `device`, the result is on that device; the host does not wait for copies to a GPU, which are made
    in the current stream: work in another stream must wait for it. The returned tensors store their order;
    copies of them do not. `axes` renames the axes of a DeviceMesh with other names, as in `rename_axes`.

    Raises ValueError if the data ranks do not divide the rows, if ranks that must have the same batch have
    different ones, if the sequence is not a multiple of twice the size of cp, if no entry has its length,
    or, with cp, if the batch has an unknown entry in place of one that the plan splits. Without cp an
    unknown entry is a warning, because nothing is split there.
    """
    if rows not in ("global", "local"):
        raise ValueError(f"rows is {rows!r}: it is 'global' (every rank has the whole batch) or 'local'")
    mesh = rename_axes(mesh, axes) if mesh is not None else None
    if (mesh is None or describe(mesh).sizes["cp"] == 1) and (wrong := unknown_names(batch, plan)):
        warnings.warn(f"{wrong}. It makes no difference on this mesh; with cp it is an error", stacklevel=2)
    if mesh is not None:
        _compare_once(batch, mesh, rows)
        if rows == "global":
            batch = _own_rows(batch, plan, *batch_rank(mesh))
    return shard_tokens(batch, plan, mesh, device=device)


def _own_rows(batch: Mapping[str, Tensor], plan: Plan, index: int, ranks: int) -> dict[str, Tensor]:
    """The rows of one data rank out of a global batch."""
    if ranks == 1:
        return dict(batch)
    sizes = {n: t.size(0) for n, t in batch.items() if t.ndim and not _without_rows(n, plan)}
    counts = sorted({size for size in sizes.values() if size > 1})
    if len(counts) > 1:
        said = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"the entries of the batch have different numbers of rows: {said}")
    count = max(sizes.values(), default=0)
    if count == 0 or count % ranks:
        raise ValueError(
            f"a global batch of {count} rows does not divide over {ranks} data ranks; a loader that gives each "
            'rank its own rows passes rows="local"'
        )
    share = count // ranks
    dealt = {name for name, size in sizes.items() if size == count}
    return {n: t[index * share : (index + 1) * share] if n in dealt else t for n, t in batch.items()}


def _without_rows(name: str, plan: Plan) -> bool:
    """Whether dim 0 of an entry is its sequence."""
    return name in plan.batch and plan.batch[name].dim == 0


def _compare_once(batch: Mapping[str, Tensor], mesh: DeviceMesh, rows: str) -> None:
    """Raise ValueError, on every rank, where ranks that must have the same batch have others: at the mesh's first batch."""
    compared: set[str] = mesh.__dict__.setdefault("_parallelizer_compared", set())
    if rows in compared or not dist.is_initialized():
        return
    sizes = describe(mesh).sizes
    axes = [a for a in sizes if sizes[a] > 1 and (rows == "global" or a not in BATCH_AXES)]
    unequal = unequal_over(batch, mesh, axes)
    if unequal is None:
        compared.add(rows)  # after a refusal the next batch is compared again
        return
    named = f"different values in {', '.join(unequal.names)}" if unequal.names else "different batches"
    if unequal.axis in BATCH_AXES:
        raise ValueError(
            f"the ranks of {unequal.axis} have {named}, and shard_batch takes the global batch, the same on every "
            'rank. If each data rank reads rows of its own, pass rows="local"'
        )
    raise ValueError(
        f"the ranks of {unequal.axis} have {named}: they share the rows of a batch. A loader deals rows by "
        "parallelizer.batch_rank(mesh), and not by the rank in the world"
    )
