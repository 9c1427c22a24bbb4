"""Masks of a rank's rows are transformers' own masks, taken at those rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallelizer.hugging_face import attention, causal_lm, masks
from parallelizer.styles.context_parallel.dealing import by_cost
from parallelizer.styles.context_parallel.order import Contiguous, Order
from parallelizer.styles.context_parallel.sequence import CurrentOrder
from tests.hugging_face.small import settings as small_settings

pytest.importorskip("transformers", reason="the optional extra `hf`")

from transformers import masking_utils as theirs

KINDS = ("causal", "window", "chunks", "bidirectional", "bidirectional window")


@contextmanager
def here(order: Order, rank: int, rows: int, stream_ranks: int = 1) -> Iterator[None]:
    """As if the forward of a model ran whose rank has `rows` rows."""
    masks._here = masks._Here(CurrentOrder(order), rank, rows, stream_ranks, None)
    try:
        yield
    finally:
        masks._here = None


def function(kind: str, size: int) -> Any:
    """transformers' function of a kind of mask."""
    return {
        "causal": theirs.causal_mask_function,
        "window": theirs.sliding_window_causal_mask_function(size),
        "chunks": theirs.chunked_causal_mask_function(size, torch.zeros(3, dtype=torch.int64)),
        "bidirectional": theirs.bidirectional_mask_function,
        "bidirectional window": theirs.sliding_window_bidirectional_mask_function(size),
    }[kind]


def whole_mask(batch: int, length: int, kind: str, size: int, padding: Tensor | None) -> Tensor:
    """What transformers' sdpa would use, [batch, 1, length, length], written out."""
    mask = theirs.sdpa_mask(
        batch, length, length, 0, 0,
        mask_function=function(kind, size), attention_mask=padding, local_size=size if "window" in kind else None,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
    )  # fmt: skip
    return mask.expand(batch, 1, length, length)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Order, int, int]:
    """An order over two to four ranks, the rank, and the number of rows with padding; the order knows those without."""
    ranks = draw(st.integers(2, 4))
    rows = 2 * ranks * draw(st.integers(1, 4))
    real = draw(st.one_of(st.none(), st.integers(rows - 2 * ranks + 1, rows - 1)))
    kind = draw(st.sampled_from(("head-tail", "none", "by-cost")))
    order: Order = Order(ranks, real) if kind == "head-tail" else Contiguous(ranks, real)
    if kind == "by-cost":
        cost = torch.tensor(draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows)))
        order = by_cost(cost, ranks, real)
    return order, draw(st.integers(0, ranks - 1)), rows


@given(
    cut=cuts(), kind=st.sampled_from(KINDS), size=st.integers(1, 9), batch=st.integers(1, 3), data=st.data()
)
@settings(max_examples=150, deadline=None)
def test_a_rank_has_the_rows_of_its_positions(
    cut: tuple[Order, int, int], kind: str, size: int, batch: int, data: st.DataObject
) -> None:
    order, rank, rows = cut
    length = rows if order.length is None else order.length
    padding = None
    if data.draw(st.booleans(), label="padding"):
        padding = torch.tensor(
            [[i < data.draw(st.integers(1, length)) for i in range(length)] for _ in range(batch)]
        )
    local = rows // order.ranks
    with here(order, rank, local):
        mask = masks.mask(
            batch, local, length,
            mask_function=function(kind, size), attention_mask=padding,
            local_size=size if "window" in kind else None,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
        )  # fmt: skip
    whole = whole_mask(batch, length, kind, size, padding)
    positions = order.positions(rows, rank).expand(batch, -1)
    assert mask is not None and mask.shape == (batch, 1, local, length)
    for row, place in enumerate(positions[0].tolist()):
        if place < length:  # what padding sees does not matter
            assert torch.equal(mask[:, :, row], whole[:, :, place]), (row, place)


def test_rows_that_differ_in_the_batch_have_their_own_positions() -> None:
    positions = torch.tensor([[[0, 3], [1, 2]], [[1, 3], [0, 2]]])  # [batch, rank, rows]
    from parallelizer.styles.context_parallel.order import Dealt

    order = Dealt(2, None, positions, "per-document")
    for rank in (0, 1):
        with here(order, rank, 2):
            mask = masks.mask(2, 2, 4, mask_function=theirs.causal_mask_function, allow_is_causal_skip=False)
        whole = whole_mask(2, 4, "causal", 1, None)
        assert mask is not None
        for row in (0, 1):
            assert torch.equal(mask[row, 0], whole[row, 0][positions[row, rank]])


