"""Records of collectives: read as torch writes them, and what is said of those that cannot be read."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest
from torch.distributed.flight_recorder.components.types import Op

from parallelizer.runtime.launch import records
from tests.runtime.launch.flight import dump, entry


def test_a_record_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    entries = [
        entry("all_reduce", 17, "tp", line=41),
        entry("_all_gather_base", 18, "tp", state="scheduled", line=None),
        entry("recv 1<-0", 3, "pp", state="started", message=True),
    ]
    for made in entries:  # torch's own reader takes them
        Op(made, {"tp": {0, 1}, "pp": {0, 1}}, made["process_group"][0])
    (tmp_path / "collectives_rank0").write_bytes(dump(entries, {"tp": [0, 1], "pp": [0, 2]}))
    record = records.read(tmp_path / "collectives_rank0")
    assert record.groups == {"tp": (0, 1), "pp": (0, 2)}
    first, second, third = record.calls
    assert (first.kinds, first.number, first.description, first.ended) == (
        ("all-reduce",),
        17,
        "mesh_tp",
        True,
    )
    assert (first.place, first.sizes) == ("/home/model.py:41", ((4, 2),))
    assert (second.kinds, second.ended, second.place) == (("all-gather",), False, None)
    assert (third.number, third.is_message, third.peers, third.ended) == (3, True, {0, 1}, False)


def test_a_batch_is_one_call_that_its_last_entry_ends(tmp_path: Path) -> None:
    """Entries inside of a batch have no events: their state says nothing."""
    batch = [
        entry("send 0->1", 5, "cp", state="scheduled", message=True, line=7),
        entry("recv 0<-3", 5, "cp", state="scheduled", message=True, line=7),
    ]
    path = tmp_path / "collectives_rank0"
    for state in ("completed", "started"):
        end = entry("coalesced", 5, "cp", state=state, message=True, line=8)
        path.write_bytes(dump([*batch, end], {"cp": [0, 1, 2, 3]}))
        (call,) = records.read(path).calls
        assert (call.kinds, call.peers, call.place) == (("send", "recv"), {0, 1, 3}, "/home/model.py:7")
        assert call.ended is (state == "completed")


class Wicked:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 3",)


def test_what_cannot_be_read_is_told_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "collectives_rank0"
    whole = dump([entry("all_reduce", 1, "tp")], {"tp": [0, 1]})

    def reason(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(records.UnreadableRecord) as raised:
            records.read(path)
        return str(raised.value)

    for length in range(0, len(whole), 7):
        assert reason(whole[:length]).startswith("it is cut off, or no record of torch's")
    assert "posix.system" in reason(pickle.dumps({"version": Wicked()}))
    assert reason(dump([], {}, version="3.0")) == "its version is 3.0, and only versions 2.* are known"
    assert reason(pickle.dumps([1, 2])).startswith("it has another form than expected (TypeError")
    assert "KeyError: 'entries'" in reason(pickle.dumps({"version": "2.10", "pg_config": {}}))
    broken = {"version": "2.10", "pg_config": {}, "entries": [{"is_p2p": False}]}
    assert "KeyError" in reason(pickle.dumps(broken))


def test_only_records_that_are_new_count(tmp_path: Path) -> None:
    whole, now = dump([entry("all_reduce", 1, "tp")], {"tp": [0, 1]}), time.time()
    for rank, (content, when) in enumerate([(whole, now), (whole, now - 10), (whole[:50], now)]):
        path = tmp_path / f"collectives_rank{rank}"
        path.write_bytes(content)
        os.utime(path, (when, when))
    read, unreadable = records.read_all(records.prefix(tmp_path), 4, now)
    assert read.keys() == {0} and unreadable.keys() == {2}
    begin = time.monotonic()
    assert records.read_all(records.prefix(tmp_path), 1, now, within=60.0)[0].keys() == {0}
    assert time.monotonic() - begin < 30
    assert unreadable[2].startswith(f"{tmp_path}/collectives_rank2: it is cut off")


def test_ranks_that_listen_are_asked(tmp_path: Path) -> None:
    assert not records.listening(tmp_path)
    records.ask(tmp_path, range(2))  # none listens
    pipe = tmp_path / "collectives.1.pipe"
    os.mkfifo(pipe)
    records.ask(tmp_path, range(2))  # the rank has ended
    heard = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert records.listening(tmp_path)
    records.ask(tmp_path, range(2))
    assert os.read(heard, 9) == b"1"
    os.close(heard)


def test_a_record_that_cannot_be_looked_for_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    read, unreadable = records.read_all(f"{file}/collectives_rank", 1, 0.0)
    assert read == {} and unreadable[0] == f"{file}/collectives_rank0: Not a directory"
