"""Text to batches: what is read, how it is split, and which windows come when."""

from __future__ import annotations

import math
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.data import stdlib as stdlib_source
from parallelizer.training.data.corpus import Data, build_data, stable_hash, unigram_entropy
from parallelizer.training.data.files import Document
from parallelizer.training.data.packing import pack
from parallelizer.training.data.tokenizer import decode, encode
from parallelizer.training.data.windows import evaluation_batches, global_batch

CONFIGS = Path(__file__).parents[3] / "configs" / "data"


def config(name: str, **changes: Any) -> Any:
    return OmegaConf.merge(OmegaConf.load(CONFIGS / f"{name}.yaml"), changes)


def diagnostics(error: pytest.ExceptionInfo[PlanError]) -> list[tuple[str, str]]:
    assert all(d.help for d in error.value.diagnostics)
    return [(d.code, d.message) for d in error.value.diagnostics]


# tokens


@given(st.text())
def test_text_comes_back_from_its_tokens(text: str) -> None:
    tokens = encode(text)
    assert tokens.dtype == torch.uint8
    assert decode(tokens) == text


def test_packing_ends_each_document_with_a_separator() -> None:
    assert pack([b"ab", b"", b"c"]).tolist() == [97, 98, 0, 0, 99, 0]
    assert pack([]).tolist() == []


@pytest.mark.parametrize(
    ("tokens", "entropy"),
    [([5, 5, 5], 0.0), ([0, 1, 2, 3], math.log(4)), ([7, 7, 7, 9], 2 * math.log(2) - 0.75 * math.log(3))],
)
def test_unigram_entropy_of_known_distributions(tokens: list[int], entropy: float) -> None:
    assert unigram_entropy(torch.tensor(tokens, dtype=torch.uint8)) == pytest.approx(entropy, abs=1e-12)


def test_the_hash_is_the_same_everywhere() -> None:
    # the first 12 digits that `printf abc.py | sha256sum` prints
    assert stable_hash("abc.py") == int("c4e9f202e25a", 16) / 2**48


# sources


def library_files() -> dict[str, bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.glob("*.py")}


def test_the_standard_library_splits_into_whole_files_that_share_nothing() -> None:
    data = build_data(config("stdlib"))
    train, heldout = (bytes(part.numpy().tobytes()).split(b"\0") for part in (data.train, data.heldout))
    assert not {d for d in train if d} & {d for d in heldout if len(d) > 200}
    assert (data.vocab_size, data.train.dtype) == (256, torch.uint8)
    assert 2_000_000 < len(data.train) + len(data.heldout) <= 8_001_000
    assert 0.01 < len(heldout) / (len(train) + len(heldout)) < 0.1
    found = set(train) | set(heldout)
    assert sum(content in found for content in library_files().values()) > 50
    assert 2.5 < data.unigram_entropy < 4.0


def test_the_standard_library_is_the_same_twice_and_quick() -> None:
    start = time.process_time()
    first = build_data(config("stdlib"))
    assert time.process_time() - start < 1.5
    second = build_data(config("stdlib"))
    assert torch.equal(first.train, second.train) and torch.equal(first.heldout, second.heldout)


def library(tmp_path: Path) -> Path:
    for name in (
        "a.py",
        "b/c.py",
        "test/x.py",
        "b/tests/x.py",
        "site-packages/p.py",
        "__pycache__/a.py",
        "a.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_tests_and_installed_packages_are_not_the_library(tmp_path: Path) -> None:
    assert stdlib_source.source_files(library(tmp_path)) == ["a.py", "b/c.py"]


def contents(documents: dict[str, Document]) -> dict[str, bytes]:
    return {name: document.content for name, document in documents.items()}


def test_a_smaller_cap_takes_fewer_of_the_same_files() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = stdlib_source.source_files(root)
    small, large = (contents(stdlib_source.read(root, files, size)) for size in (100_000, 400_000))
    assert 0 < len(small) < len(large)
    assert small.items() <= large.items()
    assert sum(map(len, large.values())) <= 400_000


def test_the_cap_changes_neither_a_file_s_side_nor_the_share_that_is_held_out() -> None:
    small, large = (build_data(config("stdlib", max_bytes=size)) for size in (2_000_000, 6_000_000))
    heldout = documents(small.heldout)
    assert heldout <= documents(large.heldout)
    assert len(heldout) < 0.2 * len(documents(small.train))


def documents(tokens: torch.Tensor) -> set[bytes]:
    return {document for document in tokens.numpy().tobytes().split(b"\0") if document}


def test_no_standard_library_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(PlanError) as caught:
        build_data(config("stdlib"))
    assert diagnostics(caught)[0][0] == "data-not-found"


@pytest.mark.parametrize("name", ["stdlib", "text"])
def test_one_file_is_split_at_its_end(name: str, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(1, 101)))
    data = build_data(config(name, path=str(file), heldout=0.1))
    assert data.train.tolist() == list(range(1, 92))
    assert data.heldout.tolist() == [*range(92, 101), 0]


