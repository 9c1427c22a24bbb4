"""Module paths that the tests of globs share: those of a Llama, of a BERT, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

BLOCK = [
    "",
    ".attention",
    ".attention.wq",
    ".attention.wk",
    ".attention.wv",
    ".attention.wo",
    ".attention_norm",
    ".feed_forward",
    ".feed_forward.w1",
    ".feed_forward.w2",
    ".feed_forward.w3",
    ".ffn_norm",
]


def llama(layers: int) -> list[str]:
    """The module paths of a Llama, in the order of `named_modules`."""
    blocks = [f"layers.{i}{rest}" for i in range(layers) for rest in BLOCK]
    return ["", "tok_embeddings", "layers", *blocks, "norm", "output"]


BERT = ["", "encoder", "encoder.layer"] + [
    f"encoder.layer.{i}{rest}"
    for i in range(4)
    for rest in (
        "",
        ".attention",
        ".attention.self",
        ".attention.self.query",
        ".attention.self.key",
        ".output",
    )
]

NAMES = st.sampled_from(["a", "b", "ab", "ba", "abc", "w", "wq", "0", "1", "10"])
PATHS = st.lists(NAMES, max_size=5).map(".".join)
