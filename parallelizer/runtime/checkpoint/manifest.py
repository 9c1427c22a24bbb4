"""The list of a checkpoint's files: a name, a size and a SHA-256 for every file. It is written after all of
them.

A hash detects damage, not intent: an attacker who can change a file can change the manifest too. `.metadata`
is a pickle, as torch.distributed.checkpoint writes it. It is opened only if its hash is correct; load only
trusted checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span

NAME = "manifest.json"
FORMAT = 1
BLOCK = 1 << 20


@dataclass(frozen=True)
class Stored:
    """A file: its size in bytes, and the SHA-256 of its content in hexadecimal digits."""

    size: int
    sha256: str


def write(folder: Path, files: Mapping[str, Stored]) -> None:
    """Write the manifest, and see it onto the disk."""
    with open(folder / NAME, "wb") as stream:
        stream.write(_text(files))
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> dict[str, Stored]:
    """The files that a checkpoint consists of. Raises PlanError `checkpoint-damaged` when the manifest is not there, or
    is not, byte for byte, what `write` writes.
    """
    path = folder / NAME
    try:
        raw = path.read_bytes()
        document = json.loads(raw)
        files = {name: Stored(f["size"], f["sha256"]) for name, f in document["files"].items()}
    except OSError as error:
        raise damaged(folder, f"{NAME} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(folder, f"{NAME} is not a manifest") from None
    if document.get("format") != FORMAT:
        raise damaged(folder, f"{NAME} is of format {document.get('format')!r}; this version reads {FORMAT}")
    if raw != _text(files):
        raise damaged(folder, f"{NAME} has been changed")
    return files


def check(folder: Path, files: Mapping[str, Stored], names: Iterable[str]) -> list[Diagnostic]:
    """What is wrong with some of the files, whose every byte is read."""
    found = []
    for name in names:
        reason = _wrong(folder / name, files[name])
        if reason:
            found.append(_damage(folder, f"{name} {reason}"))
    return found


def hash_of(path: Path) -> Stored:
    """Size and hash of a file as it can be read now. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    block = memoryview(bytearray(BLOCK))  # used again and again: new memory takes longer to get than to fill
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(block[:count])
            size += count
    return Stored(size, digest.hexdigest())


def damaged(folder: Path, reason: str) -> PlanError:
    """The finding for one checkpoint."""
    return PlanError([_damage(folder, reason)])


def _damage(folder: Path, reason: str) -> Diagnostic:
    help_text = (
        "name another checkpoint by its folder; train.resume=auto resumes from the newest complete one"
    )
    return Diagnostic("checkpoint-damaged", reason, Span(str(folder)), help_text)


def _wrong(path: Path, stored: Stored) -> str | None:
    try:
        size = path.stat().st_size
        if size != stored.size:
            return f"has {size:,} bytes and was written with {stored.size:,}"
        if hash_of(path) != stored:
            return "holds other bytes than were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def _text(files: Mapping[str, Stored]) -> bytes:
    document = {
        "format": FORMAT,
        "files": {name: {"size": files[name].size, "sha256": files[name].sha256} for name in sorted(files)},
    }
    return (json.dumps(document, indent=1) + "\n").encode()