def test_a_folder_is_read_whole_but_for_hidden_and_empty_files(tmp_path: Path) -> None:
    contents = {
        "a.txt": "aaa",
        "sub/b.md": "bbbb",
        "sub/deep/c": "ccccc",
        ".hidden": "x",
        ".git/d": "y",
        "empty": "",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "link to nowhere").symlink_to("nowhere")
    data = build_data(config("text", path=str(tmp_path), heldout=0.2))
    tokens = torch.cat([data.train, data.heldout]).numpy().tobytes()
    assert sorted(tokens.split(b"\0")) == [b"", b"aaa", b"bbbb", b"ccccc"]
    assert len(data.heldout) == 3


def test_a_folder_may_be_named_by_a_number_and_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "2024").write_text("a text " * 50)
    monkeypatch.chdir(tmp_path)
    assert len(build_data(config("text", path=2024)).train) > 300


def test_missing_paths_are_diagnosed(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere"), "", None, "zero\0character", str(tmp_path) + "/x" * 3):
        with pytest.raises(PlanError) as caught:
            build_data(config("text", path=path))
        ((code, message),) = diagnostics(caught)
        assert code == "data-not-found" and "does not exist" in message
    with pytest.raises(PlanError) as caught:
        build_data(config("text"))
    assert diagnostics(caught) == [("data-not-found", "data.path is not given")]


def test_every_unreadable_file_is_diagnosed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text " * 50)
    (tmp_path / "b.bin").write_bytes(b"\0\1\2")
    (tmp_path / "c.bin").write_bytes(b"abc\0")
    with pytest.raises(PlanError) as caught:
        build_data(config("text", path=str(tmp_path)))
    messages = [f"{tmp_path / name} cannot be read: it holds a zero byte" for name in ("b.bin", "c.bin")]
    assert [code for code, _ in diagnostics(caught)] == ["data-unreadable"] * 2
    assert [message.split(",")[0] for _, message in diagnostics(caught)] == messages


@pytest.mark.skipif(sys.platform != "linux", reason="files that fail when they are read")
def test_what_cannot_be_opened_or_read_is_diagnosed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/proc/self/mem", str(tmp_path / "pipe"), "/dev/zero", "x" * 5000):
        with pytest.raises(PlanError) as caught:
            build_data(config("text", path=path))
        assert [code for code, _ in diagnostics(caught)] == ["data-unreadable"], path


def test_too_little_text_is_diagnosed(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(PlanError) as caught:
        build_data(config("text", path=str(tmp_path)))
    assert [code for code, _ in diagnostics(caught)] == ["data-too-short"]
    (tmp_path / "short").write_text("ab")
    with pytest.raises(PlanError) as caught:
        build_data(config("text", path=str(tmp_path)))
    ((code, message),) = diagnostics(caught)
    assert code == "data-too-short" and "held-out part" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"_target_": "parallelizer.training.data.nowhere"}, "parallelizer.training.data.nowhere"),
        ({"_target_": "builtins.dict"}, "gives dict"),
        ({"colour": "red"}, "colour"),
        ({"heldout": "most"}, "str"),
    ],
)
def test_a_source_that_cannot_be_called_is_diagnosed(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        build_data(config("text", path=__file__, **changes))
    ((code, message),) = diagnostics(caught)
    assert code == "data-unreadable" and reason in message


# batches

sizes = {
    "n": st.integers(2, 200),
    "seq_len": st.integers(1, 12),
    "batch_size": st.integers(1, 9),
    "seed": st.integers(0, 2**31),
}


@given(**sizes)
def test_each_epoch_has_every_window_once(n: int, seq_len: int, batch_size: int, seed: int) -> None:
    tokens = torch.arange(n)
    n_windows = (n - 1) // seq_len
    if n_windows == 0:
        with pytest.raises(PlanError) as caught:
            global_batch(tokens, position=0, batch_size=batch_size, seq_len=seq_len, seed=seed)
        assert diagnostics(caught)[0][0] == "data-too-short"
        return
    starts: list[int] = []
    while len(starts) < 3 * n_windows:
        batch = global_batch(tokens, position=len(starts), batch_size=batch_size, seq_len=seq_len, seed=seed)
        assert batch["input_ids"].shape == batch["labels"].shape == (batch_size, seq_len)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["labels"], batch["input_ids"] + 1)
        assert torch.equal(batch["input_ids"], batch["input_ids"][:, :1] + torch.arange(seq_len))
        starts += batch["input_ids"][:, 0].tolist()
    for epoch in range(3):
        drawn = starts[epoch * n_windows : (epoch + 1) * n_windows]
        assert sorted(drawn) == [w * seq_len for w in range(n_windows)]


