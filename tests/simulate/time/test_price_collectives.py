"""Collectives against the closed forms of rings, and how groups lie on nodes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.language.plan import Mesh
from parallelizer.simulate.time.constants import HOP_SECONDS, Constants
from parallelizer.simulate.time.price_collectives import Spread, collective_seconds, spread_of
from tests.simulate.time.lines import collective, machine

PLAIN = Constants(network=1.0)


@pytest.mark.parametrize(
    ("sizes", "axis", "spread"),
    [
        ({"dp_shard": 32, "tp": 8}, "tp", Spread(8, 8, 1)),
        ({"dp_shard": 32, "tp": 8}, "dp_shard", Spread(32, 1, 32)),  # tp takes the node
        ({"dp_shard": 64}, "dp_shard", Spread(64, 8, 8)),
        ({"dp_shard": 16, "tp": 2}, "dp_shard", Spread(16, 4, 4)),
        ({"dp_replicate": 2, "dp_shard": 8}, "dp_replicate", Spread(2, 1, 2)),
        ({"dp_shard": 4, "cp": 4, "tp": 2}, "dp_shard+cp", Spread(16, 4, 4)),
        ({"tp": 16}, "tp", Spread(16, 8, 2)),
        ({"dp_shard": 4, "tp": 2}, "world", Spread(8, 8, 1)),
    ],
)
def test_groups_lie_on_nodes_that_are_filled_rank_after_rank(
    sizes: dict[str, int], axis: str, spread: Spread
) -> None:
    assert spread_of(axis, Mesh(sizes), 8) == spread


def test_a_ring_between_nodes_takes_the_closed_form() -> None:
    """(W - 1)/W of the bytes over the adapters that the group has on a node, twice that for an all-reduce."""
    mesh = Mesh({"dp_shard": 32, "tp": 8})
    hops = 32 * HOP_SECONDS
    one = collective("all_gather", 1 << 30, ranks=32)
    assert collective_seconds(one, mesh, machine(), PLAIN) == pytest.approx(
        (1 << 30) * 31 / 32 / 10e9 + hops, rel=1e-6
    )
    both = collective("all_reduce", 1 << 30, ranks=32)
    assert collective_seconds(both, mesh, machine(), PLAIN) == pytest.approx(
        2 * ((1 << 30) * 31 / 32 / 10e9 + hops), rel=1e-6
    )


def test_a_group_that_holds_the_node_uses_all_its_adapters_up_to_the_rate_inside() -> None:
    mesh, entry = Mesh({"dp_shard": 64}), collective("all_gather", 1 << 30, ranks=64)
    hops = 8 * HOP_SECONDS
    eight = collective_seconds(entry, mesh, machine(), PLAIN) - hops
    assert eight == pytest.approx(entry.wire_bytes / 80e9)
    fast = collective_seconds(entry, mesh, machine(network=50e9), PLAIN) - hops
    assert fast == pytest.approx(entry.wire_bytes / 100e9)


@given(st.integers(1, 1 << 34), st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]),
       st.sampled_from([{"dp_shard": 8}, {"dp_shard": 64}, {"dp_shard": 16, "tp": 8}]))  # fmt: skip
def test_more_bandwidth_is_never_slower(payload: int, kind: str, sizes: dict[str, int]) -> None:
    mesh, entry = Mesh(sizes), collective(kind, payload, ranks=sizes["dp_shard"])
    slow = machine()
    for key in ("node", "network"):
        fast = dataclasses.replace(slow, **{key: 2 * getattr(slow, key)})
        assert collective_seconds(entry, mesh, fast, PLAIN) <= collective_seconds(entry, mesh, slow, PLAIN)
