"""This machine as it is measured, kept, and priced."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelizer.language.plan import Mesh
from parallelizer.simulate.time import measure
from parallelizer.simulate.time.constants import Constants
from parallelizer.simulate.time.machine import this_machine
from parallelizer.simulate.time.price_collectives import collective_seconds
from tests.simulate.time.lines import collective


def found(**changes: Any) -> dict[str, Any]:
    """A machine of four processors, as its file has it."""
    grid = {"m": [32, 64], "n": [32, 64], "k": [32, 64], "tflops": [[[0.1] * 2] * 2] * 2}
    times = {"all_gather": {"2": [10.0, 1000.0]}, "send": {"2": [20.0, 500.0]}}
    rates = {
        "memory": 5e9,
        "node": 2e9,
        "host": 5e-6,
        "module": 3e-6,
        "kernel": 0.0,
        "dtensor": 4e-5,
        "redistribute": 2e-4,
        "exchange": 6e-5,
        "unit": 1e-4,
        "busy": 1.3,
        "skew": 3e-4,
    }
    return {
        "name": measure._name(), "form": measure.FORM, "seconds": 20.0, "others": 0.0, "cores": 4, "streams": False,
        "gemm": {"float32": grid}, "attention": {"length": [128], "tflops": {"64": [0.05]}},
        "collectives": {"bytes": [1 << 10, 1 << 20], "microseconds": times}, "rates": rates, **changes,
    }  # fmt: skip


def write(folder: Path, document: dict[str, Any]) -> Path:
    file = folder / measure.FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document))
    return file


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(measure, "measure", lambda: calls.append(1) or found())
    assert measure.kept(tmp_path) == measure.kept(tmp_path) == found()
    assert calls == [1]


@pytest.mark.parametrize("changes", [{"name": "another machine"}, {"form": 1}])
def test_a_file_of_another_machine_or_form_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    file = write(tmp_path, found(**changes))
    monkeypatch.setattr(measure, "measure", found)
    assert measure.kept(tmp_path) == found() == json.loads(file.read_text())


def test_a_damaged_file_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, found()).write_text("{")
    monkeypatch.setattr(measure, "measure", found)
    assert measure.kept(tmp_path) == found()


def test_messages_take_what_was_measured(tmp_path: Path) -> None:
    write(tmp_path, found())
    machine = this_machine(tmp_path)
    assert machine.cores == 4 and not machine.streams and machine.measured and not machine.assumed
    seconds = collective_seconds(
        collective("send", 1 << 20, "pp", ranks=2), Mesh({"pp": 2}), machine, Constants()
    )
    assert seconds == pytest.approx(500e-6)


def test_one_device_has_no_measured_links_and_says_so(tmp_path: Path) -> None:
    rates = {k: v for k, v in found()["rates"].items() if k != "node"}
    write(tmp_path, found(rates=rates, streams=True, cores=0))
    [note] = this_machine(tmp_path).assumed
    assert note.code == "time-assumed" and "links" in note.message


def test_a_machine_that_was_busy_when_it_was_measured_says_so(tmp_path: Path) -> None:
    write(tmp_path, found(others=1.8))
    [note] = this_machine(tmp_path).assumed
    assert "other processes used 1.8 processors" in note.message and "delete" in str(note.help)
    write(tmp_path, found(others=0.1))
    assert not this_machine(tmp_path).assumed


def test_the_processors_that_others_use_are_counted_by_their_ticks(tmp_path: Path) -> None:
    stat, tick = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu  100 0 50 9000 1 0 0\ncpu0 1 2 3\n")

    def work() -> None:
        time.sleep(0.1)
        stat.write_text(f"cpu  {100 + tick} 0 {50 + tick} 9000 1 0 0\n")

    thread = threading.Thread(target=work)
    thread.start()
    assert measure.cores_in_use(1.0, stat) == pytest.approx(2.0, rel=0.2)
    thread.join()
    assert measure.cores_in_use(0.0, tmp_path / "none") == 0.0


def test_ranks_share_the_memory_and_those_of_one_processor_take_turns(tmp_path: Path) -> None:
    write(tmp_path, found())
    machine = this_machine(tmp_path)
    assert [machine.crowd(ranks) for ranks in (1, 4, 8)] == pytest.approx([1.0, 1.3, 2.6])
    assert machine.crowd(2) == pytest.approx(1.1)  # a third of the others is at work
    write(tmp_path, found(cores=0, streams=True))
    assert this_machine(tmp_path).crowd(8) == 1.0


def test_results_are_kept_up_to_a_size_while_others_are_made() -> None:
    alive, most = [0], [0]

    class Counted:
        def __init__(self) -> None:
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    class Result(torch.Tensor):
        counted: Counted

    def made() -> torch.Tensor:
        result = torch.ones(1000).as_subclass(Result)
        result.counted = Counted()
        return result

    measure._timed(made, lambda: None)
    assert most == [2]  # beside the one before
    measure._timed(made, lambda: None, held=40_000)
    assert 9 <= most[0] <= 12 and alive == [0]


@pytest.mark.slow
@pytest.mark.ranks
def test_this_machine_is_measured_whole_and_in_a_minute() -> None:
    made = measure.measure()
    assert (
        set(made) == set(found()) | {"source"} and made["seconds"] < 60 * 4
    )  # the machine of a test is seldom idle
    kinds = made["collectives"]["microseconds"]
    assert set(kinds) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"}
    for by_ranks in kinds.values():
        for times in by_ranks.values():
            assert len(times) == len(measure.PAYLOADS) and times[-1] > times[0] > 0
    assert set(made["rates"]) == set(found()["rates"])
    assert 1.0 <= made["rates"]["busy"] < 4.0
    assert made["rates"]["node"] > 1e7 and made["rates"]["dtensor"] > 0 and made["rates"]["host"] > 0
