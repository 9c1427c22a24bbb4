"""The list of a checkpoint's files: byte for byte what was written, or damaged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.checkpoint import manifest
from parallelizer.runtime.checkpoint.manifest import NAME, Stored

CONTENTS = {".metadata": b"index", "__0_0.distcp": b"numbers" * 9, "run.json": b"{}\n", "empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path) -> Path:
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    manifest.write(folder, {name: manifest.hash_of(folder / name) for name in reversed(CONTENTS)})
    return folder


def problems(folder: Path) -> list[str]:
    """What reading it and checking every file finds, in words; the code is always the same."""
    try:
        found = manifest.check(folder, files := manifest.read(folder), files)
    except PlanError as error:
        found = list(error.diagnostics)
    assert {d.code for d in found} <= {"checkpoint-damaged"}
    assert all(
        d.span is not None and d.span.file == str(folder) and "train.resume" in (d.help or "") for d in found
    )
    return [d.message for d in found]


def test_what_was_written_is_read(folder: Path) -> None:
    files = manifest.read(folder)
    assert files == {n: Stored(len(c), hashlib.sha256(c).hexdigest()) for n, c in CONTENTS.items()}
    assert list(files) == sorted(CONTENTS) and not problems(folder)


def test_damage_is_named_by_file_and_kind(folder: Path) -> None:
    (folder / ".metadata").unlink()
    (folder / "__0_0.distcp").write_bytes(CONTENTS["__0_0.distcp"][:-1])
    (folder / "run.json").write_bytes(b"{]\n")
    (folder / "empty").unlink()
    (folder / "empty").mkdir()
    found = problems(folder)
    assert found[0] == ".metadata is missing"
    assert found[1] == "__0_0.distcp has 62 bytes and was written with 63"
    assert found[2].startswith("empty ")
    assert found[3] == "run.json holds other bytes than were written"


@pytest.mark.parametrize("text, said", [
    ("", "is not a manifest"), ("[]", "is not a manifest"), ("{}", "is not a manifest"), ("null", "is not a manifest"),
    ('{"files": {"a": 1}}', "is not a manifest"), ('{"files": []}', "is not a manifest"), ("\xff", "is not a manifest"),
    ('{"files": {}, "format": 2}', "is of format 2; this version reads 1"), ('{"files": {}}', "of format None"),
    ('{"files": {}, "format": 1}', "has been changed"), ("[" * 100_000, "is not a manifest"),
])  # fmt: skip
def test_no_text_is_taken_for_a_manifest_that_is_none(folder: Path, text: str, said: str) -> None:
    (folder / NAME).write_bytes(text.encode("latin-1"))
    [found] = problems(folder)
    assert said in found


def test_a_manifest_that_is_gone_or_a_folder_is_damage(folder: Path) -> None:
    (folder / NAME).unlink()
    assert problems(folder) == [f"{NAME} cannot be read: No such file or directory"]
    (folder / NAME).mkdir()
    assert problems(folder) == [f"{NAME} cannot be read: Is a directory"]


def test_the_same_list_in_other_white_space_or_order_is_changed(folder: Path) -> None:
    document = json.loads((folder / NAME).read_bytes())
    for text in (
        json.dumps(document),
        json.dumps(document, indent=1),
        json.dumps(document, indent=1) + "\n\n",
    ):
        (folder / NAME).write_text(text)
        assert problems(folder) == [f"{NAME} has been changed"]
    document["files"]["run.json"]["more"] = 1
    (folder / NAME).write_text(json.dumps(document, indent=1) + "\n")
    assert problems(folder) == [f"{NAME} has been changed"]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_bit_of_any_file_and_any_cut_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = written(tmp_path_factory.mktemp("checkpoint"))
    path = folder / data.draw(st.sampled_from([n for n in (*CONTENTS, NAME) if n != "empty"]))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
    else:
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    path.write_bytes(content)
    assert problems(folder)


def test_every_single_bit_of_a_manifest_is_noticed(folder: Path) -> None:
    (folder / NAME).unlink()
    manifest.write(folder, {"run.json": manifest.hash_of(folder / "run.json")})
    whole = (folder / NAME).read_bytes()
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        (folder / NAME).write_bytes(content)
        assert problems(folder), (bit, content)
    (folder / NAME).write_bytes(whole)
    assert not problems(folder)
