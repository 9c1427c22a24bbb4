"""A checkpoint is there whole or not at all, and what fails leaves the run and the older ones alone."""

from __future__ import annotations

import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from parallelizer.runtime.checkpoint import folder as names
from parallelizer.runtime.checkpoint import manifest, saving
from parallelizer.runtime.checkpoint.loading import load_checkpoint, newest_checkpoint
from parallelizer.runtime.checkpoint.saving import Checkpoints, Saved, save_checkpoint
from tests.ranks import run_ranks
from tests.runtime.checkpoint.models import (
    Alone,
    adamw,
    evaluate,
    gathered_state,
    parallel,
    step_alone,
    train,
)


def alone() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model that has been trained for a step."""
    torch.manual_seed(0)
    model = Alone(width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    step_alone(model, optimizer)
    return model, optimizer


def saved(checkpoints: Checkpoints, step: int, *what: Any) -> Saved:
    checkpoints.save(step, *what)
    checkpoints.wait()
    [ended] = checkpoints.ended()
    return ended


def whole(folder: Path) -> dict[int, bool]:
    """The finished checkpoints, and whether every file of each is as it was written."""
    return {
        step: not manifest.check(path, files := manifest.read(path), files)
        for step in names.steps_in(folder)
        for path in [folder / names.name(step)]
    }


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path: Path) -> None:
    model, optimizer = alone()
    checkpoints, before = Checkpoints(tmp_path), gathered_state(model, optimizer)
    checkpoints.save(1, model, optimizer, {"samples": 3, "text": "a"})
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
            optimizer.state[p]["exp_avg"].fill_(7)
    checkpoints.wait()
    [ended] = checkpoints.ended()
    assert (
        ended == Saved(1, tmp_path / "step_1", ended.seconds)
        and ended.seconds > 0
        and not checkpoints.ended()
    )
    opened = load_checkpoint(tmp_path / "step_1", model, optimizer)
    assert gathered_state(model, optimizer) == before
    assert opened.state == {"samples": 3, "text": "a"} and opened.step == 1
    assert set(opened.files) == {".metadata", "__0_0.distcp", "run.json"}
    assert {p.name for p in (tmp_path / "step_1").iterdir()} == {*opened.files, manifest.NAME}


def test_saves_in_a_row_wait_for_each_other_and_the_old_ones_go(tmp_path: Path) -> None:
    model, optimizer = alone()
    checkpoints, states = Checkpoints(tmp_path, keep_last=2, keep_every=4), {}
    for step in range(1, 8):
        checkpoints.save(step, model, optimizer)
        states[step] = gathered_state(model, optimizer)
        step_alone(model, optimizer)
    checkpoints.wait()
    assert [(s.step, s.failure) for s in checkpoints.ended()] == [(n, None) for n in range(1, 8)]
    assert whole(tmp_path) == {4: True, 6: True, 7: True} and not names.leftovers(tmp_path)
    for step in (4, 6, 7):
        load_checkpoint(tmp_path / f"step_{step}", model, optimizer)
        assert gathered_state(model, optimizer) == states[step]


def test_newer_ones_that_a_run_passed_over_do_not_push_out_what_it_writes(tmp_path: Path) -> None:
    """They are damaged: it began behind them."""
    for step in (20, 30):
        (tmp_path / f"step_{step}").mkdir()
    checkpoints, what = Checkpoints(tmp_path, keep_last=1), alone()
    for step in (5, 10):
        assert saved(checkpoints, step, *what).failure is None
        assert names.steps_in(tmp_path) == [step, 20, 30]
    assert saved(checkpoints, 30, *what).failure is None
    assert whole(tmp_path) == {30: True}


def test_a_step_that_is_there_is_written_anew(tmp_path: Path) -> None:
    model, optimizer = alone()
    save_checkpoint(tmp_path, 1, model, optimizer)
    (tmp_path / "step_1" / "old").write_text("of the first")
    (tmp_path / "step_1.tmp").mkdir()
    (tmp_path / "step_1.tmp" / "old").write_text("of a save that was killed")
    step_alone(model, optimizer)
    state = gathered_state(model, optimizer)
    assert save_checkpoint(tmp_path, 1, model, optimizer) == tmp_path / "step_1"
    assert whole(tmp_path) == {1: True} and not names.leftovers(tmp_path)
    assert not (tmp_path / "step_1" / "old").exists()
    load_checkpoint(tmp_path / "step_1", model, optimizer)
    assert gathered_state(model, optimizer) == state


def test_what_killed_runs_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    for name in ("step_8.tmp", "step_4.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    save_checkpoint(tmp_path, 9, *alone())
    assert [p.name for p in tmp_path.iterdir()] == ["step_9"]


def test_nothing_is_written_before_the_copies_from_a_gpu_have_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.zeros(3)
    waited_on: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: nullcontext(waited_on.append(gpu)))

    class Event:
        device = "the rank's GPU"

        def synchronize(self) -> None:
            values.fill_(7)

    checkpoints, piece = Checkpoints(tmp_path), saving.Piece("model.weight", (3,), (0,), values)
    checkpoints._write(1, [piece], Event(), {"step": 1}, torch.get_num_threads())  # type: ignore[arg-type]
    [ended] = checkpoints.ended()
    assert ended.failure is None
    read = {"model.weight": torch.zeros(3)}
    dcp.load(read, storage_reader=dcp.FileSystemReader(tmp_path / "step_1"), no_dist=True)
    assert read["model.weight"].tolist() == [7, 7, 7]
    assert waited_on == ["the rank's GPU"]


def test_the_thread_that_writes_uses_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new thread the current GPU is the first one, whichever the rank has."""

    def used(*_: Any) -> Any:
        raise AssertionError("the thread asks for a stream")

    what = alone()
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", used)
    assert saved(checkpoints, 1, *what).failure is None


