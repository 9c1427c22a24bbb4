"""Which rank lacks the collective in which the others wait, by the ranks' records."""

from __future__ import annotations

import os
import pickle
import select
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelizer.runtime.launch import lacking, records, watch
from parallelizer.runtime.launch.heartbeat import Beats, beat
from parallelizer.runtime.launch.launcher import LaunchError, start
from parallelizer.runtime.launch.lookout import Lookout
from parallelizer.runtime.launch.own_watch import own_watch
from parallelizer.runtime.launch.rank import Launch
from tests.runtime.launch.flight import dump, entry

TP = {"tp": [0, 1, 2, 3]}


def told(
    folder: Path,
    entries: Mapping[int, Sequence[Mapping[str, Any]]],
    groups: Mapping[Any, Any] = TP,
    world: int = 4,
    **more: Any,
) -> list[str]:
    """What is said of ranks that have written these records; `groups` may differ by rank."""
    for rank, of_rank in entries.items():
        of = groups.get(rank, groups)
        (folder / f"collectives_rank{rank}").write_bytes(dump(of_rank, of))
    return lacking.describe(*records.read_all(records.prefix(folder), world, 0.0), **more)


def before(line: int = 3) -> dict[str, Any]:
    return entry("_all_gather_base", 16, "tp", line=line)


def test_a_rank_that_is_behind_is_named_with_what_it_called_last(tmp_path: Path) -> None:
    waits = [before(), entry("all_reduce", 17, "tp", state="started", line=41)]
    ahead = [*waits, entry("all_reduce", 18, "tp", state="scheduled", line=50)]
    entries = {0: waits, 1: ahead, 2: waits, 3: [before()]}
    what = "rank 3 lacks all-reduce 17 of axis tp (ranks 0-3), in which ranks 0-2 wait at /home/model.py:41"
    assert told(tmp_path, entries) == [
        f"{what}; rank 3 called all-gather 16 of axis tp last at /home/model.py:3"
    ]
    assert told(tmp_path, entries, places={3: "load (/home/data.py:8)"}) == [
        f"{what}; rank 3 is in load (/home/data.py:8)"
    ]


def test_a_rank_that_never_called_anything_in_the_group_lacks_it(tmp_path: Path) -> None:
    waits = [entry("all_reduce", 1, "tp", state="scheduled", line=None)]
    groups = {"tp": [0, 1]}
    entries: dict[int, list[dict[str, Any]]] = {0: waits, 1: []}
    assert told(tmp_path, entries, groups, 2) == [
        "rank 1 lacks all-reduce 1 of axis tp (ranks 0-1), in which rank 0 waits"
    ]


def test_another_collective_and_another_size_are_named(tmp_path: Path) -> None:
    waits = [before(), entry("all_reduce", 17, "tp", state="started", line=41)]
    other = [before(), entry("_reduce_scatter_base", 17, "tp", state="started", line=44)]
    larger = [before(), entry("all_reduce", 17, "tp", state="started", line=41, sizes=[[8, 2]])]
    where = "ranks 0-2 wait in all-reduce 17 of axis tp (ranks 0-3) at /home/model.py:41; rank 3 waits in "
    assert told(tmp_path, {0: waits, 1: waits, 2: waits, 3: other}) == [
        f"{where}reduce-scatter 17 instead at /home/model.py:44"
    ]
    assert told(tmp_path, {0: waits, 1: waits, 2: waits, 3: larger}) == [
        f"{where}the same with tensors of other sizes instead at /home/model.py:41"
    ]
    # Blocks of an all-to-all may differ.
    uneven = [
        [before(), entry("all_to_all", 17, "tp", state="started", sizes=[[rank, 2]])] for rank in range(4)
    ]
    assert told(tmp_path, dict(enumerate(uneven))) == [
        "ranks 0-3 wait in all-to-all 17 of axis tp (ranks 0-3) at /home/model.py:1; "
        "all of its ranks have called it, and it has not ended"
    ]


def test_a_rank_without_a_record_and_a_cut_one(tmp_path: Path) -> None:
    waits = [before(), entry("all_reduce", 17, "tp", state="started", line=41)]
    text = "ranks 0-1 wait in all-reduce 17 of axis tp (ranks 0-3) at /home/model.py:41; ranks 2-3 have written no record"
    assert told(tmp_path, {0: waits, 1: waits}) == [text]
    path = tmp_path / "collectives_rank2"
    path.write_bytes(dump(waits, TP)[:-20])
    read = told(tmp_path, {0: waits, 1: waits})
    assert read[0] == text and read[1].startswith(
        f"the record of rank 2 cannot be read: {path}: it is cut off"
    )