@given(
    position=st.integers(0, 400), start=st.integers(0, 8), stop=st.integers(0, 8), stride=st.integers(1, 3)
)
def test_rows_are_slices_of_the_whole_batch(position: int, start: int, stop: int, stride: int) -> None:
    tokens, rows = torch.arange(100, dtype=torch.uint8), slice(start, stop, stride)
    whole = global_batch(tokens, position=position, batch_size=8, seq_len=4, seed=1)
    part = global_batch(tokens, position=position, batch_size=8, seq_len=4, seed=1, rows=rows)
    assert part.keys() == whole.keys()
    assert all(torch.equal(part[name], whole[name][rows]) for name in whole)


def test_batches_depend_on_seed_and_position_alone() -> None:
    tokens = torch.arange(1000)

    def first(seed: int, position: int) -> list[int]:
        batch = global_batch(tokens, position=position, batch_size=4, seq_len=5, seed=seed)
        return batch["input_ids"][:, 0].tolist()

    expected = first(0, 7)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    drawn = {(seed, at): first(seed, at) for seed in (1, 0) for at in (70, 3, 7)}
    assert drawn[0, 7] == expected
    assert len({tuple(v) for v in drawn.values()}) == 6
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_second_epoch_has_another_order_and_no_other_seed_has_it() -> None:
    tokens = torch.arange(401)

    def epoch(seed: int, number: int) -> list[int]:
        batch = global_batch(tokens, position=100 * number, batch_size=100, seq_len=4, seed=seed)
        return batch["input_ids"][:, 0].tolist()

    orders = {tuple(epoch(seed, number)) for seed in range(3) for number in range(3)}
    assert len(orders) == 9


def test_evaluation_is_spread_evenly_and_always_the_same() -> None:
    tokens = torch.arange(1001)
    batches = evaluation_batches(tokens, batch_size=4, seq_len=10, count=2)
    starts = [batch["input_ids"][:, 0].tolist() for batch in batches]
    assert starts == [[0, 120, 250, 370], [500, 620, 750, 870]]
    rows = evaluation_batches(tokens, batch_size=4, seq_len=10, count=2, rows=slice(1, 3))
    for batch, part in zip(batches, rows, strict=True):
        assert all(torch.equal(part[name], batch[name][1:3]) for name in batch)


@given(**sizes | {"count": st.integers(1, 5)})
def test_evaluation_counts_no_window_twice(
    n: int, seq_len: int, batch_size: int, seed: int, count: int
) -> None:
    tokens = torch.arange(n)
    if n <= seq_len:
        with pytest.raises(PlanError):
            evaluation_batches(tokens, batch_size=batch_size, seq_len=seq_len, count=count)
        return
    batches = evaluation_batches(tokens, batch_size=batch_size, seq_len=seq_len, count=count)
    assert all(batch["labels"].shape == (batch_size, seq_len) for batch in batches)
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    counted = labels[labels != -100].tolist()
    assert len(counted) == len(set(counted)) == seq_len * min(count * batch_size, (n - 1) // seq_len)


def test_data_that_is_shorter_than_a_sequence_is_diagnosed() -> None:
    data = Data(train=torch.zeros(100), heldout=torch.zeros(20), vocab_size=256, unigram_entropy=0.0)
    data.check_fits(19)
    with pytest.raises(PlanError) as caught:
        data.check_fits(20)
    message = "the held-out text has 20 tokens; one sequence needs 21"
    assert diagnostics(caught) == [("data-too-short", message)]
