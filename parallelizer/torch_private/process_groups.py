"""Process groups, their collectives under way, and meshes of axes. See `parallelizer.torch_private`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Fold a sub-mesh into one axis of that name. `DeviceMesh._flatten` is the documented way to share a root
    mesh between a folded axis and its parts, which FSDP over `dp_shard x cp` needs; a second call gives the
    same mesh. Waits for a public `flatten`.
    """
    return mesh._flatten(name)


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Two axes of one root mesh, one of them perhaps folded, as one mesh of both. `DeviceMesh._concatenate`
    is what FSDP itself uses; slicing the root by a folded name is deprecated.
    """
    return DeviceMesh._concatenate([outer, inner])


def map_pending(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Replace the tensors of collectives that are under way, which torch hands out as a class of their own, in a tree of
    arguments. Waits for a public name of the class.
    """
    return tree_map_only(AsyncCollectiveTensor, function, tree)


def arrived(pending: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a collective brings, waited for."""
    plain: torch.Tensor = pending.wait()  # type: ignore[attr-defined]
    return plain.view_as(plain)


def exchanged(
    rows: torch.Tensor, receive: list[int], send: list[int], group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """What an all-to-all brings, in a new tensor: `send[r]` rows go to rank r, `receive[r]` come from it. The public
    `all_to_all_single` writes into an argument, and a selective checkpoint cannot keep what such operators write. Waits for
    functional collectives to be public.
    """
    operators = torch.ops._c10d_functional
    made = operators.all_to_all_single(rows, receive, send, group.group_name)
    arrived: torch.Tensor = operators.wait_tensor(made)
    return arrived


def own_sum(terms: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sum over all ranks, in a new tensor. See `exchanged`."""
    operators = torch.ops._c10d_functional
    made = operators.reduce_scatter_tensor(terms, "sum", group.size(), group.group_name)
    summed: torch.Tensor = operators.wait_tensor(made)
    return summed


def fake_store() -> Any:
    """A store for the `fake` backend, and the backend itself, which importing its module registers. It is
    documented for dry runs and kept under `torch.testing._internal`; waits for a public place.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def group_name(value: Any) -> str | None:
    """The name of the process group in one argument of a collective operator, or None when it is no group.
    Operators of `c10d` carry a boxed ProcessGroup, which only `torch._C` can open.
    """
    if isinstance(value, torch.ScriptObject):
        try:
            name: str = torch._C._distributed_c10d.ProcessGroup.unbox(value).group_name
            return name
        except (RuntimeError, ValueError):
            return None
    return None


def opened_group(value: Any) -> Any:
    """The process group that an operator of `c10d` was given, boxed as such operators have it. Waits for operators that take
    a group's name.
    """
    return torch._C._distributed_c10d.ProcessGroup.unbox(value)


def finished_work() -> Any:
    """What an operator of `c10d` returns for a collective that has nothing left to wait for, boxed as such operators have it.
    torch's own collectives in Python are written so; waits for operators that return the tensor alone.
    """
    work = torch._C._distributed_c10d
    return work.Work.boxed(work.FakeWork())


class LateWork(torch._C._distributed_c10d.Work):
    """A collective under way that ends by calling a function, once, when it is waited for, whatever the timeout. An operator of
    `c10d` returns it boxed. torch calls its methods only as long as something in Python holds it. Waits for a public class to
    derive from.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self._end: Callable[[], object] | None = end

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._end is not None:
            self._end()
            self._end = None
        return True

    def boxed_here(self) -> Any:
        return torch._C._distributed_c10d.Work.boxed(self)


def opened_work(value: Any) -> Any:
    """What an operator of `c10d` has returned to wait for, out of its box."""
    return torch._C._distributed_c10d.Work.unbox(value)


def set_group_timeout(timeout: timedelta) -> None:
    """From now on process groups that are made without a timeout, as those of a DeviceMesh are, have this one. torch
    gives them 30 minutes (10 with NCCL) whatever the default group's is. Waits for `init_device_mesh` to take a
    timeout, or to pass on the default group's.
    """
    module = torch.distributed.distributed_c10d
    module.default_pg_timeout = timeout
    if module.default_pg_nccl_timeout is not None:
        module.default_pg_nccl_timeout = timeout


def group_ranks(name: str) -> tuple[int, ...]:
    """The global ranks of a group by its name. Functional collectives carry only the name."""
    return tuple(torch.distributed.get_process_group_ranks(group_of(name)))


def group_of(name: str) -> torch.distributed.ProcessGroup:
    """The group of a name, which is all that an operator can be given of it; waits for a public spelling."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def largest_of_ranks(tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """The largest values that the ranks of a group have, element by element. The functional all-reduce, which DTensor uses for
    the same, names its operation, so that a dry run can tell it from a sum: to one who watches operators,
    `torch.distributed.all_reduce` hands an object that cannot be read. Waits for a public functional collective.
    """
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    largest: torch.Tensor = wait_tensor(all_reduce(tensor, "max", group))
    return largest


def split_axis(mesh: DeviceMesh, axis: str, into: dict[str, int]) -> DeviceMesh:
    """The mesh with one axis unfolded into several, under the same root: `DeviceMesh._unflatten`, which waits
    for a public name. Making a new DeviceMesh instead would make all its process groups anew.
    """
    names = mesh.mesh_dim_names or ()
    # By its index: torch 2.11 refuses the names that a mesh has, and accepts the others.
    return mesh._unflatten(names.index(axis), tuple(into.values()), tuple(into))
