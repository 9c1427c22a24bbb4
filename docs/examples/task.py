"""What the three loops beside this file train, so that their losses can be compared: bytes of a text, rows in order."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROWS, TOKENS, STEPS = 8, 64, 5  # sequences in the global batch, tokens in each, steps of a run
SEED, RATE, CLIP = 0, 2e-3, 1.0
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


def row(number: int) -> dict[str, torch.Tensor]:
    """The sample of that number: `input_ids` and `labels`, the tokens that follow, int64 [TOKENS]."""
    window = TEXT[number * TOKENS : (number + 1) * TOKENS + 1].long()
    return {"input_ids": window[:-1], "labels": window[1:]}


def batch(step: int, part: int = 0, parts: int = 1) -> dict[str, torch.Tensor]:
    """One of the equal parts that the global batch of a step is dealt out in, [ROWS / parts, TOKENS]."""
    rows = [row(step * ROWS + i) for i in range(part * ROWS // parts, (part + 1) * ROWS // parts)]
    return {name: torch.stack([r[name] for r in rows]) for name in rows[0]}


def axes_asked_for() -> dict[str, int]:
    """The axes of the mesh, from the command line: `cp=2 tp=2`. None at all is one rank."""
    return {axis: int(size) for axis, _, size in (word.partition("=") for word in sys.argv[1:])}
