"""Data sets of Hugging Face's from this disk: the same texts from every form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.data.choose_tokenizer import tokenizer_of
from parallelizer.training.data.corpus import Data
from parallelizer.training.data.files import check_unchanged
from parallelizer.training.data.hf_dataset import load
from parallelizer.training.data.packing import pack
from tests.training.data.tokenizers_made import bare

TEXTS = [f"The {n}th text, für alle.\n" * (n + 1) for n in range(30)] + ["", None]
ROWS = [{"text": text, "number": n} for n, text in enumerate(TEXTS)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the optional extra `hf`")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def written(folder: Path, form: str) -> Path:
    """The rows in one form, by the word for it."""
    import datasets  # 50 MB, which every fork of a test process would have if this stood above

    rows = datasets.Dataset.from_list(ROWS)
    place = folder / form
    if form == "saved":
        rows.save_to_disk(place)
    elif form == "splits":
        datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(place)
    elif form == "folder":
        place.mkdir()
        for part, some in enumerate((ROWS[:10], ROWS[10:])):
            (place / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        (place / ".hidden").write_text("no")
    elif form.endswith(".parquet"):
        rows.to_parquet(place)
    else:
        place.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return place


def read(place: Path | str, **changes: Any) -> Data:
    return load(**{"path": str(place), "split": "train", "column": "text", "heldout": 0.25, **changes})


@pytest.mark.parametrize("form", ["saved", "splits", "folder", "rows.jsonl", "rows.parquet"])
def test_every_form_gives_the_rows_in_their_order(tmp_path: Path, form: str) -> None:
    place = written(tmp_path, form)
    data = read(place)
    whole = pack(text.encode() for text in TEXTS if text)
    assert [*data.train.tolist(), *data.heldout.tolist()] == whole.tolist()
    assert len(data.heldout) == round(0.25 * len(whole))
    files = [Path(file.path) for file in data.files]
    assert files and all(place == file or place in file.parents for file in files)
    check_unchanged(data.files)
    files[0].write_bytes(files[0].read_bytes() + b" ")
    with pytest.raises(PlanError, match="has changed"):
        check_unchanged(data.files)


def test_rows_go_through_a_tokenizer_and_are_told_apart(tmp_path: Path) -> None:
    path = str(bare(tmp_path))
    data = read(written(tmp_path, "rows.jsonl"), tokenizer=path, documents=True)
    ours = tokenizer_of(path)
    whole = [*data.train.tolist(), *data.heldout.tolist()]
    assert "".join(ours.decode([t]) for t in whole if t == ours.separator).count("<|") == 30
    assert whole[: whole.index(ours.separator)] == ours.encode([str(TEXTS[0]).encode()])[0].tolist()
    batch = data.training_batch(0, batch_size=2, seq_len=32, seed=0)
    assert {"document_ids", "position_ids"} < {*batch}


@pytest.mark.parametrize(
    ("form", "changes", "code", "said"),
    [
        ("splits", {"split": "trian"}, "data-not-found", "has no split 'trian'"),
        ("rows.jsonl", {"split": "test"}, "data-unreadable", "cannot be read"),
        ("rows.jsonl", {"column": "txt"}, "data-not-found", "has no column 'txt'"),
        ("rows.jsonl", {"column": "number"}, "data-unreadable", "holds int64"),
        ("rows.jsonl", {"path": "./nowhere"}, "data-not-found", "'./nowhere' does not exist"),
        ("rows.jsonl", {"heldout": 0.0}, "data-too-short", "the held-out part"),
    ],
)
def test_what_is_not_there_is_said(
    tmp_path: Path, form: str, changes: dict[str, Any], code: str, said: str
) -> None:
    with pytest.raises(PlanError) as caught:
        read(written(tmp_path, form), **changes)
    [found] = caught.value.diagnostics
    assert found.code == code and said in found.message and found.help


def test_files_that_are_no_data_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parallelizer.hugging_face import build

    monkeypatch.setattr(build, "hub_answers", lambda: False)
    (tmp_path / "some").mkdir()
    (tmp_path / "some/picture.png").write_bytes(b"\0")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "zero.jsonl").write_text(json.dumps({"text": "a\0b"}) + "\n")
    for place, said in (
        (tmp_path / "some", "it has .png"),
        (tmp_path / "broken.jsonl", "cannot be read"),
        (tmp_path / "zero.jsonl", "row 1 of"),
        ("nobody/has-this", "does not exist"),
    ):
        with pytest.raises(PlanError, match=said):
            read(place)
