"""The plans that are broken, each with a small configuration that shows what it does."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.generate import Source
from tests.mutation.tree import read_tree
from tests.simulate.setups import CONFIGS, GPT, LLAMA

SMALL = ("train.seq_len=20", "train.batch_size=4")
"""Twenty tokens: what three ranks of cp do not divide."""
SHIPPED = Path(__file__).parents[2] / "configs" / "plans"


def sources() -> list[Source]:
    """The plans of the Llama that is written here, and one of a model with biases, LayerNorm, a fused projection and tied
    weights.
    """
    llama = [o for o in LLAMA if not o.startswith("train.")]
    gpt = [o for o in GPT if not o.startswith(("train.", "plan="))]
    found = [
        Source(name, read_tree(SHIPPED / f"{name}.yaml"), (*llama, *SMALL)) for name in ("llama", "llama_tp")
    ]
    return [*found, Source("gpt", read_tree(CONFIGS / "plans" / "gpt.yaml"), (*gpt, *SMALL), has_cp=False)]
