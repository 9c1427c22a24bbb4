"""A checkpoint's place in the data: kept, and refused where the data that it counts is not there any more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.origins import Origins
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.training.data import images, text
from parallelizer.training.data.files import FileRecord
from parallelizer.training.data.position import ANEW, DataPosition, check_same_data, position_of

SAVED = DataPosition(640, 0, 256, "ab" * 32, options={"path": "texts", "heldout": 0.05})
NOWHERE = Origins()

records = st.builds(FileRecord, st.text(), *[st.integers(0, 2**63)] * 3, st.text())
numbers = st.integers(0, 2**60)
options = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())


def origins(*overrides: str) -> Origins:
    return compose_config(list(overrides))[1]


def told(found: list[Diagnostic]) -> list[tuple[str, str | None]]:
    """Message and place of each finding."""
    assert all(d.code == "resume-data" and d.severity == "error" for d in found)
    assert all((d.help or "").endswith(ANEW) for d in found)
    return [(d.message, str(d.span) if d.span else None) for d in found]


@settings(deadline=None)
@given(
    st.builds(DataPosition, numbers, numbers, numbers, st.text(), st.lists(records).map(tuple), options),
)
def test_a_position_comes_back_from_json(position: DataPosition) -> None:
    assert DataPosition.from_json(json.loads(json.dumps(position.to_json()))) == position


def test_keys_of_a_later_release_are_passed_over() -> None:
    assert DataPosition.from_json({**SAVED.to_json(), "shuffle": "new"}) == SAVED


@pytest.mark.parametrize(
    "change",
    [
        {"samples": -1},
        {"samples": 1.5},
        {"seed": "0"},
        {"seq_len": None},
        {"fingerprint": 5},
        {"files": [{"path": "a"}]},
        {"files": [{**FileRecord("a", 1, 1, 1, "b").to_json(), "size": "1"}]},
        {"files": 3},
        {"options": 3},
    ],
    ids=str,
)
def test_a_position_of_another_form_is_refused(change: dict[str, Any]) -> None:
    for document in (
        {**SAVED.to_json(), **change},
        {name: value for name, value in SAVED.to_json().items() if name not in change},
        None,
        [],
    ):
        with pytest.raises(PlanError) as caught:
            DataPosition.from_json(document)
        [(message, _)] = told(list(caught.value.diagnostics))
        assert message.startswith("the checkpoint's place in the data cannot be read: ")


def test_a_run_goes_on_where_nothing_that_counts_has_changed() -> None:
    assert check_same_data(SAVED, SAVED, NOWHERE) == []
    moved = replace(SAVED, samples=0, options={"path": "elsewhere"}, files=(FileRecord("b", 1, 1, 1, "c"),))
    assert check_same_data(SAVED, moved, NOWHERE) == []


def test_another_seed_and_another_length_are_refused_where_they_are_set() -> None:
    override = origins("train.seed=1", "train.seq_len=128")
    found = check_same_data(SAVED, replace(SAVED, seed=1, seq_len=128), override)
    assert told(found) == [
        ("train.seed is 1, and the checkpoint was trained with 0", "<override train.seed=1>:1:12"),
        (
            "train.seq_len is 128, and the checkpoint was trained with 256",
            "<override train.seq_len=128>:1:15",
        ),
    ]
    assert [d.help.split(",")[0] for d in found if d.help] == [
        "go on with train.seed=0",
        "go on with train.seq_len=256",
    ]
    [(_, place)] = told(check_same_data(replace(SAVED, seed=5), SAVED, origins()))
    assert place is not None and "train.yaml:" in place


# data that give other samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abcdefgh":
        (tmp_path / name).write_text(f"text {name} " * 20)
    return tmp_path


def read(folder: Path, heldout: float = 0.2) -> DataPosition:
    source = text.load(path=str(folder), heldout=heldout)
    return position_of(source, 32, seed=0, seq_len=8, options={"path": str(folder), "heldout": heldout})


def refused(saved: DataPosition, now: DataPosition, *overrides: str) -> list[tuple[str, str | None]]:
    return told(check_same_data(saved, now, origins("data=text", *overrides)))


def test_another_share_that_is_held_out_is_refused_where_it_is_set(folder: Path) -> None:
    overrides = (f"data.path={folder}", "data.heldout=0.3")
    message = "data.heldout is 0.3, and the checkpoint was trained with 0.2"
    assert refused(read(folder), read(folder, 0.3), *overrides) == [
        (message, "<override data.heldout=0.3>:1:14")
    ]


def test_files_that_have_changed_between_two_runs_are_named(folder: Path) -> None:
    saved = read(folder)
    (folder / "a").write_text("b")
    (folder / "b").write_text((folder / "b").read_text().upper())
    (folder / "c").unlink()
    (folder / "z").write_text("new")
    found = refused(saved, read(folder), f"data.path={folder}")
    assert [message for message, _ in found] == [
        f"{folder / 'a'} was truncated from 140 to 1 bytes since the checkpoint was saved",
        f"{folder / 'b'} has got other bytes since the checkpoint was saved",
        f"{folder / 'c'} was there when the checkpoint was saved",
        f"{folder / 'z'} was not there when the checkpoint was saved",
    ]
    assert {place for _, place in found} == {f"<override data.path={folder}>:1:11"}


def test_many_files_are_not_told_one_by_one(folder: Path) -> None:
    saved = read(folder)
    for name in "abcdefgh":
        (folder / name).write_text("short")
    found = refused(saved, read(folder), f"data.path={folder}")
    assert len(found) == 5
    assert found[-1][0] == "4 more files have changed since the checkpoint was saved"


def test_the_same_files_in_another_folder_are_the_same_data(folder: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert refused(read(folder), read(other), f"data.path={other}") == []


def test_other_data_are_told_by_the_options_that_differ(folder: Path) -> None:
    drawn = position_of(images.load(size=8, classes=3, noise=0.5), 0, seed=0, seq_len=8, options={"size": 8})
    found = told(check_same_data(read(folder), drawn, origins("data=images", "data.size=8")))
    assert found[0] == (
        "data.size is 8, and the checkpoint was trained without it",
        "<override data.size=8>:1:11",
    )
    assert [message.split(" is ")[0] for message, _ in found] == ["data.size", "data.path", "data.heldout"]


def test_data_that_differ_in_nothing_that_is_known_are_refused_all_the_same() -> None:
    [(message, place)] = told(
        check_same_data(SAVED, replace(SAVED, fingerprint="other"), origins("data=images"))
    )
    assert message == "the data gives other samples"
    assert place is not None and "images" in place
