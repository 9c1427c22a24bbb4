"""Data that are not a text of tokens and their successors; and data that are not what the model takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallelizer.configuration.compose import compose_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.data import halves, images
from parallelizer.training.data.halves import Halves
from parallelizer.training.data.source import Source
from parallelizer.training.job.prepare import prepare
from recipes import own_data
from tests.recipes.runs import ROOT

BATCH = {"batch_size": 4, "seq_len": 16}


def drawn() -> Source:
    return images.load(size=8, classes=3, noise=0.5)


def read() -> Halves:
    return halves.load(max_bytes=0, heldout=0.1, path=str(ROOT / "LICENSE"))


def mapped() -> Source:
    return own_data.load(path=str(ROOT / "LICENSE"), vocabulary=256, dtype="uint8")


@pytest.mark.parametrize("build", [drawn, read, mapped])
def test_ranks_rows_are_those_of_the_global_batch(build) -> None:  # type: ignore[no-untyped-def]
    source: Source = build()
    whole = source.training_batch(12, seed=1, **BATCH)
    parts = [source.training_batch(12, seed=1, rows=slice(i, i + 2), **BATCH) for i in (0, 2)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
    [held, *_], [again, *_] = (source.heldout_batches(count=2, **BATCH) for _ in range(2))
    assert all(torch.equal(held[name], again[name]) for name in held)
    first = next(iter(whole))
    for other in (
        source.training_batch(16, seed=1, **BATCH),
        source.training_batch(12, seed=2, **BATCH),
        held,
    ):
        assert not torch.equal(other[first], whole[first])


def test_an_image_s_stripes_lie_as_its_label_says() -> None:
    batch = images.load(size=32, classes=2, noise=0.1).training_batch(0, batch_size=16, seq_len=1, seed=0)
    along = (
        batch["images"].diff(dim=2).abs().mean((1, 2, 3)),
        batch["images"].diff(dim=3).abs().mean((1, 2, 3)),
    )
    assert torch.equal((along[0] > along[1]).long(), batch["labels"])
    assert set(batch["labels"].tolist()) == {0, 1}


def test_the_second_half_is_written_after_the_first_is_read() -> None:
    source = read()
    batch = source.training_batch(0, seed=0, **BATCH)
    assert {name: tuple(t.shape) for name, t in batch.items()} == dict.fromkeys(
        ("input_ids", "decoder_input_ids", "labels"), (4, 16)
    )
    text = bytes(source.train.tolist())
    for row in range(4):
        window = bytes(batch["input_ids"][row].tolist()) + bytes(batch["labels"][row].tolist())
        assert window in text
        given = bytes(batch["decoder_input_ids"][row].tolist())
        assert given == window[15:31]


def test_a_row_that_fills_up_a_held_out_batch_counts_for_nothing() -> None:
    source = read()
    *_, last = source.heldout_batches(batch_size=1000, seq_len=16, count=1)
    counted = (last["labels"] != -100).any(1)
    assert not counted.all() and counted.any()


def test_a_row_of_the_source_to_copy_is_a_piece_of_its_file_and_labels_are_the_next_tokens() -> None:
    text, source = (
        (ROOT / "LICENSE").read_bytes(),
        own_data.load(path=str(ROOT / "LICENSE"), vocabulary=256, dtype="uint8", heldout=0.1),
    )
    cut = round(0.9 * len(text))
    for batch, piece in (
        (source.training_batch(0, seed=0, **BATCH), text[:cut]),
        (source.heldout_batches(count=1, **BATCH)[0], text[cut:]),
    ):
        assert len({*map(tuple, batch["input_ids"].tolist())}) == 4
        for row in range(4):
            tokens, labels = (bytes(batch[name][row].tolist()) for name in ("input_ids", "labels"))
            assert tokens + labels[-1:] in piece and labels[:-1] == tokens[1:]
    with pytest.raises(PlanError, match="too short for sequences of 9999 tokens"):
        source.check_fits(9999)
    source.check_fits(1000)
    assert source.fingerprint() != mapped().fingerprint()


def mismatches(*overrides: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        prepare(*compose_config(list(overrides)), Path("nowhere"))
    assert {d.code for d in caught.value.diagnostics} == {"data-mismatch"}
    return [d.message for d in caught.value.diagnostics]


def test_data_that_the_model_does_not_take_are_refused() -> None:
    text = f"data.path={ROOT / 'LICENSE'}"
    assert mismatches("model=vit_tiny", text) == [
        "the model takes a batch entry 'images', and the data has input_ids, labels",
        "the model takes 'labels' of [1] for one row, and the data has [1, 256]",
    ]
    assert mismatches("model=vit_tiny", "data=images", "data.size=64") == [
        "the model takes 'images' of [1, 3, 32, 32] for one row, and the data has [1, 3, 64, 64]"
    ]
    assert mismatches("model=encoder_decoder_tiny", text) == [
        "the model takes a batch entry 'decoder_input_ids', and the data has input_ids, labels"
    ]
