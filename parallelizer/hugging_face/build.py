"""A causal language model of transformers, from a folder or hub id, or from an architecture and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

IMPLEMENTATION = "parallelizer"
"""The name under which our attention and masks are registered with transformers."""


def causal_lm(
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    auto: str = "AutoModelForCausalLM",
    attention: str = IMPLEMENTATION,
    experts: str = "batched_mm",
    dtype: str = "float32",
) -> nn.Module:
    """A transformers model without pretrained values, on the device that is the default, as on meta.

    `name` is a local folder or a hub id, of which the configuration alone is read; `config` says `model_type` and
    sizes, or changes those of `name`. `auto` is the class of transformers that chooses the model's. `attention` is an
    attention implementation; ours is transformers' sdpa with masks that know how context parallelism deals out a
    sequence. `experts` is how a mixture of experts computes: `batched_mm` can be traced. The cache of keys and values,
    of no use in training, is switched off.

    Raises ValueError when neither or an unknown architecture is given, or an attention that the model does not have,
    and ImportError without transformers.
    """
    transformers = _transformers()
    register()
    settings = dict(config or {})
    if name is not None:
        built = transformers.AutoConfig.from_pretrained(name, **settings)
    else:
        kind = settings.pop("model_type", None)
        if kind is None:
            raise ValueError("a model needs a name, or a config with a model_type, as in model.name=./folder")
        built = _config(transformers, str(kind), settings)
    if getattr(built, "use_cache", None):
        built.use_cache = False
    cls = getattr(transformers, auto, None)
    if cls is None:
        raise ValueError(f"transformers has no class {auto}")
    import torch

    chosen = _attention(cls, built, attention)
    model: nn.Module = cls.from_config(
        built, attn_implementation=chosen, experts_implementation=experts, dtype=getattr(torch, dtype)
    )
    return model


def _config(transformers: Any, kind: str, settings: Mapping[str, Any]) -> Any:
    try:
        return transformers.AutoConfig.for_model(kind, **settings)
    except ValueError:
        from parallelizer.suggest import did_you_mean

        known = sorted(transformers.CONFIG_MAPPING.keys())
        message = f"transformers {transformers.__version__} has no model_type {kind!r}"
        raise ValueError(f"{message}; {did_you_mean(kind, known, 'for example')}") from None


def _attention(auto: Any, config: Any, wanted: str) -> str:
    """Ours where the model's attention goes through scaled_dot_product_attention; else what it has."""
    if wanted != IMPLEMENTATION:
        return wanted
    from parallelizer.hugging_face import masks

    model_class = auto._model_mapping.get(type(config), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None or not model_class._can_set_attn_implementation():
        return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    return wanted if model_class._supports_sdpa or masks.capped(config) else "eager"


def register() -> None:
    """Make our attention and masks known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from parallelizer.hugging_face import attention, masks

    AttentionInterface.register(IMPLEMENTATION, attention.forward)
    AttentionMaskInterface.register(IMPLEMENTATION, masks.mask)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError("transformers is not installed: pip install 'parallelizer[hf]'") from None
    return transformers