def test_no_name_is_given_before_everything_has_been_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk, say, holds other bytes than were written."""
    verified = saving.HashedFiles.verified

    def spoiled(files: saving.HashedFiles) -> Any:
        [data] = [path for path in files.written if path.suffix == ".distcp"]
        data.write_bytes(data.read_bytes()[:-1] + b"?")
        return verified(files)

    model, optimizer = alone()
    checkpoints = Checkpoints(tmp_path)
    assert saved(checkpoints, 1, model, optimizer).failure is None
    monkeypatch.setattr(saving.HashedFiles, "verified", spoiled)
    failure = saved(checkpoints, 2, model, optimizer).failure
    assert (
        failure is not None and "__0_0.distcp does not contain the bytes that were written" in failure.message
    )
    assert whole(tmp_path) == {1: True} and not names.leftovers(tmp_path)


def test_what_json_cannot_hold_is_told(tmp_path: Path) -> None:
    model, optimizer = alone()
    failure = saved(Checkpoints(tmp_path), 1, model, optimizer, {"x": object()}).failure
    assert failure is not None and "not JSON serializable" in failure.message and not whole(tmp_path)


# What the system refuses.


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory. Skips where this process may not mount one."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("no file system can be mounted here: that takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def pages(path: Path) -> int:
    return sum(-(-file.stat().st_size // 4096) for file in path.iterdir())


def test_a_disk_that_is_full_at_any_point_costs_that_checkpoint_alone(tmp_path: Path) -> None:
    """From no room to one page too little: in the numbers, the index, the account of the run, and the manifest."""
    model, optimizer = alone()
    with mounted(tmp_path / "disk", "size=1m") as disk:
        checkpoints = Checkpoints(disk)
        assert saved(checkpoints, 1, model, optimizer).failure is None
        needed = pages(disk / "step_1")
        assert needed > 5
        for room in range(needed):
            remount(disk, f"size={4 * (needed + room)}k")
            failure = saved(checkpoints, 2, model, optimizer).failure
            assert (
                failure is not None
                and failure.code == "checkpoint-unwritable"
                and failure.severity == "warning"
            )
            assert failure.message == "the checkpoint was not written: No space left on device", room
            assert failure.span is not None and failure.span.file == str(disk / "step_2")
            assert whole(disk) == {1: True} and [p.name for p in disk.iterdir()] == ["step_1"]
        remount(disk, f"size={4 * 2 * needed}k")
        assert saved(checkpoints, 2, model, optimizer).failure is None and whole(disk) == {1: True, 2: True}


def test_a_read_only_folder_costs_the_checkpoint_alone(tmp_path: Path) -> None:
    model, optimizer = alone()
    with mounted(tmp_path / "disk", "size=1m") as disk:
        checkpoints = Checkpoints(disk, keep_last=1)
        assert saved(checkpoints, 1, model, optimizer).failure is None
        remount(disk, "ro")
        failure = saved(checkpoints, 2, model, optimizer).failure
        assert failure is not None and failure.message.endswith("Read-only file system") and failure.help
        assert whole(disk) == {1: True}
        remount(disk, "rw")
        assert saved(checkpoints, 3, model, optimizer).failure is None and whole(disk) == {3: True}


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failure = saved(Checkpoints(tmp_path / "file" / "checkpoints"), 1, *alone()).failure
    assert failure is not None and failure.message == "the checkpoint was not written: Not a directory"
    with pytest.raises(OSError, match="Not a directory"):
        save_checkpoint(tmp_path / "file", 1, *alone())


def test_an_old_one_that_cannot_be_removed_is_no_reason_to_call_the_new_one_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError

    checkpoints = Checkpoints(tmp_path, keep_last=1)
    what = alone()
    saved(checkpoints, 1, *what)
    monkeypatch.setattr(names, "remove", refused)
    assert saved(checkpoints, 2, *what).failure is None and whole(tmp_path) == {1: True, 2: True}


# With ranks.


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """As a full disk, for this process alone: the system refuses bytes of a file beyond so many."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What 4 ranks see of one life: see the tests."""
    folder = tmp_path_factory.mktemp("ranks")

    def worker() -> dict[str, Any]:
        rank, found = dist.get_rank(), dict[str, Any]()
        model = parallel({"dp_shard": 2, "tp": 2})
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        checkpoints = Checkpoints(folder / "a", keep_last=1, timeout=60)
        before = gathered_state(model, optimizer)

        assert saved(checkpoints, 2, model, optimizer).failure is None
        assert checkpoints._copies is not None
        copies = checkpoints._copies.tensors
        found["bytes"] = sum(c.nbytes for (n, _), c in copies.items() if n.startswith("model."))
        found["copies"] = {k: c.data_ptr() for k, c in copies.items()}

        evaluate(model)  # which leaves the root of FSDP's units whole
        assert saved(checkpoints, 3, model, optimizer).failure is None
        found["same memory"] = found.pop("copies") == {
            k: c.data_ptr() for k, c in checkpoints._copies.tensors.items()
        }
        found["evaluated"] = gathered_state(model, optimizer) == before

        found["failures"] = {}
        for name, hurt in (("data", 3), ("data", 0), ("index", 0), ("account", 0)):
            room = {"data": 2000, "index": 30_000, "account": 1}[name]
            if name == "account":
                state: dict[str, Any] = {"x": "y" * 10**6}
                room = 500_000
            else:
                state = {}
            with no_file_above(room if rank == hurt else resource.RLIM_INFINITY):
                ended = saved(checkpoints, 4, model, optimizer, state)
            found["failures"][f"{name} of rank {hurt}"] = ended.failure.message if ended.failure else None
            dist.barrier()
            found["left"] = sorted(p.name for p in (folder / "a").iterdir())
            dist.barrier()

        threads = threading.active_count()
        after = train(model, optimizer, [2])  # the run goes on
        checkpoints.save(5, model, optimizer)
        after += train(model, optimizer, [3])  # beside what is being written
        checkpoints.wait()
        found["written at last"] = [s.failure for s in checkpoints.ended()]
        found["threads"] = threading.active_count() - threads
        opened, passed = newest_checkpoint(folder / "a")
        assert opened is not None and not passed
        other = parallel({"dp_replicate": 4}, seed=5)
        own = adamw(other)
        load_checkpoint(opened, other, own)
        found["step"], found["apart"] = opened.step, abs(train(other, own, [3])[0] - after[1])
        return found

    ranks = run_ranks(worker, 4)
    sizes = {n: p for n, p in parallel({}).state_dict().items() if n not in ("after.weight",)}
    return {"folder": folder, "ranks": ranks, "numbers": sum(t.nbytes for t in sizes.values())}


@pytest.mark.ranks
def test_a_rank_copies_only_what_it_writes_and_all_together_the_model_once(told: dict[str, Any]) -> None:
    own = [found["bytes"] for found in told["ranks"]]
    assert sum(own) == told["numbers"] and min(own) > 0.1 * told["numbers"]
    assert all(
        found["same memory"] for found in told["ranks"]
    )  # and in the next save into the memory of the last


@pytest.mark.ranks
def test_a_model_that_evaluation_left_unsharded_is_saved(told: dict[str, Any]) -> None:
    assert all(found["evaluated"] for found in told["ranks"])


@pytest.mark.ranks
def test_one_ranks_full_disk_fails_on_all_and_nothing_is_left(told: dict[str, Any]) -> None:
    for found in told["ranks"]:
        assert set(found["failures"].values()) == {"the checkpoint was not written: File too large"}, found
        assert found["left"] == ["step_3"]


@pytest.mark.ranks
def test_the_run_goes_on_after_that_and_the_next_checkpoint_is_whole(told: dict[str, Any]) -> None:
    assert whole(told["folder"] / "a") == {5: True}
    for found in told["ranks"]:
        assert found["written at last"] == [None] and found["step"] == 5 and found["apart"] < 1e-5
        assert found["threads"] == 0
