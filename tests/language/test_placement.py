"""Placements as text and back, and as torch's."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.placement import (
    RESERVED,
    PlacementError,
    from_torch,
    is_layout_name,
    parse_flow,
    parse_placement,
    to_torch,
)
from parallelizer.language.plan import PARTIAL, REPLICATE, Flow, Placement, shard


def place(start: int, end: int) -> Span:
    """Where a part of a text in column 11 of a file stands."""
    return Span("f", 1, 11 + start, 11 + end)


def layout(name: str) -> Placement:
    return Placement("layout", name=name)


PLACEMENTS = st.one_of(
    st.just(REPLICATE),
    st.just(PARTIAL),
    st.integers(-99, 99).map(shard),
    st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True)
    .filter(lambda name: name not in RESERVED)
    .map(layout),
)
BLANKS = st.sampled_from(["", " ", "   "])


@given(PLACEMENTS, BLANKS, BLANKS)
def test_a_placement_is_read_as_it_is_written(placement: Placement, before: str, after: str) -> None:
    text = str(placement)
    read = parse_placement(before + text + after, place)
    assert read == placement
    assert read.span == place(len(before), len(before) + len(text))


@given(PLACEMENTS, PLACEMENTS, BLANKS)
def test_a_flow_is_read_as_it_is_written(arrives: Placement, wanted: Placement, blank: str) -> None:
    left, right = str(arrives), str(wanted)
    # `a-->b` is the name `a-` and an arrow, which nobody means and everybody can read.
    text = f"{left}{blank}->{blank}{right}"
    flow = parse_flow(text, output=False, place=place)
    assert flow == Flow(arrives, wanted) == parse_flow(text, output=True)
    assert str(parse_flow(str(flow), output=True)) == f"{left} -> {right}"
    assert flow.wanted is not None
    assert flow.wanted.span == place(len(text) - len(right), len(text))


def test_one_placement_says_how_an_input_arrives_and_how_an_output_leaves() -> None:
    assert parse_flow("shard(1)", output=False) == Flow(arrives=shard(1))
    assert parse_flow("shard(1)", output=True) == Flow(wanted=shard(1))


@pytest.mark.parametrize("text", ["shard(0)", "shard( 0 )", " shard(0) "])
def test_blanks_mean_nothing(text: str) -> None:
    assert parse_placement(text) == shard(0)


@pytest.mark.parametrize(
    "text",
    [
        "shard",
        "shard()",
        "shard(a)",
        "shard(1.0)",
        "shard(100)",
        "shard (1)",
        "Shard(0)",
        "shard(0",
        "1",
        "a b",
        "a.b",
        "shard(²)",
        "-a",
    ],
)
def test_what_is_no_placement_is_refused_in_its_columns(text: str) -> None:
    for flow, start in (
        (text, 0),
        (f"  {text} ", 2),
        (f"replicate ->  {text}", 14),
        (f"{text} -> replicate", 0),
    ):
        with pytest.raises(PlacementError) as caught:
            parse_flow(flow, output=False)
        assert flow[caught.value.start : caught.value.end] == text
        assert repr(text) in str(caught.value)
        assert start == caught.value.start


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("", 0, 1),
        ("  ", 0, 2),
        ("->", 0, 1),
        ("a->", 3, 4),
        ("->a", 0, 1),
        ("a -> ", 4, 5),
        ("a -> b -> c", 7, 9),
    ],
)
def test_what_is_missing_or_too_much_is_refused_where_it_should_stand(
    text: str, start: int, end: int
) -> None:
    with pytest.raises(PlacementError) as caught:
        parse_flow(text, output=False)
    assert (caught.value.start, caught.value.end) == (start, end)
    for twin in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert (str(twin), twin.start, twin.end) == (str(caught.value), start, end)


def test_a_layout_is_called_by_a_word_that_is_no_placement() -> None:
    assert all(is_layout_name(name) for name in ("stream", "last-dim", "_x", "Shard", "sharded", "a1"))
    assert not any(
        is_layout_name(name) for name in (*RESERVED, "", "1a", "a b", "a.b", "-a", "é", "shard(0)")
    )


def test_torch_says_the_same() -> None:
    pairs = [(REPLICATE, Replicate()), (PARTIAL, Partial()), (shard(0), Shard(0)), (shard(-1), Shard(-1))]
    for ours, theirs in pairs:
        assert to_torch(ours) == theirs
        assert from_torch(theirs) == ours
    with pytest.raises(ValueError, match="stream"):
        to_torch(layout("stream"))
