"""Files that change under a run: found, named, and told from those that were only touched."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.data import halves, images, stdlib, text
from parallelizer.training.data.files import UNSETTLED, FileRecord, check_unchanged, read_document

CONTENT = b"a text of some length\n"
LONG_AGO = time.time_ns() - 10 * UNSETTLED


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(CONTENT)
    return path


def messages(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(PlanError) as caught:
        call()
    assert {d.code for d in caught.value.diagnostics} == {"data-changed"}
    assert all(d.help and d.severity == "error" for d in caught.value.diagnostics)
    return [d.message for d in caught.value.diagnostics]


def settled(path: Path) -> FileRecord:
    """The record of a file that has not changed for long: its times count."""
    record = read_document(path).file
    status = path.stat()
    return FileRecord(record.path, record.size, status.st_mtime_ns, status.st_ctime_ns, record.sha256)


def test_a_record_says_what_was_read(file: Path) -> None:
    os.utime(file, ns=(LONG_AGO, LONG_AGO))
    document = read_document(file)
    assert document.content == CONTENT
    record = document.file
    assert (record.path, record.size) == (str(file), len(CONTENT))
    assert record.sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert FileRecord.from_json(record.to_json()) == record


def test_times_count_only_when_a_later_change_would_show_in_them(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = read_document(file).file
    assert (fresh.modified_ns, fresh.changed_ns) == (0, 0)
    later = time.time_ns() + 2 * UNSETTLED
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert read_document(file).file == settled(file)


def test_a_file_that_nobody_touched_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = settled(file)
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: pytest.fail("the file was hashed"))
    assert check_unchanged([record]) == (record,)


def test_a_file_that_was_only_touched_is_fine_and_hashed_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = settled(file)
    os.utime(file, ns=(LONG_AGO, LONG_AGO))
    later = time.time_ns() + 2 * UNSETTLED  # ctime is of now, whatever utime is told
    monkeypatch.setattr(time, "time_ns", lambda: later)
    renewed = check_unchanged([record])
    assert renewed == (settled(file),) and renewed != (record,)
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: pytest.fail("the file was hashed"))
    assert check_unchanged(renewed) == renewed


def truncated(path: Path) -> None:
    os.truncate(path, 5)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def grown(path: Path) -> None:
    with open(path, "ab") as opened:
        opened.write(b"more")


def removed(path: Path) -> None:
    path.unlink()


def under_a_file(path: Path) -> None:
    """The folder that it lay in becomes a file."""
    path.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def looped(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def overwritten(path: Path) -> None:
    path.write_bytes(CONTENT.upper())


def overwritten_in_secret(path: Path) -> None:
    """With its size and its mtime as they were; no program sets ctime back."""
    before = path.stat()
    path.write_bytes(CONTENT.upper())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    """By another file that is as old and as large, as rsync does."""
    before, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(CONTENT.upper())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


CHANGES: dict[Callable[[Path], None], str] = {
    truncated: "truncated from 22 to 5 bytes",
    emptied: "truncated from 22 to 0 bytes",
    grown: "grown from 22 to 26 bytes",
    removed: "it is gone",
    under_a_file: "it is gone",
    folder: "it is no longer a file",
    looped: "it cannot be read any more (Too many levels of symbolic links)",
    overwritten: "its bytes differ, and its size is the same",
    overwritten_in_secret: "its bytes differ, and its size is the same",
    replaced: "its bytes differ, and its size is the same",
}


@pytest.mark.parametrize("fresh", [True, False], ids=["just read", "read long ago"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_has_happened_to_a_file_is_told(
    change: Callable[[Path], None], fresh: bool, tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "text.txt"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    record = read_document(path).file if fresh else settled(path)
    if not fresh:
        time.sleep(0.02)  # longer than a tick of the file system's clock
    change(path)
    assert messages(lambda: check_unchanged([record])) == [
        f"{path} has changed since it was read: {CHANGES[change]}"
    ]


@settings(deadline=None)
@given(before=st.binary(max_size=40), after=st.binary(max_size=40))
def test_a_file_passes_if_and_only_if_its_bytes_are_the_same(
    before: bytes, after: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(before)
    record = read_document(path).file
    path.write_bytes(after)
    if before == after:
        assert check_unchanged([record])[0].sha256 == record.sha256
    else:
        messages(lambda: check_unchanged([record]))


def test_every_file_that_has_changed_is_told(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path in paths:
        path.write_bytes(CONTENT)
    records = [read_document(path).file for path in paths]
    paths[0].unlink()
    truncated(paths[2])
    assert [message.split(" has")[0] for message in messages(lambda: check_unchanged(records))] == [
        str(paths[0]),
        str(paths[2]),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_any_more_is_told(file: Path) -> None:
    record = read_document(file).file
    file.chmod(0)
    [message] = messages(lambda: check_unchanged([record]))
    assert "it cannot be read any more (Permission denied)" in message


# files that change while they are read


def while_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Has `act` happen once, after the first file was looked at and before it is read."""
    looked, fstat = list[int](), os.fstat

    def patched(number: int) -> os.stat_result:
        status = fstat(number)
        if not looked:
            looked.append(number)
            act()
        return status

    monkeypatch.setattr(os, "fstat", patched)


