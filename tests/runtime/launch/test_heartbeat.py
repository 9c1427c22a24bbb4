"""What ranks say of their steps, as their parent reads it, and as a rank that nobody watches says it itself."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.runtime.launch import heartbeat
from parallelizer.runtime.launch.heartbeat import Beats, beat
from parallelizer.runtime.launch.own_watch import own_watch


@pytest.fixture
def beats(tmp_path: Path) -> Beats:
    return Beats(tmp_path / "beats", 3)


def said(beats: Beats, rank: int) -> tuple[int, int, str] | None:
    last = beats.last(rank)
    return last and (last.count, last.step, last.doing)


def test_nobody_listens_and_nothing_happens() -> None:
    beat(3)


def test_each_rank_has_its_own_last_beat(beats: Beats) -> None:
    beats.say(0, 5, "step")
    beats.say(2, 5, "step")
    beats.say(2, 6, "saving")
    assert [said(beats, rank) for rank in range(3)] == [(1, 5, "step"), None, (2, 6, "saving")]


def test_it_is_read_by_another_process(beats: Beats, tmp_path: Path) -> None:
    def rank() -> None:
        own = Beats(tmp_path / "beats", 3)
        heartbeat.tell_to(lambda step, doing: own.say(1, step, doing))
        for step in range(7):
            beat(step, "step")

    process = multiprocessing.get_context("fork").Process(target=rank)
    before = time.monotonic()
    process.start()
    process.join()
    assert said(beats, 1) == (7, 6, "step")
    last = beats.last(1)
    assert last is not None and before <= last.when <= time.monotonic()


@given(st.integers(-(2**63), 2**63 - 1), st.text().filter(lambda text: "\0" not in text))
def test_what_is_done_may_be_any_text_and_is_cut(step: int, doing: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        beats = Beats(Path(folder) / "beats", 1)
        beats.say(0, step, doing)
        last = beats.last(0)
        beats.close()
    assert last is not None and last.step == step
    assert doing.startswith(last.doing)
    assert last.doing == doing or len(last.doing.encode()) > 28


def test_a_beat_that_was_cut_off_in_the_middle_leaves_the_one_before(beats: Beats, tmp_path: Path) -> None:
    beats.say(1, 5, "step")
    beats.say(1, 6, "step")
    content = bytearray((tmp_path / "beats").read_bytes())
    written = content.index(b"step", 2 * 64 * 1)  # rank 1's place for even counts
    assert beats.last(1) == beats._read(2 * 64)
    content[written] ^= 1
    (tmp_path / "beats").write_bytes(content)
    assert said(beats, 1) == (1, 5, "step")


def test_a_reader_never_sees_half_a_beat(beats: Beats) -> None:
    over = threading.Event()

    def write() -> None:
        step = 0
        while not over.is_set():
            step += 1
            beats.say(0, step, f"{step}")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = [beats.last(0) for _ in range(3000)]
    finally:
        over.set()
        thread.join()
    found = [one for one in seen if one]
    assert all(one.doing == str(one.step) == str(one.count) for one in found)
    assert [one.count for one in found] == sorted(one.count for one in found)


def test_a_beat_takes_microseconds(beats: Beats) -> None:
    heartbeat.tell_to(lambda step, doing: beats.say(0, step, doing))
    try:
        times = []
        for step in range(2000):
            begin = time.perf_counter()
            beat(step)
            times.append(time.perf_counter() - begin)
    finally:
        heartbeat.tell_to(None)
    assert sorted(times)[len(times) // 2] < 1e-4


# A rank that watches itself


def stand_here(seconds: float) -> None:
    time.sleep(seconds)


def test_a_rank_that_stops_beating_says_once_where_it_stands(capfd: pytest.CaptureFixture) -> None:
    with own_watch(3, 8, 0.2):
        beat(12, "reading")
        stand_here(1.0)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "warning: rank 3 of 8: no progress for 0 s in step 12 (reading); its stack:"
    assert sum(line.startswith("warning") for line in lines) == 1
    assert any("in stand_here" in line for line in lines)
    beat(13)  # nobody listens any more


def test_a_rank_that_goes_on_and_stops_again_says_it_again(capfd: pytest.CaptureFixture) -> None:
    with own_watch(0, 2, 0.2):
        for step in (4, 5):
            beat(step)
            stand_here(0.5)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert [line.partition(" s in ")[2] for line in said] == [
        "step 4; its stack:",
        "step 5; its stack:",
    ]


@pytest.mark.parametrize("stuck_after", [0.2, 0])
def test_a_rank_that_beats_or_need_not_says_nothing(stuck_after: float, capfd: pytest.CaptureFixture) -> None:
    with own_watch(0, 1, stuck_after):
        if stuck_after:
            time.sleep(0.5)  # before the first beat
        for step in range(10 if stuck_after else 1):
            beat(step)
            time.sleep(0.05)
        time.sleep(0 if stuck_after else 0.5)
    assert capfd.readouterr().err == ""
