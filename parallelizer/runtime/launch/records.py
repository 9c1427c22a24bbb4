"""Reads the record of collectives that torch's flight recorder writes for each rank: by itself after a timeout of NCCL, or when
it is asked for.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep

_PLACE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""What torch takes as the path of a record, without the rank at its end: by its newer and its older name."""

_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""The path of a pipe, without the rank and `.pipe` at its end. A rank of NCCL that reads something there writes its record."""

VARIABLES = (_PIPE, *_PLACE)
"""Those that `listen_in` and `write_to` set."""

_NAMES = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_barrier": "barrier",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "all_gather_base": "all-gather",
    "all_gather_single": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
}
"""The names of the field. torch's name stands for what is not here."""

_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")

_VERSION = 2
"""The major version of the records that torch 2.11 and 2.13 write."""

COARSE = 0.05
"""Seconds by which the time of a file may be behind the clock."""


ANSWER = 3.0
"""Seconds in which ranks of NCCL write their record when they are asked: they look for a request every second."""


class UnreadableRecord(Exception):
    """A record cannot be read. The text is the reason."""


@dataclass(frozen=True)
class RecordedCall:
    """A collective, or a batch of sends and receives, that a rank has called. Calls of a group are numbered, collectives
    from 1 and messages between two ranks apart from them: the same number is the same call on all ranks.
    """

    group: str
    description: str
    number: int
    kinds: tuple[str, ...]
    """`all-reduce`; several for calls that torch has put together. A message's kind is `send` or `recv`."""
    sizes: tuple[tuple[int, ...], ...]
    is_message: bool
    peers: frozenset[int]
    """The ranks, counted in the group, between which messages travel."""
    ended: bool
    place: str | None
    """`file:line` of the caller, the innermost one outside of torch."""


@dataclass(frozen=True)
class CollectiveRecord:
    """What one rank has called last, in order, and the ranks of its groups as far as the record tells."""

    calls: tuple[RecordedCall, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def listen_in(private: Path) -> None:
    """Let this rank, if it is one of NCCL, listen for `ask` in `private`, a folder of this machine. Call it before the rank meets
    the others.
    """
    os.environ.setdefault(_PIPE, str(private / "collectives."))


def write_to(folder: Path) -> None:
    """Let this rank write what it remembers of its collectives to `folder/collectives_rank<k>`, unless the user has named
    another place.
    """
    if place() is None:
        for name in _PLACE:
            os.environ[name] = prefix(folder)


def place() -> str | None:
    """The path of this rank's record without the rank at its end; None where neither the user nor `write_to` has named one."""
    return next((os.environ[name] for name in _PLACE if name in os.environ), None)


def prefix(folder: Path) -> str:
    """The path of a record without the rank at its end, for ranks that have `folder`."""
    return place() or str(folder / "collectives_rank")


def ask(private: Path, ranks: Iterable[int]) -> None:
    """Ask those of the ranks that listen in `private` for their records. They write them within about a second, without the
    lines of their callers, for which they would need the interpreter.
    """
    for rank in ranks:
        with suppress(OSError):  # it does not listen: not a rank of NCCL, or it has ended
            pipe = os.open(private / f"collectives.{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
            finally:
                os.close(pipe)


def listening(private: Path) -> bool:
    """Whether any rank can be asked."""
    return any(private.glob("collectives.*.pipe"))


def read_all(
    prefix: str, ranks: int, since: float, within: float = 0.0
) -> tuple[dict[int, CollectiveRecord], dict[int, str]]:
    """The records that ranks have written after `since` (a time of the clock), and for the others the reason why they cannot be
    read, if they wrote any. `prefix` is the path of a record without the rank. Waits for `within` seconds at most until all
    ranks have written theirs.
    """
    records: dict[int, CollectiveRecord] = {}
    unreadable: dict[int, str] = {}
    until = time.monotonic() + within
    while True:
        for rank in set(range(ranks)) - records.keys():
            path = Path(f"{prefix}{rank}")
            try:
                if path.stat().st_mtime >= since - COARSE:
                    records[rank] = read(path)
            except FileNotFoundError:
                continue
            # A folder that may not be searched, or a file server that does not answer.
            except OSError as error:
                unreadable[rank] = f"{path}: {error.strerror or error}"
            except UnreadableRecord as error:  # it may be half written
                unreadable[rank] = f"{path}: {error}"
        if len(records) == ranks or time.monotonic() >= until:
            return records, {rank: why for rank, why in unreadable.items() if rank not in records}
        time.sleep(0.1)


def read(path: Path) -> CollectiveRecord:
    """The record in a file. Raises UnreadableRecord."""
    try:
        with open(path, "rb") as stream:
            content = _PlainUnpickler(stream).load()
    except OSError as error:
        raise UnreadableRecord(error.strerror or str(error)) from None
    except Exception as error:  # pickle does not define what it raises for foreign bytes
        raise UnreadableRecord(f"it is cut off, or no record of torch's ({error})") from None
    try:
        version = str(content["version"])
        if int(version.partition(".")[0]) != _VERSION:
            raise UnreadableRecord(f"its version is {version}, and only versions {_VERSION}.* are known")
        groups = {
            str(name): tuple(int(rank) for rank in json.loads(group["ranks"]))
            for name, group in content["pg_config"].items()
        }
        return CollectiveRecord(_calls(content["entries"]), groups)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreadableRecord(
            f"it has another form than expected ({type(error).__name__}: {error})"
        ) from None


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and texts, of which a record consists, and imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _calls(entries: list[dict[str, Any]]) -> tuple[RecordedCall, ...]:
    """The calls. Entries of one number are a batch, which its last entry ends."""
    batches: dict[tuple[str, bool, int], list[dict[str, Any]]] = {}
    for entry in entries:
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        batches.setdefault((entry["process_group"][0], bool(entry["is_p2p"]), int(number)), []).append(entry)
    return tuple(_call(group, number, batch) for (group, _, number), batch in batches.items())


def _call(group: str, number: int, batch: list[dict[str, Any]]) -> RecordedCall:
    last = batch[-1]
    parts = batch[:-1] if len(batch) > 1 else batch
    texts = [str(entry["profiling_name"]) for entry in parts]
    messages = [found for text in texts if (found := _PEERS.search(text))]
    # Gloo's entries have no events that would tell how far they are. They are retired when they have ended.
    over = last["retired"] if texts[0].startswith("gloo:") else last["state"] == "completed"
    return RecordedCall(
        group=group,
        description=str(last["process_group"][1]),
        number=number,
        kinds=tuple(dict.fromkeys(_kind(text) for text in texts)),
        sizes=tuple(tuple(size) for entry in parts for size in entry["input_sizes"]),
        is_message=bool(last["is_p2p"]),
        peers=frozenset(int(rank) for found in messages for rank in found.groups()[1:]),
        ended=bool(over),
        place=_place(batch[0].get("frames") or ()),
    )


def _kind(text: str) -> str:
    """`nccl:_all_gather_base` is an all-gather."""
    name = text.rpartition(":")[2].partition(" ")[0].lstrip("_")
    return _NAMES.get(name, name)


def _place(frames: Any) -> str | None:
    for frame in frames:
        if not str(frame["filename"]).startswith(_TORCH):
            return f"{frame['filename']}:{frame['line']}"
    return None