def test_the_rank_that_does_not_wait_itself_comes_first(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for rank 2 in `a`, rank 2 for rank 3 in `b`."""
    groups = {0: {"a": [0, 1, 2]}, 1: {"a": [0, 1, 2]}, 2: {"a": [0, 1, 2], "b": [2, 3]}, 3: {"b": [2, 3]}}
    in_a, in_b = (entry("all_reduce", 4, group, state="started") for group in "ab")
    first, second = told(tmp_path, {0: [in_a], 1: [in_a], 2: [in_b], 3: []}, groups)
    assert first.startswith("rank 3 lacks all-reduce 4 of axis b (ranks 2-3), in which rank 2 waits")
    assert second.startswith("rank 2 lacks all-reduce 4 of axis a (ranks 0-2), in which ranks 0-1 wait")


def test_groups_of_one_name_and_other_ranks_are_apart(tmp_path: Path) -> None:
    groups = {0: {"tp": [0, 1]}, 1: {"tp": [0, 1]}, 2: {"tp": [2, 3]}, 3: {"tp": [2, 3]}}
    done, waits = [before()], [before(), entry("all_reduce", 17, "tp", state="started")]
    (line,) = told(tmp_path, {0: done, 1: done, 2: waits, 3: done}, groups)
    assert line.startswith("rank 3 lacks all-reduce 17 of axis tp (ranks 2-3), in which rank 2 waits")


def exchange(rank: int, number: int, state: str, world: int = 4) -> list[dict[str, Any]]:
    """A rank's part of a ring's exchange."""
    ends: dict[str, Any] = {"state": state, "message": True, "line": 95}
    return [
        entry(f"send {rank}->{(rank + 1) % world}", number, "cp", **{**ends, "state": "scheduled"}),
        entry(f"recv {rank}<-{(rank - 1) % world}", number, "cp", **{**ends, "state": "scheduled"}),
        entry("coalesced", number, "cp", **ends),
    ]


def test_a_ring_waits_for_the_rank_that_has_not_sent(tmp_path: Path) -> None:
    done = {rank: exchange(rank, 1, "completed") for rank in range(4)}
    entries = {rank: [*done[rank], *(exchange(rank, 2, "started") if rank != 1 else [])] for rank in range(4)}
    (line,) = told(tmp_path, entries, {"cp": [0, 1, 2, 3]})
    assert line.startswith(
        "rank 1 lacks message 2 of axis cp (ranks 0-3), in which ranks 0, 2-3 wait at /home/model.py:95"
    )


def test_a_stage_waits_for_the_one_that_has_not_sent(tmp_path: Path) -> None:
    """Both ranks of a channel number its messages alike. In a larger group single messages have no common number."""
    received = entry("recv 1<-0", 1, "pp", message=True)
    waits = entry("recv 1<-0", 2, "pp", state="started", message=True)
    entries = {4: [entry("send 0->1", 1, "pp", message=True)], 6: [received, waits]}
    (line,) = told(tmp_path, entries, {"pp": [4, 6]}, 8)
    assert line.startswith("rank 4 lacks message 2 of axis pp (ranks 4, 6), in which rank 6 waits")
    assert told(tmp_path, entries, {"pp": [4, 6, 7]}, 8) == []


def test_nothing_is_said_without_records_or_when_all_has_ended(tmp_path: Path) -> None:
    assert lacking.describe({}, {}) == []
    assert told(tmp_path, {rank: [before()] for rank in range(4)}) == []


class Stuck(Lookout):
    def look(self, beats: object, now: float) -> float:
        return 300.0


def test_the_report_of_stuck_ranks_asks_them_for_their_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thread stands in for the one of NCCL that reads the pipe."""
    logs, folder = tmp_path / "logs", tmp_path / "notes"
    logs.mkdir()
    folder.mkdir()
    waits = [before(), entry("all_reduce", 17, "tp", state="started", line=None)]
    pipes = [folder / f"collectives.{rank}.pipe" for rank in range(2)]
    ends = []
    for pipe in pipes:
        os.mkfifo(pipe)
        ends.append(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))

    def answer() -> None:
        select.select(ends[:1], [], [])
        for rank, calls in enumerate([waits, [before(line=8)]]):
            whole = dump(calls, {"tp": [0, 1]})
            (logs / f"collectives_rank{rank}").write_bytes(whole[:40])
            time.sleep(0.2)
            (logs / f"collectives_rank{rank}").write_bytes(whole)

    for rank in range(2):  # of an earlier attempt
        path = logs / f"collectives_rank{rank}"
        path.write_bytes(dump([before()], {"tp": [0, 1]}))
        os.utime(path, (0, 0))
    thread = threading.Thread(target=answer)
    thread.start()
    job = Launch(print, (), 2, "cuda", logs, 60.0, 0, folder, os.getpid())
    watch._look_out(watch.Watch(job, frozenset()), Stuck(300.0), 0.0)
    thread.join()
    for end in ends:
        os.close(end)
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("warning: no progress for 300 s")
    assert said[-1] == (
        "  rank 1 lacks all-reduce 17 of axis tp (ranks 0-1), in which rank 0 waits; "
        "rank 1 called all-gather 16 of axis tp last at /home/model.py:8"
    )


