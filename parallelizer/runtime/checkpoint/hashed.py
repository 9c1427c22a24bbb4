"""A file system for torch.distributed.checkpoint that hashes what is written, and reads it back."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from parallelizer.runtime.checkpoint.manifest import BLOCK, Stored, hash_of


class HashedFiles(FileSystem):
    """Remembers the size and the SHA-256 of each file that it has written, under the name that it has in the end."""

    def __init__(self) -> None:
        self.written: dict[Path, Stored] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """As torch's. OSError as open() and write() raise it."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with open(path, mode) as file:
            hashed = _Hashed(file)
            try:
                yield cast(io.IOBase, hashed)
            except Exception:
                if hashed.failure is not None:  # torch's writer of zip files tells another in its place
                    raise hashed.failure from None
                raise
            hashed.close()
        self.written[Path(path)] = Stored(hashed.size, hashed.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """As torch's."""
        super().rename(path, new_path)
        if Path(path) in self.written:
            self.written[Path(new_path)] = self.written.pop(Path(path))

    def verified(self) -> Mapping[str, Stored]:
        """Every file by its name, read back from the disk. OSError where one cannot be, or has other bytes than were
        written.
        """
        for path, stored in self.written.items():
            _forget(path)
            if hash_of(path) != stored:
                raise OSError(f"{path.name} does not contain the bytes that were written")
        return {path.name: stored for path, stored in self.written.items()}


class _Hashed:
    """A file that is written from its beginning to its end, and hashed meanwhile.

    In large parts: each of them wants the interpreter's lock, which the training wants too. Small ones are collected. Large
    ones are not copied, because a copy holds the lock for as long as it takes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.failure: OSError | None = None
        self._waiting = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.size += view.nbytes
        if view.nbytes >= BLOCK:
            self.flush()
            self._hand_over(view)
            return view.nbytes
        self._waiting += view
        if len(self._waiting) >= BLOCK:
            self.flush()
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Hand everything to the system."""
        waiting, self._waiting = self._waiting, bytearray()
        self._hand_over(waiting)

    def _hand_over(self, part: bytearray | memoryview) -> None:
        self.digest.update(part)
        try:
            self.file.write(part)
            self.file.flush()
        except OSError as error:
            self.failure = error
            raise

    def fileno(self) -> int:
        """For fsync, which must see everything."""
        self.flush()
        return self.file.fileno()

    def close(self) -> None:
        """Onto the disk: torch closes a file behind its fsync, and flushes it then only."""
        if not self.file.closed:
            os.fsync(self.fileno())
            self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _forget(path: Path) -> None:
    """Let the system read the file from the disk, and not from its memory, where it can be asked for that."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
