"""The files that batches come from, in the state in which they were read; and a check that they have not
changed.

A text is read once, before the ranks start, so a later change of the file does not affect the run itself. It
affects a resumed run, in which the same position would refer to other samples. So a run checks its files at
each checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError

HELP = "restore the earlier bytes of the file, or train on a copy that no process changes"

UNSETTLED = 2_000_000_000
"""Nanoseconds within which a file may change again and keep its times: file systems count them in steps of up to
two seconds.
"""


@dataclass(frozen=True, order=True)
class FileRecord:
    """A file that was read: `path` as it was opened, `size` in bytes, SHA-256 of the bytes.

    `modified_ns` and `changed_ns` are its mtime and its ctime, which no program can set back; both are 0 where a
    later change might not show in them, so that such a file is hashed at the next look.
    """

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FileRecord:
        """What `to_json` gave. KeyError and TypeError for anything else."""
        found = {of.name: document[of.name] for of in fields(cls)}
        kinds = {"path": str, "sha256": str}
        wrong = [name for name, value in found.items() if type(value) is not kinds.get(name, int)]
        if wrong:
            raise TypeError(f"{wrong[0]} of a file is {found[wrong[0]]!r}")
        return cls(**found)


@dataclass(frozen=True)
class Document:
    """A file's bytes, and its record."""

    content: bytes
    file: FileRecord


def read_document(path: Path) -> Document:
    """The bytes of a file, `content`, and its record, `file`, for `Source.files`.

    Raises OSError if it cannot be read, and PlanError `data-changed` if it changes during the read.
    """
    with open(path, "rb") as opened:
        before = os.fstat(opened.fileno())
        content = opened.read()
        after = os.fstat(opened.fileno())
    if len(content) != before.st_size:
        what = f"it had {before.st_size} bytes at first, and {len(content)} could be read"
        raise PlanError([changed(path, f"while it was read: {what}")])
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise PlanError([changed(path, "while it was read: it was written to")])
    return Document(content, _record(str(path), after, hashlib.sha256(content).hexdigest()))


def record_file(path: Path) -> FileRecord:
    """The record of a file that other code has read. OSError if it cannot be read."""
    with open(path, "rb") as opened:
        return _record(
            str(path), os.fstat(opened.fileno()), hashlib.file_digest(opened, "sha256").hexdigest()
        )


def check_unchanged(files: Iterable[FileRecord]) -> tuple[FileRecord, ...]:
    """Raises PlanError `data-changed` with every file that is not what it was.

    A file is hashed where its size is the same and its times are not; one that was only touched is fine. The
    records that come back have the times of now: what is given to the next look, so that none is hashed twice.
    """
    problems: list[Diagnostic] = []
    found = [_looked_at(file, problems) for file in files]
    if problems:
        raise PlanError(problems)
    return tuple(found)


def changed(path: str | Path, what: str) -> Diagnostic:
    """`what` goes on where "has changed" ends."""
    return Diagnostic("data-changed", f"{path} has changed {what}", help=HELP)


def resized(before: int, now: int) -> str:
    """How a file of another size is told."""
    return f"{'truncated' if now < before else 'grown'} from {before} to {now} bytes"


def _looked_at(file: FileRecord, problems: list[Diagnostic]) -> FileRecord:
    """The file's record of now; what is wrong goes to `problems`."""
    try:
        now = os.stat(file.path)
        if not stat.S_ISREG(now.st_mode):
            problems.append(changed(file.path, "since it was read: it is no longer a file"))
        elif now.st_size != file.size:
            problems.append(changed(file.path, f"since it was read: {resized(file.size, now.st_size)}"))
        elif (now.st_mtime_ns, now.st_ctime_ns) != (file.modified_ns, file.changed_ns):
            with open(file.path, "rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest == file.sha256:
                return _record(file.path, now, digest)
            problems.append(
                changed(file.path, "since it was read: its bytes differ, and its size is the same")
            )
    except (FileNotFoundError, NotADirectoryError):
        problems.append(changed(file.path, "since it was read: it is gone"))
    except OSError as error:
        reason = error.strerror or str(error)
        problems.append(changed(file.path, f"since it was read: it cannot be read any more ({reason})"))
    return file


def _record(path: str, status: os.stat_result, sha256: str) -> FileRecord:
    """The times of `status` count only if they are old enough to tell a change that comes after them."""
    times = (status.st_mtime_ns, status.st_ctime_ns)
    settled = max(times) + UNSETTLED < time.time_ns()
    return FileRecord(path, status.st_size, *(times if settled else (0, 0)), sha256)
