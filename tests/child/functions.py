"""Functions for new processes, which import this file: it imports torch, and nothing of ours."""

from __future__ import annotations

import os
import time

import torch


def visible() -> tuple[int, str | None, int]:
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.get_num_threads()


def drawn() -> list[float]:
    return torch.rand(4).tolist()


def drawn_large_and_visible() -> tuple[list[float], bytes, tuple[int, str | None, int]]:
    """All that one new process can tell: each takes seconds to start."""
    return drawn(), bytes(3_000_000), visible()


def divide() -> float:
    return 1 / 0


def sleep() -> None:
    time.sleep(60)


def kill_self() -> None:
    os.kill(os.getpid(), 9)
