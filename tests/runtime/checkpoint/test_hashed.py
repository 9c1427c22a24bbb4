"""Files that are hashed while torch writes them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.runtime.checkpoint import hashed
from parallelizer.runtime.checkpoint.hashed import HashedFiles
from parallelizer.runtime.checkpoint.manifest import Stored


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_what_is_written_in_parts_is_hashed_whole(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path, files = tmp_path_factory.mktemp("hashed") / "a.tmp", HashedFiles()
    with mock.patch.object(hashed, "BLOCK", 20), files.create_stream(path, "wb") as stream:
        for part in parts:
            assert stream.write(memoryview(part)) == len(part)
    whole = b"".join(parts)
    files.rename(path, path.with_suffix(""))
    assert path.with_suffix("").read_bytes() == whole
    assert files.verified() == {"a": Stored(len(whole), hashlib.sha256(whole).hexdigest())}


def test_a_large_part_is_handed_to_the_system_without_a_copy() -> None:
    class File:
        def __init__(self) -> None:
            self.parts: list[Any] = []

        def write(self, part: Any) -> None:
            self.parts.append(part)

        def flush(self) -> None: ...

    file, large = File(), bytes(hashed.BLOCK)
    stream = hashed._Hashed(file)  # type: ignore[arg-type]
    for part in (b"small", large, b"small"):
        stream.write(part)
    stream.flush()
    assert [bytes(part) for part in file.parts] == [b"small", large, b"small"]
    assert file.parts[1].obj is large


def test_another_byte_on_the_disk_is_noticed_when_it_is_read_back(tmp_path: Path) -> None:
    files = HashedFiles()
    with files.create_stream(tmp_path / "a", "wb") as stream:
        stream.write(b"as it was")
    (tmp_path / "a").write_bytes(b"as it wax")
    with pytest.raises(OSError, match="a does not contain the bytes that were written"):
        files.verified()
    (tmp_path / "a").unlink()
    with pytest.raises(FileNotFoundError):
        files.verified()


def test_a_file_that_failed_is_not_counted_as_written(tmp_path: Path) -> None:
    files = HashedFiles()
    with pytest.raises(ZeroDivisionError), files.create_stream(tmp_path / "a", "wb") as stream:
        stream.write(b"half")
        raise ZeroDivisionError
    assert not files.verified()


def test_reading_is_torchs(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    files = HashedFiles()
    with files.create_stream(tmp_path / "a", "rb") as stream:
        assert stream.read() == b"abc"
    assert not files.written


def test_everything_is_handed_to_the_system_before_it_is_forced_onto_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch forces a file onto the disk by its number, and closes it behind that."""
    sizes, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (sizes.append(os.fstat(number).st_size), real(number)))
    with HashedFiles().create_stream(tmp_path / "a", "wb") as stream:
        stream.write(b"some")
        assert stream.tell() == 4
        os.fsync(stream.fileno())
        stream.write(b" more")
        stream.close()
    assert sizes == [4, 9]
