"""DeviceMeshes made, described and adopted from others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import parallelizer as pz
from parallelizer.child.children import in_children
from parallelizer.language.plan import AXES, Mesh, folded_name
from parallelizer.mesh import (
    batch_rank,
    build_mesh,
    cut,
    cut_all,
    data_groups,
    describe,
    fsdp_mesh,
    rename_axes,
    submesh,
    with_shard_axis,
)
from parallelizer.runtime.state import state_of
from parallelizer.simulate.fake_world import enter_fake_world
from tests.chosen import SHARE, a_fifth
from tests.parity import Case, errors, keep_float64, plan, sharded, token_loss, unsharded
from tests.ranks import run_ranks
from tests.runtime.test_step import llama


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


@pytest.mark.ranks
def test_meshes_on_four_ranks() -> None:
    def worker() -> dict[str, Any]:
        found: dict[str, Any] = {}
        rank = dist.get_rank()
        for sizes in (
            {"tp": 4},
            {"dp_shard": 2, "tp": 2},
            {"cp": 4},
            {"dp_replicate": 2, "cp": 2},
            {"dp_shard": 2, "cp": 2},
            {"tp_outer": 2, "dp_replicate": 2},
        ):
            wanted = Mesh(sizes)
            mesh = build_mesh(wanted, "cpu")
            assert describe(mesh) == wanted
            # Neighbouring ranks differ in the innermost axis.
            coordinate = wanted.coordinate(rank)
            assert all(mesh.get_local_rank(a) == coordinate[a] for a in sizes)
            sharded_over = fsdp_mesh(mesh)
            assert sharded_over.size(-1 + sharded_over.ndim) == wanted.size("dp_shard", "cp")
            found[str(wanted)] = [ranks_of(g) for g in data_groups(mesh)], batch_rank(mesh)
            assert fsdp_mesh(mesh) == sharded_over  # made once
        for size in (3, 8):
            with pytest.raises(
                ValueError, match=f"the mesh has {size} ranks \\(tp={size}\\), the world has 4"
            ):
                build_mesh(Mesh({"tp": size}), "cpu")
        return found

    first, *_, last = run_ranks(worker, 4)
    assert first == {
        "tp=4": ([], (0, 1)),
        "dp_shard=2 x tp=2": ([[0, 2]], (0, 2)),
        "cp=4": ([[0, 1, 2, 3]], (0, 1)),
        "dp_replicate=2 x cp=2": ([[0, 2], [0, 1]], (0, 2)),
        "dp_shard=2 x cp=2": ([[0, 1, 2, 3]], (0, 2)),
        "dp_replicate=2 x tp_outer=2": ([[0, 2]], (0, 2)),
    }
    assert last["dp_shard=2 x cp=2"] == ([[0, 1, 2, 3]], (1, 2))
    assert last["dp_replicate=2 x cp=2"] == ([[1, 3], [2, 3]], (1, 2))


LLAMA = plan("extends: llama")
FOREIGN: list[tuple[str, tuple[int, ...], tuple[str, ...], dict[str, str], tuple[str, ...]]] = [
    ("other names", (2, 2), ("data", "model"), {"data": "dp_shard", "model": "tp"}, ()),
    ("another order", (2, 2), ("model", "data"), {"data": "dp_shard", "model": "tp"}, ()),
    ("our names in another order", (2, 2), ("tp", "cp"), {}, ()),
    ("one of the names", (2, 2), ("dp_replicate", "context"), {"context": "cp"}, ()),
    ("one axis", (4,), ("model",), {"model": "tp"}, ()),
    ("replicas only", (4,), ("ddp",), {"ddp": "dp_replicate"}, ()),
    (
        "axes of size 1",
        (1, 2, 1, 2),
        ("a", "b", "c", "d"),
        {"a": "pp", "b": "dp_shard", "c": "cp", "d": "tp"},
        (),
    ),
    ("folded axes", (2, 2), ("x", "y"), {"x": "dp_shard", "y": "cp"}, ()),
    ("part of a mesh", (2, 2), ("same", "model"), {"model": "tp"}, ("model",)),
    (
        "several axes of a mesh",
        (1, 2, 2),
        ("same", "data", "model"),
        {"data": "dp_replicate", "model": "tp"},
        ("data", "model"),
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize("part", a_fifth(range(SHARE)))
def test_a_foreign_mesh_trains_as_one_of_ours(part: int) -> None:
    foreign = FOREIGN[part::SHARE]
    case = Case("reference", LLAMA, {}, llama(n_layers=1))
    reference = unsharded(case)

    def worker() -> dict[str, float]:
        worst = {}
        for name, shape, names, axes, part in foreign:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            mesh = mesh[part] if part else mesh
            ours = rename_axes(mesh, axes)
            index, count = batch_rank(ours)
            expected = dataclasses.replace(reference, logits=reference.logits.chunk(count)[index])
            worst[name] = max(errors(sharded(case, ours), expected).values())
        return worst

    for found in run_ranks(worker, 4):
        assert {name: error for name, error in found.items() if error > 1e-11} == {}
        assert len(found) == len(foreign) >= len(FOREIGN) // SHARE >= 2


@pytest.mark.ranks
def test_parallelize_takes_a_foreign_mesh() -> None:
    case = Case("reference", LLAMA, {}, llama(n_layers=1))
    reference = unsharded(case)

    def worker() -> list[float]:
        import torch

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        with torch.device("meta"):
            model = case.model().double()
        model = pz.parallelize(model, "llama", mesh, axes={"data": "dp_shard", "model": "tp"})
        pz.materialize(model, device="cpu", seed=5)
        state = state_of(model)
        assert state is not None
        index, count = batch_rank(state.mesh)
        rows = {k: v.chunk(count)[index] for k, v in case.batch().items()}
        with keep_float64():
            done = pz.train_step(
                model, rows, token_loss, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            )
        return [done.loss.item(), done.grad_norm.item()]

    for loss, norm in run_ranks(worker, 4):
        assert loss == pytest.approx(reference.losses[0].item(), rel=1e-12)
        assert norm == pytest.approx(reference.norms[0].item(), rel=1e-12)


@pytest.mark.ranks
def test_renaming_keeps_groups_and_says_what_it_cannot_read() -> None:
    def worker() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
        ours = rename_axes(mesh, {"data": "dp_shard", "model": "tp"})
        assert describe(ours) == Mesh({"tp": 2})
        assert [g.group_name for g in ours.get_all_groups()] == [g.group_name for g in mesh.get_all_groups()]
        assert submesh(ours, ["tp"]).get_group().group_name == mesh.get_group("model").group_name
        assert rename_axes(ours) is ours
        assert with_shard_axis(ours) is ours

        # An axis of one rank that nobody knows parts nothing.
        assert describe(rename_axes(mesh, {"model": "tp"})) == Mesh({"tp": 2})
        assert rename_axes(mesh, {"model": "tp"}) is rename_axes(mesh, {"model": "tp"})

        wrong: list[tuple[DeviceMesh, dict[str, str], str]] = [
            (
                mesh,
                {},
                r"are \(data, model\), and plans know \(pp, .*perhaps axes={'data': 'dp_shard', 'model': 'tp'}",
            ),
            (mesh, {"data": "dp_shard"}, "perhaps axes="),
            (mesh, {"date": "dp_shard", "model": "tp"}, r"no axis 'date': it has \(data, model\)"),
            (mesh, {"data": "dpshard", "model": "tp"}, r"plans know no axis 'dpshard': they know \(pp, "),
            (mesh, {"data": "tp", "model": "tp"}, "one name: tp, tp"),
            (init_device_mesh("cpu", (2,)), {}, "has no axis names: make it with mesh_dim_names"),
            (init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), {}, "as in axes={'x': 'dp_shard'}"),
            (
                init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "data")),
                {},
                "as in axes={'dp': 'dp_shard'}",
            ),
        ]
        for device_mesh, axes, message in wrong:
            for wants_a_mesh in (
                rename_axes,
                lambda mesh, axes: pz.batch_rank(mesh, axes=axes),
                lambda mesh, axes: pz.shard_batch({}, LLAMA, mesh, axes=axes),
                lambda mesh, axes: pz.seed_ranks(mesh, 0, axes=axes),
                lambda mesh, axes: pz.parallelize(llama()(), LLAMA, mesh, axes=axes),
            ):
                with pytest.raises(ValueError, match=message):
                    wants_a_mesh(device_mesh, axes)
        turned = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "cp"))
        with pytest.raises(ValueError, match=r"say which is which \(in another order\)"):
            describe(turned)
        assert describe(rename_axes(turned)) == Mesh({"tp": 2}) and batch_rank(turned) == (0, 1)

    run_ranks(worker, 2)


def test_the_folded_axis_is_named_by_its_parts() -> None:
    assert folded_name(Mesh({"tp": 2})) == "dp_shard"
    assert folded_name(Mesh({"cp": 2})) == "cp"
    assert folded_name(Mesh({"cp": 2, "dp_shard": 2})) == "dp_shard+cp"
    assert set(folded_name(Mesh({"cp": 2, "dp_shard": 2})).split("+")) <= set(AXES)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_a_cut_is_torchs_chunk(size: int, ranks: int) -> None:
    whole = torch.arange(size)
    chunks = whole.chunk(ranks)
    for index in range(ranks):
        start, length = cut(size, ranks, index)
        expected = chunks[index] if index < len(chunks) else whole[:0]
        assert torch.equal(whole.narrow(0, start, length), expected)
        assert length or start == size


SHAPES = [(size, other) for size in range(14) for other in (3, 8)]


def torchs_cuts(rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What DTensor says of each of SHAPES over one axis and over two, as (local shape, offset)."""
    enter_fake_world(6, rank)
    one = init_device_mesh("cpu", (6,), mesh_dim_names=("tp",))
    two = init_device_mesh("cpu", (2, 3), mesh_dim_names=("tp_outer", "tp"))
    laid = [(one, (Shard(0),)), (two, (Shard(0), Shard(0))), (two, (Replicate(), Shard(1)))]
    found = []
    for mesh, placements in laid:
        for shape in SHAPES:
            theirs = compute_local_shape_and_global_offset(shape, mesh, placements)
            held = cut_all(shape, mesh, placements, mesh.get_coordinate() or [])
            ours = tuple(n for _, n in held), tuple(at for at, _ in held)
            # Where a shard is empty, nobody asks for its offset.
            assert ours[0] == theirs[0] and (ours[1] == theirs[1] or 0 in ours[0]), (
                shape,
                mesh,
                ours,
                theirs,
            )
            found.append(ours)
    return found


def test_cuts_are_dtensors_over_one_axis_and_over_two() -> None:
    ranks = in_children([(torchs_cuts, rank) for rank in range(6)])
    for at, shape in enumerate(SHAPES):
        assert sum(found[at][0][0] for found in ranks) == shape[0]


def test_the_data_axes_cut_last() -> None:
    """As FSDP does, though they stand before the tensor axes in the mesh."""
    rows = torch.arange(7)

    class Rank:
        mesh_dim_names = ("dp_shard", "tp")

        def size(self, dim: int) -> int:
            return (2, 3)[dim]

    mesh: Any = Rank()
    for shard, tp in ((d, t) for d in range(2) for t in range(3)):
        ((start, length),) = cut_all((7,), mesh, (Shard(0), Shard(0)), (shard, tp))
        of_tp = rows.chunk(3)[tp].chunk(2)
        assert rows[start : start + length].tolist() == (of_tp[shard].tolist() if shard < len(of_tp) else [])
