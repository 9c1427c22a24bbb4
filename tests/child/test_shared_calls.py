"""Calls that several callers share: each runs once, and nothing stays behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from parallelizer.child.children import WorldError
from parallelizer.child.shared_calls import SharedCalls
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError


def test_equal_keys_share_a_call_and_others_do_not() -> None:
    with SharedCalls() as calls:
        one, same, other = (calls.start(key, os.getpid) for key in ([1], [1], [2]))
        assert one() == same() == one()
        assert other() != one()


def test_every_caller_gets_the_error() -> None:
    found = (Diagnostic("trace-failed", "one"),)

    def refuse() -> None:
        raise PlanError(found)

    with SharedCalls() as calls:
        for _ in range(2):
            with pytest.raises(PlanError) as caught:
                calls.start("refused", refuse)()
            assert caught.value.diagnostics == found
            with pytest.raises(WorldError, match="ZeroDivisionError"):
                calls.start("broken", lambda: 1 / 0)()


def test_a_call_whose_result_no_caller_took_is_killed(tmp_path: Path) -> None:
    def late() -> None:
        time.sleep(20)
        (tmp_path / "late").touch()

    began = time.monotonic()
    with SharedCalls() as calls:
        calls.start("late", late)
    assert time.monotonic() - began < 10 and not (tmp_path / "late").exists()
