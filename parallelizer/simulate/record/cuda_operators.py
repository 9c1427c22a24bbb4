"""What a step on CUDA computes by other kernels than a step on the CPU, which is the one that is followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from parallelizer.compiler.observe.function_mode import FunctionMode
from parallelizer.simulate.record.cuda_attention import attend
from parallelizer.simulate.record.cuda_norm import rms_norm

OPERATORS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attend,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
}


class CudaOperators(FunctionMode):
    """Runs what has the shapes, and stores what the kernels of CUDA store."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = OPERATORS.get(func)
        return super().call(func, args, kwargs) if operator is None else operator(*args, **kwargs)
