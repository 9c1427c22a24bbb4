"""Relative positions as transformers' T5 counts them, causality, and what given positions mean."""

from __future__ import annotations

import pytest
import torch

from parallelizer.models.encoder_decoder import EncoderDecoder, RelativeBias

SIZES = {
    "vocab_size": 40, "dim": 16, "n_layers": 2, "heads": 4, "head_dim": 6, "hidden_dim": 20, "buckets": 8, "max_distance": 10,
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 10)])
def test_buckets_are_those_of_t5(causal: bool, buckets: int, farthest: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="an independent reference")
    distance = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(distance, not causal, buckets, farthest)
    assert torch.equal(RelativeBias(buckets, farthest, 2, causal).bucket(distance), expected)


def model() -> EncoderDecoder:
    torch.manual_seed(0)
    return EncoderDecoder(**SIZES).double()  # type: ignore[arg-type]


def ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(40, (2, length), generator=torch.Generator().manual_seed(seed))


def test_the_decoder_sees_all_that_is_read_and_nothing_that_is_yet_to_be_written() -> None:
    built, read, written = model(), ids(9, 1), ids(7, 2)
    logits = built(read, written)
    assert logits.shape == (2, 7, 40)
    later, last = written.clone(), read.clone()
    later[:, 4:] = (later[:, 4:] + 1) % 40
    last[:, -1] = (last[:, -1] + 1) % 40
    changed = (built(read, later) - logits).abs().amax((0, 2))
    assert torch.equal(changed[:4], torch.zeros(4, dtype=torch.float64)) and changed[4:].min() > 0
    assert (built(last, written) - logits).abs().amax((0, 2)).min() > 0


def test_positions_are_counted_unless_given_and_only_distances_matter() -> None:
    built, read, written = model(), ids(9, 1), ids(7, 2)
    given = built(read, written, torch.arange(9).expand(2, -1) + 5, torch.arange(7).expand(2, -1))
    torch.testing.assert_close(given, built(read, written))
    backwards = built(read.flip(1), written, torch.arange(9).flip(0).expand(2, -1))
    torch.testing.assert_close(backwards, given)  # an order does not matter where positions are told


def test_one_embedding_is_read_written_and_the_head() -> None:
    built = model()
    assert built.head.weight is built.shared.weight
    assert sum("shared" in name or "head" in name for name, _ in built.named_parameters()) == 1
