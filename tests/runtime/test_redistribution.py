"""Redistributions over several axes: what a path sends, that the cheaper one moves the same values, and that
the choice ends with its context.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as torch_planner

import parallelizer as pz
from parallelizer.child.children import in_children
from parallelizer.configuration.setup import Setup
from parallelizer.runtime.redistribution import Hop, Move, redistribute, sent, watched
from parallelizer.runtime.state import state_of
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.simulate.record.trace import trace
from tests.chosen import SHARE, a_fifth
from tests.ranks import run_ranks
from tests.simulate.real_ledger import real_ledgers
from tests.simulate.setups import llama

PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial())
TWO_AXES = (
    "layers.*.feed_forward.w2: {style: shard-params, params: {weight: {tp_outer: shard(0), tp: shard(1)}}, "
    "input: shard(-1) -> shard(-1), output: shard(1)}"
)


def on_two_axes(mode: str) -> Setup:
    return llama(
        "parallel=tp2", "parallel.mesh.tp_outer=2", f'rules=["{TWO_AXES}"]', f"parallel.redistribute={mode}"
    )


def moves() -> Iterator[tuple[Any, Any]]:
    """Every pair of placements on two axes that a DTensor can be moved between; none can into partial sums."""
    whole = [p for p in PLACEMENTS if not p.is_partial()]
    yield from itertools.product(itertools.product(PLACEMENTS, repeat=2), itertools.product(whole, repeat=2))


def example(whole: torch.Tensor, mesh: Any, placements: Any) -> DTensor:
    """A DTensor of `whole` whose partial sums differ by rank, in whole numbers."""
    local, weight = whole, 1
    for index, placement in enumerate(placements):
        where = mesh.get_local_rank(index)
        if placement.is_partial():
            weight *= (3, -2)[where]
        elif placement.is_shard():
            local = (*local.chunk(2, placement.dim), local.narrow(placement.dim, 0, 0))[where]
    return DTensor.from_local(
        local.contiguous() * weight,
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@pytest.mark.ranks
@pytest.mark.parametrize("part", a_fifth(range(SHARE)))
def test_both_ways_move_the_same_values_and_the_cheaper_sends_less(part: int) -> None:
    """Over 2 x 2 real ranks, of a tensor that two does not divide, forward and backward."""

    def worker() -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_outer", "tp"))
        every = list(moves())
        some = random.Random(0).sample(every, len(every))[part::SHARE]
        whole = torch.arange(35.0).view(5, 7) - 11
        number = cheaper = 0
        for before, after in some:
            found: list[Move] = []
            gradients = []
            for mode in ("greedy", "min-cost"):
                source = example(whole, mesh, before).requires_grad_()
                with redistribute(mode), watched(found.append):
                    moved = source.redistribute(placements=after)
                    (moved * moved.detach()).sum().backward()
                assert tuple(moved.placements) == after
                assert torch.equal(moved.to_local(), example(whole, mesh, after).to_local())
                gradients.append(source.grad)
            one, other = gradients
            assert isinstance(one, DTensor) and isinstance(other, DTensor)
            assert one.placements == other.placements and torch.equal(one.to_local(), other.to_local())
            known = [m for m in found if m.cheaper is not None]
            assert all(sent(m.cheaper) < sent(m.path) for m in known if m.cheaper)
            number += 1
            cheaper += bool(known)
        assert number == len(some)
        return number, cheaper

    [(number, cheaper)] = {*run_ranks(worker, 4)}
    assert number in (144 // SHARE, 144 // SHARE + 1) and cheaper > 3


def _planned(mode: str) -> list[Move]:
    enter_fake_world(8, 0)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp_outer", "tp"))
    found: list[Move] = []
    with redistribute(mode), watched(found.append):
        local = torch.zeros(8, 32)
        DTensor.from_local(local, mesh, (Shard(0), Partial()), run_check=False).redistribute(
            placements=(Replicate(), Replicate())
        )
        DTensor.from_local(local, mesh, (Partial(), Shard(0)), run_check=False).redistribute(
            placements=(Replicate(), Replicate())
        )
    return found


def test_a_path_is_told_with_what_each_hop_sends() -> None:
    """[16, 32] in float32 is summed over tp and gathered over tp_outer; then [32, 32] the other way."""
    (found,) = in_children([(_planned, "greedy")])
    first, second = found
    assert first.path == (Hop("all_reduce", "tp", 1024, 2 * 768), Hop("all_gather", "tp_outer", 2048, 1024))
    assert (first.before, first.after) == (
        "tp_outer=shard(0), tp=partial",
        "tp_outer=replicate, tp=replicate",
    )
    assert first.cheaper is None
    assert second.path == (Hop("all_gather", "tp", 4096, 3072), Hop("all_reduce", "tp_outer", 4096, 4096))
    assert second.cheaper == (Hop("all_reduce", "tp_outer", 1024, 1024), Hop("all_gather", "tp", 4096, 3072))
    (chosen,) = in_children([(_planned, "min-cost")])
    assert [m.path for m in chosen] == [first.path, second.cheaper]
    assert all(m.cheaper is None for m in chosen)


def test_the_choice_ends_with_its_context() -> None:
    both = (torch_planner._gen_transform_infos, torch_planner._gen_transform_infos_non_cached)
    with pytest.raises(KeyError), redistribute("min-cost"):
        assert torch_planner._gen_transform_infos is not both[0]
        with redistribute("greedy"):
            pass
        raise KeyError
    assert (torch_planner._gen_transform_infos, torch_planner._gen_transform_infos_non_cached) == both


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="greedy, min-cost"), redistribute("cheap"):
        pass


def test_the_run_and_the_dry_run_take_the_path_that_the_preset_says() -> None:
    """A model whose row-sharded embedding has no cheapest path goes on; ledgers are those of real ranks."""
    setups = [on_two_axes("greedy"), on_two_axes("min-cost")]
    real = real_ledgers(setups)
    sums = []
    for setup, by_rank in zip(setups, real, strict=True):
        model = setup.build_model()
        predicted = trace(setup.compile(model), model, setup.recipe())
        assert predicted.ledger == by_rank[0]
        sums.append(sum(e.wire_bytes for e in predicted.ledger))
        known = [m for m in predicted.moves if m.cheaper is not None]
        assert bool(known) == (setup.redistribute == "greedy")
        if known:
            saved = sum(sent(m.path) - sent(m.cheaper or ()) for m in known)
    assert sums[0] - sums[1] == saved > 0


def test_from_python() -> None:
    def parallel() -> str:
        setup = on_two_axes("greedy")
        enter_fake_world(4, 0)
        model = setup.build_model()
        mesh = pz.build_mesh(setup.mesh, "cpu")
        pz.parallelize(model, setup.plan, mesh, redistribute="min-cost")
        state = state_of(model)
        return state.program.redistribute if state else ""

    assert in_children([(parallel,)]) == ["min-cost"]
