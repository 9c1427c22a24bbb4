"""Saving in the background: the tensors are copied, and a thread writes the copy while the next steps run.

    copy -> step_N.tmp: torch.distributed.checkpoint's files, run.json -> read back -> manifest.json -> step_N -> old ones removed

If saving fails, for example because the disk is full or the folder is read-only, it fails on all ranks and
returns a diagnostic. The run and the earlier checkpoints are not affected.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.runtime.checkpoint import folder as names
from parallelizer.runtime.checkpoint import manifest
from parallelizer.runtime.checkpoint.contents import (
    Held,
    about_optimizer,
    held_of_model,
    held_of_optimizer,
    held_random,
)
from parallelizer.runtime.checkpoint.copies import HostCopies
from parallelizer.runtime.checkpoint.hashed import HashedFiles
from parallelizer.runtime.checkpoint.planning import Piece, Writing
from parallelizer.runtime.fail_together import gathered
from parallelizer.runtime.object_group import background_group, lend
from parallelizer.runtime.state import state_of

RUN = "run.json"

PieceKey = tuple[str, tuple[int, ...]]
"""The name of a piece's tensor, and where the piece begins in it."""


@contextmanager
def plain_failures() -> Iterator[None]:
    """Raise what has failed on the first rank that failed. torch raises it with a traceback of every rank, in an exception
    that is none: `except Exception` lets it through.
    """
    try:
        yield
    except dcp.CheckpointException as error:
        inner = next(iter(error.failures.values()))[0]
        raise inner if isinstance(inner, Exception) else RuntimeError(repr(inner)) from error


@dataclass(frozen=True)
class Saved:
    """How a save ended: the checkpoint's folder and the seconds that it took beside the training, or what went wrong."""

    step: int
    path: Path
    seconds: float
    failure: Diagnostic | None = None


