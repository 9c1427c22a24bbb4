"""`flex_attention` outside of context parallelism, in a step on fake tensors.

Its kernels are compiled at the first call on a GPU, and it does not support gradients elsewhere. On a GPU it
stores what any fused attention stores, queries, keys, values, the result and its log-sum-exp, for any mask.
So a fused attention runs instead. Under a `score_mod`, whose captured tensors have gradients, and if
statistics are requested, plain operations compute the scores, and more memory is counted than those kernels
use.
"""

from __future__ import annotations

from typing import Any

import torch

from parallelizer.compiler.observe.function_mode import FunctionMode
from parallelizer.styles.context_parallel.flex import plain_attention
from parallelizer.torch_private import NOT_FLEX, FlexAnswer, FlexCall, FlexCalls


def fused(call: FlexCall) -> FlexAnswer:
    """The shapes of a call's result, and the operators that a step with it runs."""
    q, k, v = call.query, call.key, call.value
    if call.score_mod is None and not call.statistics:
        attend = torch.ops.aten.scaled_dot_product_attention.default
        return FlexAnswer(attend(q, k, v, scale=call.scale, enable_gqa=q.size(1) != k.size(1)))
    rows = torch.arange(q.size(2), device=q.device)
    mask_mod = call.block_mask.mask_mod if call.block_mask is not None else None
    return plain_attention(q, k, v, call.score_mod, mask_mod, call.scale, rows)


class FlexAttention(FunctionMode):
    """Answers `flex_attention` by `fused`, in a checkpoint's recomputation too."""

    def __init__(self) -> None:
        super().__init__()
        self.flex = FlexCalls(fused)

    def __exit__(self, *error: Any) -> None:
        self.flex.close()
        super().__exit__(*error)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = self.flex(func, args, kwargs)
        return super().call(func, args, kwargs) if answer is NOT_FLEX else answer
