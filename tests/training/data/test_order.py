"""Which samples come when: counted in samples, so that the size of a batch may change in the middle of a run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallelizer.training.data import images
from parallelizer.training.data.corpus import Data
from parallelizer.training.data.halves import Halves
from parallelizer.training.data.source import Source
from parallelizer.training.data.windows import global_batch

TOKENS = torch.arange(101)
TEXT = Data(TOKENS, TOKENS, 256, 0.0)
IN_HALVES = Halves(TOKENS, TOKENS, 256, 0.0)
DRAWN = images.load(size=8, classes=10, noise=1.0)

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def windows(batch: dict[str, Tensor]) -> list[int]:
    """The numbers of a batch's windows of ten tokens, where each token is its own place."""
    return [start // 10 for start in batch["input_ids"][:, 0].tolist()]


def labels(batch: dict[str, Tensor]) -> list[int]:
    return batch["labels"].tolist()  # type: ignore[no-any-return]


def samples(
    source: Source, batch_sizes: list[int], seq_len: int = 10, seed: int = 7
) -> list[dict[str, Tensor]]:
    """The batches of these sizes, one after another."""
    batches, position = [], 0
    for size in batch_sizes:
        batches.append(source.training_batch(position, batch_size=size, seq_len=seq_len, seed=seed))
        position += size
    return batches


ORDER = [3, 0, 1, 9, 4, 7, 2, 5, 6, 8, 3, 2, 7, 8, 6, 1, 5, 9, 0, 4, 1, 0, 5, 7]
"""Of ten windows, through two epochs and a part of the third, with seed 7."""

# What was drawn when batches were counted by steps, eight of three samples each.
BY_STEPS = {
    "text": (TEXT, 10, windows, ORDER),
    "halves": (IN_HALVES, 5, windows, ORDER),
    "images": (DRAWN, 1, labels, [9, 2, 0, 4, 0, 3, 2, 9, 2, 8, 8, 3, 2, 4, 0, 2, 4, 8, 3, 1, 5, 4, 8, 0]),
}


@pytest.mark.parametrize("name", BY_STEPS)
def test_batches_of_one_size_are_those_that_were_counted_by_steps(name: str) -> None:
    source, seq_len, told, order = BY_STEPS[name]
    found = [n for batch in samples(source, [3] * (len(order) // 3), seq_len) for n in told(batch)]
    assert found == order


@settings(deadline=None)
@given(
    n=st.integers(2, 200),
    seq_len=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    batch_sizes=sizes,
)
def test_whatever_the_sizes_of_batches_each_epoch_has_every_sample_once(
    n: int, seq_len: int, seed: int, batch_sizes: list[int]
) -> None:
    count = (n - 1) // seq_len
    if count == 0:
        return
    tokens, seen = torch.arange(n), list[int]()
    while len(seen) < 2 * count:
        for size in batch_sizes:
            batch = global_batch(tokens, position=len(seen), batch_size=size, seq_len=seq_len, seed=seed)
            seen += batch["input_ids"][:, 0].tolist()
    for epoch in range(2):
        drawn = seen[epoch * count : (epoch + 1) * count]
        assert sorted(drawn) == [window * seq_len for window in range(count)]


@settings(deadline=None)
@given(first=sizes, second=sizes)
def test_the_sizes_of_batches_do_not_change_the_order_of_samples(first: list[int], second: list[int]) -> None:
    for source, told in ((TEXT, windows), (DRAWN, labels)):
        one, other = ([n for batch in samples(source, s) for n in told(batch)] for s in (first, second))
        shared = min(len(one), len(other))
        assert one[:shared] == other[:shared]


def test_a_sample_is_the_same_in_every_row_to_the_bit() -> None:
    for source in (TEXT, IN_HALVES, DRAWN):
        whole = source.training_batch(5, batch_size=8, seq_len=5, seed=3)
        for row in range(8):
            alone = source.training_batch(5 + row, batch_size=1, seq_len=5, seed=3)
            assert all(torch.equal(alone[name][0], whole[name][row]) for name in whole)


# fingerprints


def test_a_fingerprint_is_that_of_all_that_determines_the_batches() -> None:
    others = [
        Data(TOKENS, TOKENS, 256, 0.0),
        Data(TOKENS + 1, TOKENS, 256, 0.0),
        Data(TOKENS, TOKENS + 1, 256, 0.0),
        Data(TOKENS[:-1], TOKENS, 256, 0.0),
        Data(TOKENS[:60], TOKENS[60:], 256, 0.0),
        Data(TOKENS[:61], TOKENS[61:], 256, 0.0),
        IN_HALVES,
        DRAWN,
        *(dataclasses.replace(DRAWN, **changed) for changed in ({"size": 9}, {"classes": 9}, {"noise": 0.5})),
    ]
    prints = [source.fingerprint() for source in others]
    assert prints[0] == TEXT.fingerprint() == Data(TOKENS.clone(), TOKENS, 128, 9.0).fingerprint()
    assert len(set(prints)) == len(others)
    assert all(len(bytes.fromhex(text)) == 32 for text in prints)


def test_a_fingerprint_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(TOKENS, TOKENS, 256, 0.0)
    made = data.fingerprint()
    monkeypatch.setattr(
        "parallelizer.training.data.corpus.fingerprint", lambda *parts: pytest.fail("made again")
    )
    assert data.fingerprint() == made


def test_an_order_that_another_release_of_torch_draws_has_another_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = TEXT.fingerprint()
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **kwargs: randperm(*args, **kwargs).flip(0))
    assert Data(TOKENS, TOKENS, 256, 0.0).fingerprint() != before
