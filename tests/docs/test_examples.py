"""The examples in docs/ run as written, and say the same on any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(example: str, ranks: int) -> list[str]:
    """What it prints under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(ROOT / "docs" / "examples" / example)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.ranks
def test_the_encoder_and_decoder_have_the_same_losses_on_one_rank_and_on_two() -> None:
    alone = run("encoder_decoder.py", 1)
    assert len(alone) == 5 and alone[0] != alone[4]
    assert run("encoder_decoder.py", 2) == alone
