"""Attention modules of transformers, as they are, in a small model: what a plan must cope with that knows no sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity import TOKENS
from tests.styles.models import WIDTH, Conv1D, Scale


def small(kind: str, **more: Any) -> Any:
    """A configuration of an architecture, small."""
    from transformers import AutoConfig

    sizes = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 16}
    config = AutoConfig.for_model(kind, **sizes, **more)
    config._attn_implementation = "sdpa"
    return config


class Rotated(nn.Module):
    """An attention that is given the cosines and sines of its positions."""

    def __init__(self, attention: nn.Module, size: int) -> None:
        super().__init__()
        self.attention, self.size = attention, size

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(TOKENS, dtype=x.dtype, device=x.device)[:, None]
        angles = steps / 10.0 ** torch.linspace(0, 1, self.size, dtype=x.dtype, device=x.device)
        y: Tensor = self.attention(
            x, position_embeddings=(angles.cos()[None], angles.sin()[None]), attention_mask=None
        )[0]
        return y


class Plain(nn.Module):
    """An attention that is given nothing but its input."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x)[0]
        return y


def phi3() -> nn.Module:
    """`q|k|v` in one linear, the sizes of which only the configuration knows; two query heads to a key head."""
    from transformers.models.phi3.modeling_phi3 import Phi3Attention

    return Rotated(Phi3Attention(small("phi3", num_key_value_heads=2), 0), WIDTH // 4)


def phi3_mlp() -> nn.Module:
    """`gate|up` in one linear."""
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    mlp: nn.Module = Phi3MLP(small("phi3"))
    return mlp


def gpt2() -> nn.Module:
    """`q|k|v` in a Conv1D, taken apart by `split_size`."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    attention = Plain(GPT2Attention(small("gpt2", attn_pdrop=0.0, resid_pdrop=0.0), layer_idx=0))
    for module in attention.modules():
        if type(module).__name__ == "Conv1D":
            module.__class__ = resettable(type(module), Conv1D.reset_parameters)
    return attention


def qwen3() -> nn.Module:
    """A norm over each head's queries, and one over its keys, the same for all heads."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    attention = Qwen3Attention(small("qwen3", num_key_value_heads=2, head_dim=2), 0)
    for module in (attention.q_norm, attention.k_norm):
        module.__class__ = resettable(type(module), Scale.reset_parameters)
    return Rotated(attention, 2)


def t5() -> nn.Module:
    """A bias of each head for each distance, from a table [distances, heads]; forward counts heads by -1."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=WIDTH, d_kv=2, num_heads=4, dropout_rate=0.0, relative_attention_num_buckets=8)
    config._attn_implementation = "sdpa"
    return Plain(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))


def gpt_neox() -> nn.Module:
    """Queries, keys and values of each head side by side."""
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

    config = small(
        "gpt_neox", rope_parameters={"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 1.0}
    )
    return Rotated(GPTNeoXAttention(config, layer_idx=0), WIDTH // 4)


def resettable(kind: type[nn.Module], reset: Callable[[Any], None]) -> type[nn.Module]:
    """A module class with the `reset_parameters` that it lacks."""
    return type(kind.__name__, (kind,), {"reset_parameters": reset})
