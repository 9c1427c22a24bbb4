"""What FSDP gathers of a parameter, decided by an object beside the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from parallelizer.torch_private.backward import parameter_groups


class GatherExtension(Protocol):
    """FSDP's two methods for tensors that say themselves what is gathered of them, with the tensor as an argument.

    `before` gets the rank's shard, the mesh of the ranks that gather, the size and the stride of the whole parameter, its
    module, and FSDP's mixed precision. It returns the tensors to gather, of the padded size of a shard, and what `after` is
    to know. `after` gets the gathered tensors, that, and the dtype of computation. It returns the parameter that modules see
    and the tensors whose memory FSDP frees; with `out`, the parameter of an earlier gather, it changes that one.
    """

    def before(
        self, part: torch.Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> Any: ...

    def after(self, gathered: Any, known: Any, dtype: torch.dtype, *, out: Any = None) -> Any: ...


class _Extended(FSDPParam):
    """FSDP's record of a parameter. FSDP asks the parameter's local tensor for the two methods. Subclasses of tensors can have
    them, but state dicts, optimizers and initial values would then see the subclass.
    """

    extension: GatherExtension

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        local: Any = super()._sharded_local_tensor.detach()
        part = super()._sharded_local_tensor

        def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
            return self.extension.before(part, mesh, size, stride, module, policy)

        # FSDP counts the arguments.
        local.fsdp_pre_all_gather = before
        local.fsdp_post_all_gather = partial(_after, self.extension)
        found: torch.Tensor = local
        return found


def _after(
    extension: GatherExtension, gathered: Any, known: Any, dtype: torch.dtype, *, out: Any = None
) -> Any:
    return extension.after(gathered, known, dtype, out=out)


def extend_gathers(unit: FSDPModule, extensions: Mapping[tuple[nn.Module, str], GatherExtension]) -> None:
    """Let these objects decide what FSDP gathers of a unit's parameters, by their module and their name in it. The unit has
    not run yet.
    """
    for group in parameter_groups(unit):
        for param in group.fsdp_params:
            key = param._module_info.module, param._module_info.param_name
            if key in extensions:
                extended = cast(_Extended, param)
                extended.__class__ = _Extended
                extended.extension = extensions[key]
                extended._init_extensions()
