"""Weights of a folder arrive in every rank's slice as from_pretrained loads them, and go back to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.hugging_face.saving import save_pretrained
from parallelizer.hugging_face.weights import load_pretrained
from parallelizer.initialize import local_slice
from parallelizer.plan import Mesh
from parallelizer.state import state_of
from parallelizer.tied_parameters import tied_names
from tests.hugging_face.folders import (
    CONFIGS,
    digests,
    named,
    on_meta,
    plan_text,
    transformers,
    values,
    write,
)
from tests.parity import plan
from tests.ranks import run_ranks

MESHES = {
    1: [{}],
    2: [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}],
    4: [
        {"dp_shard": 4},
        {"dp_shard": 2, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_replicate": 2, "tp": 2},
    ],
}
"""Sizes of meshes by number of ranks."""


def parallel_model(name: str, folder: Path, sizes: dict[str, int]) -> torch.nn.Module:
    """A tiny model on meta, made parallel, as a person's own loop makes it."""
    model = on_meta(transformers.AutoConfig.from_pretrained(folder))
    mesh = pz.build_mesh(Mesh(sizes), "cpu")
    return pz.apply(pz.compile(plan(plan_text(name)), model, mesh), model, mesh)


def differing(model: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names whose local values are not this rank's slice of what is wanted, to the bit."""
    packed, found = state_of(model).packed, []  # type: ignore[union-attr]
    tensors = named(model)
    assert tensors.keys() == wanted.keys()
    for key, tensor in tensors.items():
        full = packed[key].pack(wanted[key]) if key in packed else wanted[key]
        local = tensor
        if isinstance(tensor, DTensor):
            full, local = local_slice(full, tensor.device_mesh, tensor.placements), tensor.to_local()
        if not (torch.equal(local, full) and local.dtype == full.dtype):
            found.append(key)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", MESHES)
def test_a_folder_goes_through_every_mesh_and_comes_back_the_same(ranks: int, tmp_path: Path) -> None:
    folders, wanted = {}, {}
    for i, name in enumerate(CONFIGS):
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        folders[name] = write(tmp_path / name, name, dtype=dtype, file_size=("5GB", "20KB")[i // 2 % 2])
        wanted[name] = {k: v.detach() for k, v in values(folders[name]).items()}

    def worker() -> list[str]:
        wrong = []
        for name, folder in folders.items():
            for i, sizes in enumerate(MESHES[ranks]):
                model = parallel_model(name, folder, sizes)
                tied = tied_names(model)
                assert load_pretrained(model, folder, device="cpu") is model
                wrong += [f"{name} {sizes}: {key}" for key in differing(model, wanted[name])]
                assert tied_names(model) == tied
                save_pretrained(model, tmp_path / f"{name}-{i}")
        return wrong

    assert run_ranks(worker, ranks) == [[]] * ranks
    for name, folder in folders.items():
        for i in range(len(MESHES[ranks])):
            assert digests(tmp_path / f"{name}-{i}") == digests(folder), name
        again = values(tmp_path / f"{name}-0")
        assert [key for key, value in wanted[name].items() if not torch.equal(again[key], value)] == []
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
