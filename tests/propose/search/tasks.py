"""Small searches, as the command line gives them."""

from __future__ import annotations

LLAMA = (
    "model.dim=64",
    "model.hidden_dim=128",
    "model.max_seq_len=256",
    "model.n_layers=4",
    "train.seq_len=32",
    "train.batch_size=8",
    "hardware=h100",
)
