"""What torch's compiler does, and its errors. See `parallelizer.torch_private`."""

from __future__ import annotations

import os
import re
import types

import torch


def assert_all(condition: torch.Tensor, text: str) -> None:
    """Raise RuntimeError where a condition is false: at once on a CPU, later on a GPU, which no host read waits for. What
    torch's own losses do inside their kernels. Waits for a public `assert_async`.
    """
    torch._assert_async(condition.all(), text)


def raised_while_compiling(error: BaseException) -> str | None:
    """What torch.compile met, in a line, where the error is the compiler's wrapping around it; None for any other.

    Inductor and its backends keep the exception; Dynamo only quotes it in its text.
    """
    seen: set[int] = set()
    inner: object = error
    while isinstance(inner, BaseException) and id(inner) not in seen and _is_compilers(inner):
        seen.add(id(inner))
        error, inner = inner, getattr(inner, "inner_exception", None) or inner.__cause__
    if seen and isinstance(inner, BaseException) and not _is_compilers(inner):
        return f"{type(inner).__name__}: {inner}"
    quoted = re.search(r"(?:got|raised exception) (\w+)\((['\"])(.*?)\2,?\)", str(error)) if seen else None
    return None if quoted is None else f"{quoted[1]}: {quoted[3]}"


def _is_compilers(error: BaseException) -> bool:
    return type(error).__module__ in ("torch._dynamo.exc", "torch._inductor.exc") and (
        hasattr(error, "inner_exception") or type(error).__module__ == "torch._dynamo.exc"
    )


def wraps_compiled(code: types.CodeType) -> bool:
    """Whether it is what `torch.compile` puts around a function."""
    return code.co_name == "compile_wrapper" and os.path.join("torch", "_dynamo") in code.co_filename


# The names of the operators whose results selective checkpointing keeps: matrix products, attention, and collectives whose
# results are no larger than the tensors that a rank gives. A name that this torch does not have matches nothing.
# `all_gather` is left out: checkpointing would keep the whole stream that sequence parallelism divides. Operators that
# write into their arguments, as those of `c10d` do, are left out because torch cannot keep their results.
# Waits for a public list; torch's own is in `torch._functorch.partitioners`.
COSTLY_OPERATORS = (
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::convolution",
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention.quantized",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_cudnn_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_forward.quantized",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
    "_dtensor::shard_dim_alltoall",
    "flex_attention",  # a higher-order operator
)


def compiled_graphs() -> int:
    """How many graphs `torch.compile` has made in this process. Its counters are documented for debugging and have no public
    home.
    """
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def stops_recomputation(error: BaseException) -> bool:
    """Whether an exception is how a checkpoint stops its recomputation early, and no mistake of anybody. Its class is
    private; waits for a hook argument that tells.
    """
    from torch.utils.checkpoint import _StopRecomputationError

    return isinstance(error, _StopRecomputationError)
