"""Groups of tp that do not fit into nodes are found, whatever the nodes, and the cost is what the arithmetic says."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.language.plan import Mesh
from parallelizer.simulate.checks.tp_crosses_nodes import nodes_of, tp_crosses_nodes
from parallelizer.simulate.record.ledger import Collective

H100 = {"devices_per_node": 8, "node_gb_per_s": 450, "network_gb_per_s": 50}


def entry(axis: str, sent: int) -> Collective:
    return Collective("forward", "all_reduce", axis, 2, sent, sent, "bfloat16", "layers.0", None, False)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_it_warns_exactly_when_a_group_has_ranks_on_two_nodes(nodes: list[int], data: st.DataObject) -> None:
    world = sum(nodes)
    tp = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    node_of = [node for node, count in enumerate(nodes) for _ in range(count)]
    torn = any(len({node_of[rank] for rank in range(g, g + tp)}) > 1 for g in range(0, world, tp))
    found = tp_crosses_nodes(Mesh({"dp_shard": world // tp, "tp": tp}), nodes, {})
    assert [d.code for d in found] == (["tp-crosses-nodes"] if torn else [])
    if torn:
        assert found[0].severity == "warning"
        fits = int(re.search(r"tp=(\d+) fits", found[0].help or "")[1])  # type: ignore[index]
        assert not tp_crosses_nodes(Mesh({"dp_shard": world // fits, "tp": fits}), nodes, {})


def test_what_it_costs() -> None:
    mesh = Mesh({"tp": 16})
    ledger = [entry("tp", 150 << 30), entry("dp_shard", 1 << 40), entry("tp", 100 << 30)]
    [found] = tp_crosses_nodes(mesh, (8, 8), H100, ledger)
    assert found.message == (
        "tp=16 crosses nodes of 8 devices: ranks 0 to 15 lie on 2 of them, where 400 GB/s (8 x 50) are between nodes "
        "and 450 inside one; 2 collectives a step send 250.0 GiB there, at least 75 ms a step longer"
    )
    # One of its ranks alone on a node: a single network device carries all.
    [found] = tp_crosses_nodes(Mesh({"dp_shard": 3, "tp": 3}), (8, 1), H100, ledger)
    assert (
        "ranks 6 to 8 lie on 2 of them, where 50 GB/s are between nodes and 450 inside one" in found.message
    )
    longer = (250 << 30) / 1e9 * (1 / 50 - 1 / 450)
    assert found.message.endswith(f"at least {longer:.1f} s a step longer")
    assert found.help is not None and found.help.startswith("parallel.mesh.tp=1 fits into a node")


def test_bandwidths_that_are_not_known_are_not_told() -> None:
    [found] = tp_crosses_nodes(Mesh({"tp": 4}), (2, 2), {}, [entry("tp", 1024)] * 2)
    assert found.message == (
        "tp=4 crosses nodes of 2 devices: ranks 0 to 3 lie on 2 of them; 2 collectives a step send 2.0 KiB there"
    )


@pytest.mark.parametrize(
    ("world", "hardware", "nodes"),
    [(16, H100, (8, 8)), (20, H100, (8, 8, 4)), (4, H100, (4,)), (16, {}, ()), (16, {"name": "auto"}, ())],
)
def test_nodes_are_filled(world: int, hardware: dict[str, int], nodes: tuple[int, ...]) -> None:
    assert nodes_of(Mesh({"dp_shard": world}), hardware) == nodes