def test_rank_0_of_those_that_others_started_says_who_lacks_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each rank asks itself. A thread stands in for the one of NCCL that reads the pipe of rank 0; rank 1 was asked before."""
    for name in records._PLACE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    logs, private = tmp_path / "logs", tmp_path / "private"
    logs.mkdir()
    private.mkdir()
    records.write_to(logs)
    pipe = private / "collectives.0.pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def answer() -> None:
        select.select([end], [], [], 20.0)
        assert os.read(end, 9) == b"1"
        waits = [before(), entry("all_reduce", 17, "tp", state="started", line=None)]
        (logs / "collectives_rank0").write_bytes(dump(waits, {"tp": [0, 1]}))

    thread = threading.Thread(target=answer)
    thread.start()
    with own_watch(0, 2, 0.5, private):
        beat(12)
        (logs / "collectives_rank1").write_bytes(dump([before(line=8)], {"tp": [0, 1]}))
        thread.join()
        time.sleep(0.5)
    os.close(end)
    assert capfd.readouterr().err.splitlines()[-1] == (
        "  rank 1 lacks all-reduce 17 of axis tp (ranks 0-1), in which rank 0 waits; "
        "rank 1 called all-gather 16 of axis tp last at /home/model.py:8"
    )


def late(folder: str) -> None:
    """A rank of gloo that lacks the second all-reduce of a group. Ranks call collectives without waiting, as with NCCL, and
    write their records before the timeout.
    """
    group = dist.new_group(group_desc="mesh_tp")
    dist.all_reduce(torch.ones(4), group=group)
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(4), group=group, async_op=True)
    c10d: Any = torch._C._distributed_c10d  # the stub lacks the name
    written = c10d._dump_fr_trace()
    # Another thread records that the first has ended, and the file appears whole: the other ranks look for its name.
    while not _has_ended(written, 1):
        time.sleep(0.01)
        written = c10d._dump_fr_trace()
    record = Path(folder) / f"collectives_rank{dist.get_rank()}"
    record.with_name(f"part{dist.get_rank()}").write_bytes(written)
    record.with_name(f"part{dist.get_rank()}").rename(record)
    while len(list(Path(folder).glob("collectives_rank?"))) < dist.get_world_size():
        time.sleep(0.01)
    raise RuntimeError("a timeout")


def _has_ended(written: bytes, number: int) -> bool:
    """Whether the record says so of this call of the group, before which the launcher may have called others."""
    return any(
        entry["retired"]
        for entry in pickle.loads(written)["entries"]
        if entry["process_group"][1] == "mesh_tp" and entry["collective_seq_id"] == number
    )


@pytest.mark.ranks
def test_the_end_of_stuck_ranks_says_which_one_lacks_what(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        start(late, (str(tmp_path),), ranks=3, device="cpu", log_dir=tmp_path)
    line = next(line for line in raised.value.message.splitlines() if " lacks " in line)
    where = f"{__file__}:{late.__code__.co_firstlineno + 7}"
    assert line.startswith(
        f"rank 2 lacks all-reduce 2 of axis tp (ranks 0-2), in which ranks 0-1 wait at {where}"
    )
    assert "torchfrtrace" in str(raised.value.help)


def test_the_records_of_a_stall_that_is_over_do_not_explain_a_later_failure(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    job = Launch(print, (), 2, "cuda", tmp_path, 60.0, 0, folder, os.getpid())
    watched = watch.Watch(job, frozenset())
    beats = Beats(folder / "beats", 2)
    for rank in range(2):
        beats.say(rank, 10, "step")
    waits = [before(), entry("all_reduce", 17, "tp", state="started", line=None)]

    def write() -> None:
        for rank, calls in enumerate([waits, [before(line=8)]]):
            (tmp_path / f"collectives_rank{rank}").write_bytes(dump(calls, {"tp": [0, 1]}))

    write()
    watch._look_out(watched, Stuck(300.0), 0.0)
    assert watched.lacking()  # it has ended in this stall
    beats.say(1, 11, "step")
    assert watched.lacking() == []
    time.sleep(0.2)
    write()  # after a timeout of NCCL
    assert watched.lacking()
