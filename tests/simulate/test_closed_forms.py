"""The ledger against closed forms, on any mesh and at any world size."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallelizer.report.rows.collectives import collective_rows
from parallelizer.simulate.record.ledger import Collective
from tests.simulate.closed_forms import HEAD, KV_HEADS, VOCABULARY, WIDTH, Case, Sums, expected
from tests.simulate.setups import setup_of, traced


def ledger(case: Case, rank: int = 0, *, fold: bool = False) -> tuple[Collective, ...]:
    return traced(setup_of(*case.overrides()), rank, fold=fold).ledger


def sums(entries: tuple[Collective, ...]) -> Sums:
    return {
        (row.phase, row.axis, row.kind): (row.count, row.payload_bytes, row.wire_bytes)
        for row in collective_rows(entries)
    }


def of(entries: tuple[Collective, ...], **facts: object) -> list[Collective]:
    """The entries that are so."""
    return [e for e in entries if all(getattr(e, name) == value for name, value in facts.items())]


@pytest.mark.parametrize(("layers", "tp", "checkpoint"), [(3, 2, False), (2, 4, True)])
def test_tensor_and_sequence_parallelism(layers: int, tp: int, checkpoint: bool) -> None:
    case = Case(layers=layers, tp=tp, checkpoint=checkpoint)
    entries = ledger(case)
    gathers, scatters = of(entries, kind="all_gather"), of(entries, kind="reduce_scatter")
    if checkpoint:
        # Recomputation gathers twice more in a layer, and sums once more: it stops before the sum at the
        # layer's end, which nothing in backward needs.
        assert (len(gathers), len(scatters)) == (6 * layers + 2, 5 * layers + 2)
    else:
        assert (len(gathers), len(scatters)) == (4 * layers + 2, 4 * layers + 2)
    stream = case.rows * case.tokens * WIDTH * 4
    # All carry B x S x d; logits stay sharded, and the loss sends three numbers for each token.
    assert {e.payload_bytes for e in (*gathers, *scatters)} == {stream}
    loss = of(entries, kind="all_reduce", phase="loss")
    assert [e.payload_bytes for e in loss] == [case.rows * case.tokens * 4 * n for n in (1, 2)]
    for layer in range(layers):
        inside = [e for e in entries if e.module.startswith(f"layers.{layer}.") and e.phase != "clip"]
        assert len(of(tuple(inside), kind="all_gather", payload_bytes=stream)) == (6 if checkpoint else 4)
        assert len(of(tuple(inside), kind="reduce_scatter", payload_bytes=stream)) == (5 if checkpoint else 4)
        assert len(inside) == (11 if checkpoint else 8)
    norms, last = of(
        entries, kind="all_reduce", phase="clip"
    )  # the gradients of all norms, and the gradient norm
    assert (norms.payload_bytes, last.payload_bytes) == ((2 * layers + 1) * WIDTH * 4, 4)
    assert len(entries) == len(gathers) + len(scatters) + len(loss) + 2 and last == entries[-1]


def bytes_of(case: Case) -> tuple[int, int]:
    """The float32 bytes of one layer and of all other parameters, from the model itself."""
    model = setup_of(*case.overrides()).build_model()
    sizes = {name: 4 * p.numel() for name, p in model.named_parameters()}
    layer = sum(n for name, n in sizes.items() if name.startswith("layers.0."))
    return layer, sum(sizes.values()) - case.layers * layer


def test_fsdp_and_hsdp() -> None:
    case = Case(layers=3, shard=4)
    layers, (layer, others) = case.layers, bytes_of(case)
    table = 4 * VOCABULARY * WIDTH
    sharded = ledger(case)
    gathers, scatters = of(sharded, kind="all_gather"), of(sharded, kind="reduce_scatter")
    # The embedding, the output and the last norm are a unit each; backward gathers the embedding again.
    assert len(gathers) == 2 * layers + 4 and len(scatters) == layers + 3
    assert sum(e.payload_bytes for e in gathers) == others + table + 2 * layers * layer
    assert sum(e.payload_bytes for e in scatters) == others + layers * layer
    assert len(sharded) == len(gathers) + len(scatters) + 2  # the loss, the gradient norm

    hybrid = ledger(dataclasses.replace(case, replicate=3))
    assert tuple(e for e in hybrid if e.axis != "dp_replicate") == sharded
    more = of(hybrid, axis="dp_replicate", phase="backward")
    assert len(more) == layers + 3 == len(of(tuple(more), kind="all_reduce", ranks=3))
    assert sum(e.payload_bytes for e in more) == (others + layers * layer) // 4
    assert len(hybrid) == len(sharded) + len(more) + 1  # and the loss over dp_replicate


@pytest.mark.parametrize("keep_gathered", [False, True])
def test_context_parallelism(keep_gathered: bool) -> None:
    case = Case(layers=2, cp=3, keep_gathered=keep_gathered)
    attention = tuple(e for e in ledger(case) if e.module.endswith(".attention.inner"))
    whole = 2 * case.rows * KV_HEADS * case.tokens * HEAD * 4  # keys and values of the whole sequence
    assert {(e.payload_bytes, e.wire_bytes, e.ranks, e.axis) for e in attention} == {
        (whole, whole * 2 // 3, 3, "cp")
    }
    kinds = [(e.phase, e.kind, e.module.split(".")[1]) for e in attention]
    forward = [("forward", "all_gather", layer) for layer in "01"]
    again = [] if keep_gathered else ["all_gather"]
    assert kinds == forward + [("backward", kind, layer) for layer in "10" for kind in (*again, "all_to_all")]


def test_rows_that_do_not_divide_are_filled_up() -> None:
    # 64 rows of a weight over 48 ranks are two to a rank and 96 in all; of the closed form's P, FSDP sends more.
    case = Case(layers=1, shard=48)
    layer, others = bytes_of(case)
    sent = sum(e.payload_bytes for e in of(ledger(case), kind="all_gather"))
    assert (
        sent
        == expected(case)["forward", "dp_shard", "all_gather"][1]
        + expected(case)["backward", "dp_shard", "all_gather"][1]
    )
    assert sent > others + 4 * VOCABULARY * WIDTH + 2 * layer


cases = st.builds(
    Case,
    layers=st.integers(1, 6),
    replicate=st.sampled_from([1, 1, 2, 3, 64]),
    shard=st.sampled_from([1, 1, 2, 3, 8, 100, 1024]),
    cp=st.sampled_from([1, 1, 2, 3, 4]),
    tp=st.sampled_from([1, 1, 2, 4, 8]),
    rows=st.integers(1, 3),
    chunk=st.integers(1, 3),
    accumulate=st.sampled_from([1, 1, 1, 2]),
    checkpoint=st.booleans(),
    sequence_parallel=st.booleans(),
    bfloat16=st.booleans(),
    keep_gathered=st.booleans(),
    reshard=st.sampled_from([True, True, False]),
)
where = st.floats(0, 1)  # the rank, as a share of the world


def check(case: Case, where: float, *, fold: bool = False) -> None:
    rank = min(int(where * case.world), case.world - 1)
    assert sums(ledger(case, rank, fold=fold)) == expected(case, rank)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)  # others in each run of `make test-all`
@given(cases, where)
@example(Case(layers=1, replicate=2, shard=2, cp=2, tp=2, accumulate=2, checkpoint=True, bfloat16=True), 0.9)
@example(Case(layers=1, shard=3, tp=4, rows=1, chunk=1), 0.0)  # 64 rows over 3 ranks
def test_every_sum_on_any_mesh(case: Case, where: float) -> None:
    check(case, where)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(layers=126, shard=1024, cp=2, tp=8, checkpoint=True, bfloat16=True),
        Case(layers=12, replicate=4, shard=1024, cp=2, tp=8),
    ],
)
def test_every_sum_of_many_layers_on_very_many_ranks(case: Case) -> None:
    check(case, 0.7, fold=True)