def test_a_file_that_is_cut_off_while_it_is_read_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    while_reading(monkeypatch, lambda: truncated(file))
    told = f"{file} has changed while it was read: it had 22 bytes at first, and 5 could be read"
    assert messages(lambda: read_document(file)) == [told]


def test_a_file_that_is_written_to_while_it_is_read_is_told(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(file, ns=(LONG_AGO, LONG_AGO))
    while_reading(monkeypatch, lambda: overwritten(file))
    told = f"{file} has changed while it was read: it was written to"
    assert messages(lambda: read_document(file)) == [told]


def test_a_text_that_changes_while_it_is_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(CONTENT)
    while_reading(monkeypatch, lambda: [os.truncate(tmp_path / name, 3) for name in "ab"])
    [message] = messages(lambda: text.load(path=str(tmp_path), heldout=0.5))
    assert "it had 22 bytes at first, and 3 could be read" in message


# sources


def test_a_text_has_a_record_of_every_file_that_it_was_made_of(tmp_path: Path) -> None:
    for name, content in (("b.txt", CONTENT), ("a/c.txt", CONTENT * 2), ("empty", b""), (".hidden", CONTENT)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    source = text.load(path=str(tmp_path), heldout=0.2)
    assert [(file.path, file.size) for file in source.files] == [
        (str(tmp_path / "a/c.txt"), 44),
        (str(tmp_path / "b.txt"), 22),
    ]
    in_halves = halves.load(max_bytes=0, heldout=0.2, path=str(tmp_path))
    assert in_halves.files == source.files
    truncated(tmp_path / "b.txt")
    for read in (source, in_halves):
        [message] = messages(lambda read=read: check_unchanged(read.files))  # type: ignore[misc]
        assert message.startswith(f"{tmp_path / 'b.txt'} has changed")


def test_the_standard_library_has_a_record_of_every_file_that_it_was_made_of() -> None:
    source = stdlib.load(max_bytes=200_000, heldout=0.2)
    root = sysconfig.get_paths()["stdlib"]
    assert source.files and all(file.path.startswith(root) for file in source.files)
    # A separator for each file.
    assert sum(file.size + 1 for file in source.files) == len(source.train) + len(source.heldout)
    assert [file.sha256 for file in check_unchanged(source.files)] == [file.sha256 for file in source.files]


def test_what_is_drawn_has_no_files() -> None:
    assert images.load(size=8, classes=3, noise=0.5).files == ()


@pytest.mark.parametrize(
    "change",
    [{"size": "1"}, {"size": True}, {"path": 1}, {"sha256": None}, {"modified_ns": 1.5}],
    ids=lambda change: next(iter(change)),
)
def test_a_record_of_another_form_is_refused(change: dict[str, Any], file: Path) -> None:
    document = read_document(file).file.to_json()
    with pytest.raises(TypeError):
        FileRecord.from_json({**document, **change})
    with pytest.raises(KeyError):
        FileRecord.from_json({name: value for name, value in document.items() if name not in change})
