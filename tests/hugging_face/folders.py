"""Tiny random models of transformers as folders, with a tokenizer made on the spot; and plans that shard them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="the extra `hf` is not installed")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNEVEN = {"vocab_size": 30, "hidden_size": 36, "intermediate_size": 52, "num_attention_heads": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama_tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "llama_uneven": {"model_type": "llama", **SMALL, **UNEVEN},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "phi3": {"model_type": "phi3", **SMALL},
}  # fmt: skip

LLAMA = """
  model.embed_tokens: rowwise
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.{self_attn.o_proj,mlp.down_proj}: rowwise
  lm_head: colwise
"""
EXPERTS = """
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.experts: {style: shard-params, params: {down_proj: shard(2)}}
"""
PLANS = {
    "llama": LLAMA,
    "llama_tied": LLAMA,
    "llama_uneven": LLAMA,
    "gpt2": """
  transformer.h.*.{attn.c_attn,mlp.c_fc}: {style: shard-params, params: {weight: shard(1), bias: shard(0)}}
  transformer.h.*.{attn,mlp}.c_proj: {style: shard-params, params: {weight: shard(0)}}
""",
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS.replace("down_proj: shard(2)", "gate_up_proj: shard(2), down_proj: shard(1)"),
    "phi3": """
  model.layers.*.self_attn.qkv_proj: {style: colwise, packed: [2, 1, 1]}
  model.layers.*.mlp.gate_up_proj: {style: colwise, packed: [1, 1]}
  model.layers.*.{self_attn.o_proj,mlp.down_proj}: rowwise
""",
}
"""By name: the rules for tensor parallelism of a plan whose forward nobody runs."""


def plan_text(name: str) -> str:
    """A plan that shards the parameters of a model in every way, over tp and the data axes."""
    blocks = "transformer.h.*" if name == "gpt2" else "model.layers.*"
    return f'version: 1\nrules:\n{PLANS[name].strip(chr(10))}\n  {blocks}: fsdp\n  "": fsdp\n'


def config_of(name: str, **more: Any) -> Any:
    """The configuration of one of the tiny models."""
    settings = {**CONFIGS[name], **more}
    return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)


def built(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of random values, the same every time."""
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():  # zeros and ones would not show what is in the wrong place
            param.normal_()
    return model


def on_meta(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same without values."""
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def write(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, file_size: str = "5GB", **more: Any
) -> Path:
    """A folder as people have them: weights, configuration, generation configuration and a tokenizer."""
    model = built(config_of(name, **more), dtype)
    model.save_pretrained(folder, max_shard_size=file_size)  # type: ignore[operator]
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """A tokenizer of words, made on the spot."""
    import tokenizers

    words = {word: i for i, word in enumerate(["[UNK]", "<s>", "</s>", "a", "tiny", "model"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", bos_token="<s>", eos_token="</s>"
    )


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by name."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def values(folder: Path, dtype: torch.dtype = torch.float32) -> Mapping[str, torch.Tensor]:
    """Parameters under all their names and buffers, as `from_pretrained` loads them."""
    return named(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters under all their names, and all buffers."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
