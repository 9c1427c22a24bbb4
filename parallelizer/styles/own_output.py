"""A linear whose output the forward may change in place.

The plain form of a DTensor is a view of it, and autograd does not allow such a view to be changed in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import RowwiseParallel


def copy_output(module: nn.Module) -> None:
    """Let the module return a copy of its output, a tensor [...] of its own."""

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.clone()

    module.register_forward_hook(after)


class OwnedRowwise(RowwiseParallel):
    """torch's class, whose output is then copied."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        copy_output(module)
        return module
