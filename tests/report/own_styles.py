"""Styles that a user may have, in a module of the user's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

WHOLE = (Replicate(),)


class Scaled(ColwiseParallel):
    """colwise, and the output times a number."""

    def __init__(self, by: float = 2.0, *, layouts: Any = WHOLE) -> None:
        super().__init__(output_layouts=layouts[0])
        self.by, self._layouts = by, layouts

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * self.by

        super()._apply(module, device_mesh)
        module.register_forward_hook(scale)
        return module


class Forgetful(Scaled):
    """Does not keep what it was made with."""

    def __init__(self, factor: float) -> None:
        super().__init__(2 * factor)


class Changing(Scaled):
    """Keeps something else than what it was made with."""

    def __init__(self, by: float) -> None:
        super().__init__(by + 1)


class Layouts:
    """A value that is no literal."""


class Opaque(Scaled):
    """Takes what cannot be written."""

    def __init__(self, what: Layouts) -> None:
        super().__init__()
        self.what = what


class SequenceParallel(RowwiseParallel):
    """Has the name of one of torch's."""
