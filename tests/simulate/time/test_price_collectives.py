"""Collectives against the closed forms of rings, and how groups lie on nodes."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from parallelizer.language.plan import Mesh
from parallelizer.simulate.time.constants import HOP_SECONDS, Constants
from parallelizer.simulate.time.machine import machine_of
from parallelizer.simulate.time.price_collectives import Spread, collective_seconds, spread_of
from tests.simulate.time.lines import collective, machine

PLAIN = Constants(network=1.0)
HARDWARE = Path(__file__).resolve().parents[3] / "parallelizer" / "configs" / "hardware"


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


@pytest.mark.parametrize(
    ("sizes", "per_node", "axis", "spread"),
    [
        # Ranks 2 and 3 of tp lie on two nodes, and all wait for them.
        ({"dp_shard": 2, "tp": 2}, 3, "tp", Spread(2, 1, 2)),
        ({"dp_shard": 3, "tp": 4}, 6, "tp", Spread(4, 2, 2)),
        ({"dp_shard": 32, "tp": 8}, 72, "dp_shard", Spread(32, 8, 4)),
    ],
)
def test_of_groups_that_lie_differently_the_one_on_most_nodes_counts(
    sizes: dict[str, int], per_node: int, axis: str, spread: Spread
) -> None:
    assert spread_of(axis, Mesh(sizes), per_node) == spread


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=3, max_size=3),
    st.sampled_from(["dp_shard", "cp", "tp", "dp_shard+cp"]),
    st.sampled_from([1, 3, 4, 8, 72]),
)
def test_no_group_lies_on_more_nodes(sizes: list[int], axis: str, per_node: int) -> None:
    """Against every group, counted rank by rank."""
    mesh = Mesh(dict(zip(("dp_shard", "cp", "tp"), sizes, strict=True)))
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank, place in enumerate(itertools.product(*map(range, sizes))):
        rest = tuple(
            at
            for name, at in zip(("dp_shard", "cp", "tp"), place, strict=True)
            if name not in axis.split("+")
        )
        groups.setdefault(rest, set()).add(rank // per_node)
    assert spread_of(axis, mesh, per_node).nodes == max(map(len, groups.values()))


def test_links_of_half_the_bandwidth_take_as_long_as_the_measured_ones_for_twice_the_bytes() -> None:
    h100 = {**OmegaConf.load(HARDWARE / "h100.yaml")}
    mesh, plain = Mesh({"tp": 8}), machine_of(h100)
    slow = machine_of({**h100, "node_gb_per_s": 225})
    assert plain is not None and slow is not None
    for size in (1 << 12, 1 << 20, 1 << 30):
        once, twice = collective("all_reduce", size, ranks=8), collective("all_reduce", 2 * size, ranks=8)
        took = collective_seconds(dataclasses.replace(once, axis="tp"), mesh, slow, PLAIN)
        assert took == pytest.approx(
            collective_seconds(dataclasses.replace(twice, axis="tp"), mesh, plain, PLAIN)
        )


def test_hardware_without_a_table_has_the_links_that_it_names() -> None:
    own = {"bf16_tflops": 989, "memory_gb_per_s": 3350, "network_gb_per_s": 50, "devices_per_node": 8}
    mesh, entry = Mesh({"tp": 8}), dataclasses.replace(collective("all_gather", 1 << 30, ranks=8), axis="tp")
    fast, slow = machine_of({**own, "node_gb_per_s": 450}), machine_of({**own, "node_gb_per_s": 20})
    assert fast is not None and slow is not None
    once, twice = (collective_seconds(entry, mesh, each, PLAIN) for each in (fast, slow))
    assert twice / once == pytest.approx(450 / 20, rel=0.05)
