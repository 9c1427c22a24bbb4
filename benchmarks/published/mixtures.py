"""The published mixtures of experts as models of transformers: sizes by their configurations on the hub, which the table of runs
does not have, and what the recipe that the table refers to sets beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.published.rows import Row

QWEN3 = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "max_position_embeddings": 40960,
}  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """A model of transformers by its `config`. `recomputed` says whether the recipe of the run computes layers again in
    backward.
    """

    config: Mapping[str, int | str]
    plan: str
    recomputed: bool


MIXTURES: Mapping[str, Mixture] = {
    "qwen3 moe 30b": Mixture(
        {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
         "moe_intermediate_size": 768},
        "hf_qwen3_moe",
        recomputed=True,
    ),
    "qwen3 moe 235b": Mixture(
        {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
         "moe_intermediate_size": 1536},
        "hf_qwen3_moe",
        recomputed=True,
    ),
}  # fmt: skip
"""By the names of the rows, in small letters and without signs."""

REFUSED: Mapping[str, str] = {
    "deepseek": "values have another size than keys, so that the dry run writes out attention, and the run has a kernel for it",
    "gpt oss": "transformers writes out its attention, because of the sinks, and the run has a kernel for it",
    "nemotron": "a hybrid of attention and state spaces, whose kernels no table has",
}
"""Why models are not composed, by how their names begin."""


def mixture_of(row: Row) -> Mixture | None:
    """The mixture of a row; None for one that is not composed, see `why_not`."""
    return MIXTURES.get(_name(row))


def why_not(row: Row) -> str | None:
    """Why the mixture of a row is not composed; None for one that is."""
    if mixture_of(row) is not None:
        return None
    name = _name(row)
    why = next((why for begin, why in REFUSED.items() if name.startswith(begin)), None)
    return why or f"the sizes of {row.run.get('model')} are neither in the file nor in mixtures.py"


def _name(row: Row) -> str:
    return " ".join(re.findall(r"[a-z0-9.]+", str(row.run.get("model")).lower()))


def is_mixture(row: Row) -> bool:
    """Whether the model of a row has experts."""
    return not row.run.get("dense", True) or row.mesh.get("ep", 1) > 1


def layers_of(row: Row) -> int:
    """The layers of the row's model."""
    mixture = mixture_of(row) if is_mixture(row) else None
    return int(row.model["layers"] if mixture is None else mixture.config["num_hidden_layers"])


def vocabulary_of(row: Row) -> int:
    """The size of its vocabulary."""
    mixture = mixture_of(row) if is_mixture(row) else None
    return int(row.model["vocab"] if mixture is None else mixture.config["vocab_size"])