@pytest.mark.parametrize(
    ("more", "skips"),
    [
        ({}, True),
        ({"local_size": 9}, True),  # a window wider than the sequence hides nothing
        ({"local_size": 8}, False),
        ({"attention_mask": torch.ones(1, 8, dtype=torch.bool)}, False),
        ({"allow_is_causal_skip": False}, False),
    ],
)
def test_no_mask_is_made_where_is_causal_says_all(more: dict[str, Any], skips: bool) -> None:
    with here(Order(2), 1, 4):
        mask = masks.mask(1, 4, 8, mask_function=theirs.causal_mask_function, **more)
    assert (mask is None) == skips


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (2, 8), (4, 7)])
def test_a_mask_of_a_part_of_the_columns_is_refused(rows: int, columns: int) -> None:
    with here(Order(2), 0, 4), pytest.raises(ValueError, match="must be of the whole sequence"):
        masks.mask(1, rows, columns, mask_function=theirs.causal_mask_function)


def test_a_stream_that_is_split_over_tp_has_all_rows_in_attention() -> None:
    with here(Order(1), 0, 8, stream_ranks=2):
        for told in (4, 8):  # without a mask the model tells the length of its stream
            mask = masks.mask(1, 4, told, mask_function=function("window", 3), allow_is_causal_skip=False)
            assert mask is not None
            assert torch.equal(mask.expand(1, 1, 8, 8), whole_mask(1, 8, "window", 3, None))


SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_cache": False,
}
GATED = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "mistral": {**GATED, "sliding_window": 3, "head_dim": 4},
    "qwen3": {**GATED, "head_dim": 4},
    "gemma3_text": {**GATED, "head_dim": 4, "sliding_window": 3, "num_hidden_layers": 6},
    "phi3": GATED,
    "gpt2": SIZES,
    "gpt_neox": {**SIZES, "intermediate_size": 32},
    "opt": {**SIZES, "word_embed_proj_dim": 16, "ffn_dim": 32},
    "bert": {**SIZES, "intermediate_size": 32},
}


def logits(kind: str, sizes: dict[str, Any], attention: str) -> Tensor:
    torch.manual_seed(0)
    auto = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    model = causal_lm(config={"model_type": kind, **sizes}, auto=auto, attention=attention).eval()
    ids = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1))
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[0, 9:] = False
    with torch.no_grad():
        whole: Tensor = model(input_ids=ids).logits
        short: Tensor = model(input_ids=ids, attention_mask=padding).logits
    return torch.stack([whole, short])


@pytest.mark.parametrize("kind", FAMILIES)
def test_on_one_device_ours_is_transformers_sdpa_to_the_last_bit(kind: str) -> None:
    assert torch.equal(logits(kind, FAMILIES[kind], "parallelizer"), logits(kind, FAMILIES[kind], "sdpa"))


def test_capped_scores_are_those_of_transformers_eager() -> None:
    sizes = {
        **GATED,
        "head_dim": 4,
        "sliding_window": 3,
        "num_hidden_layers": 2,
        "attn_logit_softcapping": 0.5,
        "initializer_range": 0.5,
    }
    ours, eager = (logits("gemma2", sizes, name) for name in ("parallelizer", "eager"))
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    uncapped = logits("gemma2", {**sizes, "attn_logit_softcapping": 50.0}, "parallelizer")
    assert not torch.allclose(ours, uncapped, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(masks.SINKS))
def test_attention_with_sinks_is_that_of_transformers_eager(kind: str) -> None:
    sizes = small_settings(kind, vocab_size=32, sliding_window=3, initializer_range=0.5)
    ours, eager = (logits(kind, sizes, name) for name in ("parallelizer", "eager"))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_attention_without_its_sinks_is_another() -> None:
    scores = torch.randn(1, 2, 3, 4)
    given = (torch.nn.Identity(), scores, scores, scores, None)
    without, _ = attention.forward(*given)
    some, _ = attention.forward(*given, s_aux=torch.tensor([0.5, -1e4]))
    assert not torch.allclose(some[:, :, 0], without[:, :, 0]) and torch.allclose(
        some[:, :, 1], without[:, :, 1], atol=1e-6
    )
