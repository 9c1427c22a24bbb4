"""Every `tp_plan` that the installed transformers carries in a configuration, with a model on meta for each."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

SETTINGS: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ROPE}},
    "DeepseekOcr2TextConfig": {
        "mlp_layer_types": ["dense"] + ["sparse"] * 11,
        "num_hidden_layers": 12,
        "moe_intermediate_size": 1408,
    },
    "DeepseekV2Config": {"moe_intermediate_size": 1408},
    "DiffusionGemmaTextConfig": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "Dots1Config": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "FlexOlmoConfig": {"num_experts": 8},
    "HunYuanMoEV1Config": {"head_dim": 128, "vocab_size": 290944, "num_experts": 8, "moe_topk": 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 16},
    "MinistralConfig": {"head_dim": 128},
    "NemotronConfig": {"num_key_value_heads": 8},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 512},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "Step3p7TextConfig": {"vocab_size": 128816},
    "T5GemmaModuleConfig": {"dropout_rate": 0.0},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
}
"""What configurations need that cannot make a model out of their own defaults, or one that two ranks can share out; all
others are taken as they are.
"""

CLASSES = {"T5GemmaModuleConfig": "T5GemmaEncoder"}
"""Models of configurations that no class of transformers names as its own."""


@dataclass(frozen=True)
class Family:
    """A configuration class that has a `base_model_tp_plan` of its own, in the folder `name` of transformers' models."""

    name: str
    config: type[Any]

    @property
    def strings(self) -> list[str]:
        """The strings of its plan, each once."""
        return sorted(set(self.config.base_model_tp_plan.values()))

    def build(self, **more: Any) -> nn.Module:
        """The model on meta, of the configuration's default sizes: a causal language model where there is one."""
        try:
            config = self.config(**{**SETTINGS.get(self.config.__name__, {}), **more})
        except Exception as error:  # whatever a configuration's validation raises
            raise ValueError(f"{self.config.__name__}: {type(error).__name__}: {error}") from None
        failures = []
        for cls in _classes(self):
            try:
                with torch.device("meta"):
                    model: nn.Module = cls._from_config(config)
                return model
            except Exception as error:  # whatever a constructor raises
                failures.append(f"{cls.__name__}: {type(error).__name__}: {error}")
        raise ValueError("; ".join(failures) or "no class takes this configuration")


def families(plan: str = "base_model_tp_plan") -> Iterator[Family]:
    """Those with a plan, in alphabetical order of folders, then as the configuration's file has them."""
    import transformers.models

    root = Path(transformers.models.__file__).parent
    for path in sorted(root.glob("*/configuration_*.py")):
        if plan not in path.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == module.__name__ and vars(cls).get(plan):
                yield Family(path.parent.name, cls)


def _classes(family: Family) -> Iterator[type[Any]]:
    """The model classes of a configuration: what the auto classes choose, then what the folder has."""
    import transformers
    from transformers import PreTrainedModel

    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"):
        try:
            found = getattr(transformers, name)._model_mapping.get(family.config, None)
        except ValueError:  # an entry that names a class of nobody's
            continue
        found = found[0] if isinstance(found, tuple) else found
        if found is not None and not found.__name__.endswith("PreTrainedModel"):
            yield found
    folder = Path(transformers.__file__).parent / "models" / family.name
    for path in sorted(folder.glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family.name}.{path.stem}")
        for name, cls in vars(module).items():
            if (
                isinstance(cls, type)
                and issubclass(cls, PreTrainedModel)
                and cls.__module__ == module.__name__
            ):
                own = cls.config_class is family.config or CLASSES.get(family.config.__name__) == name
                if own and not name.endswith("PreTrainedModel"):
                    yield cls
