"""The norms of the shipped models are torch's, which has one kernel for them on CUDA."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.models import encoder_decoder, llama
from tests.models.test_encoder_decoder import ids, model
from tests.models.test_llama import small, token_ids


class Calls(TorchFunctionMode):
    """Counts the functions of torch that are called, by name."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_each_norm_is_one_call_of_torchs_and_nothing_by_hand() -> None:
    models: list[tuple[nn.Module, tuple[torch.Tensor, ...], type[nn.Module], int]] = [
        (small(), (token_ids(),), llama.RMSNorm, 5),
        (model(), (ids(9, 1), ids(7, 2)), encoder_decoder.RMSNorm, 12),
    ]
    for built, inputs, norm, norms in models:
        with Calls() as calls:
            built(*inputs)
        assert sum(isinstance(module, norm) for module in built.modules()) == norms
        assert calls.of["rms_norm"] == norms
        assert not {"rsqrt", "sqrt", "square", "pow", "mean"} & calls.of.keys()
