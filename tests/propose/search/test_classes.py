"""Which classes are traced, and when."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.propose.search import classes as module
from parallelizer.propose.search.candidate import FULL, Candidate
from parallelizer.propose.search.classes import TracedClasses
from parallelizer.propose.search.task import read_task
from tests.propose.search.tasks import LLAMA

ONE, TWO, FOUR, EIGHT = (Candidate(tp=tp).trace_class for tp in (1, 2, 4, 8))


@pytest.fixture(scope="module")
def made() -> TracedClasses:
    return TracedClasses(read_task([*LLAMA, "gpus=8"]).base, lambda _: None)


@pytest.fixture
def classes(made: TracedClasses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TracedClasses]:
    """Classes whose trace is their own key. Those over eight ranks are refused, and those over four take long."""

    def traced(_: TracedClasses, key: Candidate) -> Candidate:
        (tmp_path / f"{key.tp}-{key.checkpoint}-{os.getpid()}").touch()
        if key == EIGHT:
            raise PlanError([Diagnostic("heads", "eight ranks have no head each")])
        time.sleep(10.0 if key == FOUR else 0.0)
        return key

    monkeypatch.setattr(module, "_traced", traced)
    for name in ("traces", "refused", "ahead", "running", "modes_seen"):
        setattr(made, name, {})
    made.count = 0
    yield made
    made.stop()


def _made(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in folder.iterdir())


def test_a_class_that_is_likely_is_traced_ahead_and_known_when_it_is_asked_for(
    classes: TracedClasses, tmp_path: Path
) -> None:
    classes.trace([ONE], [TWO])
    assert classes.traces.keys() == {ONE} and classes.count == 1
    classes.trace([TWO, ONE])
    assert classes.traces.keys() == {ONE, TWO} and classes.count == 2
    assert _made(tmp_path) == ["1-none", "2-none"]


def test_one_that_nobody_asks_for_is_ended(classes: TracedClasses) -> None:
    classes.trace([ONE], [FOUR])
    [children] = classes.running
    [child] = children._children
    pid: Any = getattr(child, "pid", None)
    assert classes.running[children] == FOUR and os.kill(pid, 0) is None
    classes.stop()
    assert not classes.running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_is_refused_ahead_is_refused_when_it_is_asked_for(classes: TracedClasses) -> None:
    classes.trace([ONE], [EIGHT])
    assert not classes.refused
    classes.trace([EIGHT])
    assert classes.refused == {EIGHT: "heads: eight ranks have no head each"} and EIGHT not in classes.traces


def test_of_a_mode_that_is_known_the_class_without_it_is_traced_ahead(
    classes: TracedClasses, tmp_path: Path
) -> None:
    mode: Any = object()
    full = replace(TWO, checkpoint=FULL)
    classes.modes_seen[module._alike(full)] = mode
    classes.trace([ONE], [full])
    classes._trace([TWO])
    assert _made(tmp_path) == ["1-none", "2-none"]


def test_of_several_the_next_starts_when_one_is_done(classes: TracedClasses, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        classes.tell = _interrupt_at("traced one layer of 3 classes")
        classes.trace([ONE, TWO, FOUR, replace(ONE, cp=2).trace_class])
    # Before the one over four ranks is done.
    assert time.monotonic() - started < 8 and classes.traces.keys() >= {ONE, TWO}
    classes.tell = lambda _: None


def _interrupt_at(words: str) -> Any:
    def tell(text: str) -> None:
        if text == words:
            raise KeyboardInterrupt

    return tell