class Checkpoints:
    """The checkpoints of one run in `folder`, which all ranks can access. All ranks create it together.

    The newest `keep_last` checkpoints are kept, and those of every multiple of `keep_every` steps (0:
    none). `timeout`, in seconds, is for the messages between ranks while they write.
    """

    def __init__(
        self, folder: str | Path, *, keep_last: int = 3, keep_every: int = 0, timeout: float = 1800.0
    ) -> None:
        self.folder, self.keep_last, self.keep_every = Path(folder), keep_last, keep_every
        self.leads = not dist.is_initialized() or dist.get_rank() == 0
        if self.leads:
            with suppress(OSError):
                names.tidy(self.folder)
        self._group = background_group(timeout)  # its collectives run beside the training's, and pass no GPU
        self._thread: threading.Thread | None = None
        self._ended: list[Saved] = []
        self._copies: HostCopies[PieceKey] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy all values now, and write the checkpoint of `step` in the background. Collective.

        `state` is any JSON value; rank 0's is kept. If another save is being written, this call waits for
        it. A failed write raises no error: see `ended`.
        """
        self.wait()
        held = [*held_of_model(model), *held_random()]
        about = {"step": step, "torch": torch.__version__, "mesh": _mesh(model), "state": dict(state or {})}
        if optimizer is not None:
            of_optimizer = held_of_optimizer(model, optimizer)
            held += of_optimizer
            about["optimizer"] = about_optimizer(model, optimizer)
        pieces, arrived = self._copied(held)
        threads = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._write,
            args=(step, pieces, arrived, about, threads),
            name=f"checkpoint {step}",
            daemon=True,
        )
        lend(self._thread)

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def ended(self) -> list[Saved]:
        """The saves that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _copied(self, held: Sequence[Held]) -> tuple[list[Piece], torch.cuda.Event | None]:
        """This rank's pieces on the CPU, and an event behind the copies from a GPU. The training need not wait for it: its next
        steps are queued behind the copies, on the same stream.
        """
        wholes: dict[PieceKey, tuple[int, ...]] = {}
        values: dict[PieceKey, torch.Tensor] = {}
        for one in held:
            for offset, part in one.boxes() if one.writes else ():
                wholes[one.name, offset], values[one.name, offset] = one.shape, part
        on_gpu = any(part.device.type == "cuda" for part in values.values())
        if self._copies is None or self._copies.page_locked != on_gpu:
            self._copies = HostCopies(page_locked=on_gpu)
        copies = self._copies.fill(values)
        arrived = torch.cuda.Event() if on_gpu else None
        if arrived is not None:
            arrived.record()
        return [Piece(key[0], wholes[key], key[1], copy) for key, copy in copies.items()], arrived

    def _write(
        self,
        step: int,
        pieces: Sequence[Piece],
        arrived: torch.cuda.Event | None,
        about: Mapping[str, Any],
        threads: int,
    ) -> None:
        """The thread: everything that takes time."""
        # A thread's first operation would else start as many as there are cores.
        torch.set_num_threads(threads)
        begun = time.monotonic()
        path = self.folder / names.name(step)
        failure = None
        try:
            if arrived is not None:
                with torch.cuda.device(arrived.device):  # a new thread begins on the first GPU
                    arrived.synchronize()
            self._written(path, pieces, about)
        except Exception as error:  # whatever the system or another rank raises: the run goes on
            failure = _told(path, error)
        self._ended.append(Saved(step, path, time.monotonic() - begun, failure))

    def _written(self, path: Path, pieces: Sequence[Piece], about: Mapping[str, Any]) -> None:
        unfinished = path.with_name(path.name + names.UNFINISHED)
        try:
            self._all(lambda: _make_room(unfinished) if self.leads else None)
            files = HashedFiles()
            # The pieces are on the CPU. Else torch's loader, in this thread, waits for streams of the first GPU, on every rank.
            writer = dcp.FileSystemWriter(unfinished, per_thread_copy_ahead=0)
            writer.fs = files
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                with plain_failures():
                    dcp.save(
                        {},
                        storage_writer=writer,
                        planner=Writing(pieces),
                        process_group=self._group,
                        no_dist=self._group is None,
                    )
            self._all(lambda: _describe(files, unfinished, about) if self.leads else None)
            everyone = self._all(files.verified)
            self._all(lambda: self._finish(unfinished, everyone) if self.leads else None)
        except Exception:
            if self.leads:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _finish(self, unfinished: Path, everyone: Sequence[Mapping[str, manifest.Stored]]) -> None:
        stored = {name: file for files in everyone for name, file in files.items()}
        for name in stored:
            if not (unfinished / name).is_file():
                raise OSError(f"{name} is not visible from rank 0: all ranks must see the same folder")
        manifest.write(unfinished, stored)
        done = names.step_of(names.finish(unfinished))
        with suppress(OSError):  # an old one that cannot be removed is no reason to think this one lost
            # Newer ones were passed over when the run began, because they are damaged: they push nothing out.
            here = [step for step in names.steps_in(self.folder) if done is None or step <= done]
            going = names.to_remove(here, keep_last=self.keep_last, keep_every=self.keep_every)
            names.remove(self.folder, going)

    def _all(self, action: Callable[[], Any]) -> list[Any]:
        """Each rank's result, or the error of the first that failed, raised on all."""
        result: Any = None
        failed: Exception | None = None
        try:
            result = action()
        except OSError as error:
            failed = error
        except Exception as error:  # it need not pickle; the others must not wait for this rank
            failed = RuntimeError(f"{type(error).__name__}: {error}")
        told = gathered((result, failed), self._group)
        for _, other in told:
            if other is not None:
                raise other
        return [value for value, _ in told]


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Save one checkpoint into `folder` and wait for it. Returns its folder. Collective. Raises OSError."""
    checkpoints = Checkpoints(folder, keep_last=2**31)
    checkpoints.save(step, model, optimizer, state)
    checkpoints.wait()
    (saved,) = checkpoints.ended()
    if saved.failure is not None:
        raise OSError(saved.failure.message)
    return saved.path


def _mesh(model: nn.Module) -> dict[str, int]:
    state = state_of(model)
    if state is not None:
        return {axis: size for axis, size in state.program.mesh.every.items() if size > 1}
    return {}


def _describe(files: HashedFiles, unfinished: Path, about: Mapping[str, Any]) -> None:
    with files.create_stream(unfinished / RUN, "wb") as stream:
        stream.write((json.dumps(about, indent=1) + "\n").encode())


def _make_room(unfinished: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _told(path: Path, error: Exception) -> Diagnostic:
    """In words."""
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    message = f"the checkpoint was not written: {reason}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    help_text = f"the run continues without it, and tries the next one{'; make room' if full else ''}"
    return Diagnostic("checkpoint-unwritable", message, Span(str(path)), help_text, "warning")
