"""`train.deterministic`: operators whose result depends on the order of threads are errors."""

from __future__ import annotations

import os

import pytest
import torch

from parallelizer.child.children import in_children
from parallelizer.training.job.run import use_deterministic_kernels


def states() -> tuple[bool, bool, str | None]:
    use_deterministic_kernels()
    enabled = torch.are_deterministic_algorithms_enabled()
    filled: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return enabled, filled, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_only_kernels_with_one_result_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert in_children([(states,)]) == [(True, False, ":4096:8")]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert in_children([(states,)]) == [(True, False, ":16:8")]
