"""Sources of datasets, DataLoaders and iterables: dealt out by rows, and entered at any place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.data.samples import source_of
from parallelizer.training.data.source import Source

COUNT, HELD = 20, 3


def sample(number: int) -> dict[str, Tensor]:
    return {"input_ids": torch.full((4,), number), "labels": torch.full((4,), number)}


class Mapped(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return sample(number)


class Flow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(sample, range(COUNT))


class Counted(list[Any]):
    """What a collate function is given, beside a batch of the default's."""

    @staticmethod
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([one[name] + 100 for one in samples]) for name in samples[0]}


KINDS: dict[str, Callable[[], Any]] = {
    "dataset": Mapped,
    "list": lambda: [sample(n) for n in range(COUNT)],
    "loader": lambda: DataLoader(Mapped(), batch_size=7, shuffle=True),
    "loader in order": lambda: DataLoader(Mapped(), batch_size=7),
    "iterable": Flow,
    "iterable loader": lambda: DataLoader(Flow(), batch_size=7),
    "function": lambda: lambda: map(sample, range(COUNT)),
    "token ids": lambda: [[n] * 5 for n in range(COUNT)],
}


def rows(source: Source, position: int, size: int = 4, seed: int = 1, **more: Any) -> list[int]:
    batch = source.training_batch(position, batch_size=size, seq_len=4, seed=seed, **more)
    assert set(batch) == {"input_ids", "labels"} and batch["labels"].shape[1:] == (4,)
    return [int(n) for n in batch["input_ids"][:, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_comes_once_an_epoch_and_ranks_share_a_batch(kind: str) -> None:
    source = source_of(KINDS[kind](), HELD)
    source.check_fits(4)
    whole = [number for start in range(0, 34, 2) for number in rows(source, start, 2)]
    assert sorted(whole[:17]) == list(range(HELD, COUNT)) == sorted(whole[17:])
    in_order = kind in ("loader in order", "iterable", "iterable loader", "function")
    assert (whole[:17] == list(range(HELD, COUNT))) == in_order
    assert rows(source, 4, rows=slice(0, 2)) + rows(source, 4, rows=slice(2, 4)) == whole[4:8]
    assert (rows(source, 4, seed=2) == whole[4:8]) == in_order
    anew = source_of(KINDS[kind](), HELD)
    assert rows(anew, 10, 6) == whole[10:16] and anew.fingerprint() == source.fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_samples_are_held_out_and_rows_that_fill_up_count_for_nothing(kind: str) -> None:
    first, last = source_of(KINDS[kind](), HELD).heldout_batches(batch_size=2, seq_len=4, count=5)
    assert first["input_ids"][:, 0].tolist() == [0, 1]
    assert last["input_ids"][0, 0] == 2 and last["labels"].tolist() == [[2] * 4, [-100] * 4]
    other = source_of(KINDS[kind](), Mapped()).heldout_batches(
        batch_size=4, seq_len=4, count=1, rows=slice(2, 4)
    )
    assert other[0]["input_ids"][:, 0].tolist() == [2, 3]


def test_resuming_what_can_only_be_iterated_says_what_it_drops(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(source_of(Flow(), HELD), 8) == [11, 12, 13, 14]
    assert (
        "the data cannot be resumed at a position: 8 samples are read and dropped" in capsys.readouterr().err
    )
    source = source_of(Flow(), HELD)
    for position in (0, 4, 8):
        rows(source, position)
    rows(source_of(Mapped(), HELD), 8)
    assert capsys.readouterr().err == ""


def test_a_loader_collates() -> None:
    loader = DataLoader(Mapped(), batch_size=2, collate_fn=Counted.collate)
    assert rows(source_of(loader, HELD), 0) == [103, 104, 105, 106]


@pytest.mark.parametrize(
    ("samples", "heldout", "message"),
    [
        (iter([1]), 3, "can be iterated only once"),
        (7, 3, "int cannot be indexed or iterated"),
        (Mapped(), 0, "a number of samples from 1 on"),
        (Mapped(), [], "there is no held-out sample"),
        ([(1, 2)] * 9, 2, "a sample is a tuple"),
        ([[1, 2], [1, 2, 3]], 1, "has the shape|samples differ|2 samples"),
        (
            DataLoader(Mapped(), sampler=torch.utils.data.WeightedRandomSampler([1.0] * 20, 20)),
            2,
            "is its own",
        ),
    ],
)
def test_what_makes_no_source_is_refused(samples: Any, heldout: Any, message: str) -> None:
    if isinstance(samples, list) and isinstance(samples[0], list):
        message = "samples differ"
        samples = [*samples, [1, 2]]
    with pytest.raises(PlanError, match=message):
        source_of(samples, heldout).training_batch(0, batch_size=2, seq_len=1, seed=0)


def test_as_many_held_out_as_there_are_is_too_short() -> None:
    for samples in (Mapped(), Flow()):
        with pytest.raises(PlanError) as caught:
            source_of(samples, COUNT).check_fits(4)
        assert [d.code for d in caught.value.diagnostics] == ["data-too-short"]


def test_the_loss_without_learning_is_told_for_a_label_where_each_row_has_one() -> None:
    def classified(number: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((4,), number), "labels": torch.tensor(number % 2)}

    rows = [classified(n) for n in range(COUNT)]
    baseline = source_of(rows, rows[:4]).baseline
    assert baseline.unit == "nats a label" and baseline.loss == pytest.approx(0.6931, abs=1e-4)
    tokens = [sample(n) for n in range(COUNT)]
    assert source_of(tokens, tokens[:4]).baseline.unit == "nats a token"
