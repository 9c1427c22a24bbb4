"""A checkpoint goes on under any plan, to the bit, and not at all when it is damaged or of something else."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.checkpoint import manifest
from parallelizer.runtime.checkpoint.loading import (
    load_checkpoint,
    newest_checkpoint,
    open_checkpoint,
    same_mesh,
)
from parallelizer.runtime.checkpoint.saving import save_checkpoint
from tests.ranks import run_ranks
from tests.runtime.checkpoint.models import (
    Alone,
    adamw,
    bare,
    counting,
    gathered_state,
    momentum,
    muon,
    on_meta,
    parallel,
    step_alone,
    train,
)

MESHES: dict[str, dict[str, int]] = {
    "tp": {"tp": 4}, "fsdp x tp": {"dp_shard": 2, "tp": 2}, "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "replicas": {"dp_replicate": 4}, "replicas x tp": {"dp_replicate": 2, "tp": 2}, "fsdp": {"dp_shard": 4},
}  # fmt: skip
DAILY = ("tp", "fsdp x tp", "hsdp")
Found = dict[str, Any]


def resharded(folder: Path, meshes: tuple[str, ...], make: Any) -> Found:
    """Two steps and a checkpoint without a mesh and on each one, and what every other mesh makes of it: names of the
    tensors that differ, and the next loss.
    """
    torch.manual_seed(0)
    alone = parallel({})
    optimizer = make(alone)
    train(alone, optimizer, range(2))
    save_checkpoint(folder / "alone", 2, alone, optimizer, {"samples": 8})
    states = {"alone": gathered_state(alone, optimizer)}
    losses = {"alone": train(alone, optimizer, [2])[0]}

    def worker() -> tuple[Found, Found, Found]:
        own, after = dict(states), dict(losses)
        for name in meshes:
            model = parallel(MESHES[name])
            optimizer = make(model)
            train(model, optimizer, range(2))
            save_checkpoint(folder / name, 2, model, optimizer, {"samples": 8})
            own[name], after[name] = gathered_state(model, optimizer), train(model, optimizer, [2])[0]
        differ, apart = {}, {}
        for target in meshes:
            for source in own:
                model = parallel(MESHES[target], seed=9)
                optimizer = make(model)
                opened = load_checkpoint(folder / source / "step_2", model, optimizer)
                assert opened.step == 2 and opened.state == {"samples": 8}
                assert same_mesh(opened, model) == (source == target)
                there = gathered_state(model, optimizer)
                pair = f"{source} -> {target}"
                differ[pair] = [n for n in {**there, **own[source]} if there.get(n) != own[source].get(n)]
                apart[pair] = abs(train(model, optimizer, [2])[0] - after[source])
        return own, differ, apart

    own, differ, apart = run_ranks(worker, 4)[0]
    back = {}
    for source in own:  # and home again, without a process group
        model = parallel({}, seed=9)
        optimizer = make(model)
        load_checkpoint(folder / source / "step_2", model, optimizer)
        back[source] = [
            n for n, tensor in gathered_state(model, optimizer).items() if tensor != own[source].get(n)
        ]
    return {"differ": differ | back, "apart": apart, "names": list(own["alone"])}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Found]]:
    folder = tmp_path_factory.mktemp("resharded")
    yield folder, resharded(folder, DAILY, adamw)


@pytest.mark.ranks
def test_every_mesh_reads_what_every_other_wrote_to_the_bit(done: tuple[Path, Found]) -> None:
    _, found = done
    assert len(found["differ"]) == len(DAILY) * (len(DAILY) + 1) + len(DAILY) + 1
    assert not {pair: names for pair, names in found["differ"].items() if names}
    assert max(found["apart"].values()) < 1e-5  # of a loss of 10, in float32


@pytest.mark.ranks
def test_shared_frozen_packed_and_saved_tensors_are_among_them(done: tuple[Path, Found]) -> None:
    names = done[1]["names"]
    for name in ("fused.qkv.weight", "grouped.k.weight", "frozen.weight", "extra.kept", "after.weight"):
        assert f"model.{name}" in names
    assert "optimizer.fused.qkv.weight.exp_avg" in names and "optimizer.before.weight.step" in names
    assert "model.extra.derived" not in names and "optimizer.frozen.weight.exp_avg" not in names


@pytest.mark.ranks
def test_all_meshes_have_one_file_layout_of_whole_tensors_under_the_models_names(
    done: tuple[Path, Found],
) -> None:
    folder, _ = done
    shapes = {
        name: {
            n: tuple(t.size)
            for n, t in open_checkpoint(folder / name / "step_2").metadata.state_dict_metadata.items()
            if not n.startswith("random.")
        }
        for name in ("alone", *DAILY)
    }
    assert all(own == shapes["alone"] for own in shapes.values())
    plain = {f"model.{n}": tuple(p.shape) for n, p in on_meta().named_parameters()}
    assert plain.items() <= shapes["alone"].items()
    assert "model.after.weight" not in shapes["alone"]  # a shared one stands there once


@pytest.mark.ranks
def test_torchs_own_tool_makes_one_file_of_it(done: tuple[Path, Found], tmp_path: Path) -> None:
    folder, _ = done
    out = tmp_path / "out.pt"
    tool = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    subprocess.run([*tool, str(folder / "fsdp x tp" / "step_2"), str(out)], check=True, capture_output=True)
    whole = torch.load(out, weights_only=True)
    model = parallel({}, seed=9)
    optimizer = adamw(model)
    load_checkpoint(folder / "fsdp x tp" / "step_2", model, optimizer)
    own = {n: t for n, t in model.state_dict().items() if n not in ("after.weight", "extra.empty")}
    torch.testing.assert_close(whole["model"], own, rtol=0, atol=0)
    assert set(whole) == {"model", "optimizer", "random"}
    moments = {n: dict(optimizer.state[p]) for n, p in model.named_parameters() if p in optimizer.state}
    torch.testing.assert_close(whole["optimizer"], moments, rtol=0, atol=0)


@pytest.mark.ranks
@pytest.mark.parametrize("make, meshes", [
    (counting, ("fsdp x tp",)),
    pytest.param(bare, ("hsdp", "replicas x tp"), marks=pytest.mark.slow),
    pytest.param(momentum, ("fsdp", "replicas x tp"), marks=pytest.mark.slow),
    pytest.param(muon, ("tp", "fsdp x tp"), marks=pytest.mark.slow),
    pytest.param(adamw, tuple(MESHES), marks=pytest.mark.slow),
])  # fmt: skip
def test_any_optimizer_goes_on(tmp_path: Path, make: Any, meshes: tuple[str, ...]) -> None:
    found = resharded(tmp_path, meshes, make)
    assert not {pair: names for pair, names in found["differ"].items() if names}
    assert max(found["apart"].values()) < (1e-2 if make is muon else 1e-5)  # Muon iterates in bfloat16


# One process, no group.


def saved(folder: Path, *steps: int, model: torch.nn.Module | None = None) -> Path:
    """Checkpoints of `Alone` behind so many steps. The last one's folder."""
    torch.manual_seed(0)
    model = model or Alone()
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder
    for step in range(max(steps)):
        step_alone(model, optimizer)
        if step + 1 in steps:
            path = save_checkpoint(folder, step + 1, model, optimizer, {"of": step + 1})
    return path


def load(path: Path) -> None:
    model = Alone()
    load_checkpoint(path, model, torch.optim.AdamW(model.parameters()))


def test_damage_anywhere_is_found_before_a_number_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path, 2)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    assert set(files) == {".metadata", "__0_0.distcp", "run.json", manifest.NAME}
    chance, model = random.Random(0), Alone()
    optimizer = torch.optim.AdamW(model.parameters())
    before = gathered_state(model, None)
    for number in range(60):
        name = chance.choice(sorted(files))
        content = bytearray(files[name])
        kind = ("flip", "cut", "gone")[number % 3]
        if kind == "flip":
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (path / name).write_bytes(content[: chance.randrange(len(content))] if kind == "cut" else content)
        if kind == "gone":
            (path / name).unlink()
        with pytest.raises(PlanError) as error:
            load_checkpoint(path, model, optimizer)
        assert {d.code for d in error.value.diagnostics} == {"checkpoint-damaged"}, (name, kind)
        (path / name).write_bytes(files[name])
    assert gathered_state(model, None) == before and not optimizer.state
    assert load_checkpoint(path, model, optimizer).step == 2


def test_the_newest_whole_one_is_found_and_those_passed_over_are_named(tmp_path: Path) -> None:
    last = saved(tmp_path, 1, 2, 3)
    assert newest_checkpoint(tmp_path / "nowhere") == (None, [])
    opened, passed = newest_checkpoint(tmp_path)
    assert opened is not None and opened.step == 3 and opened.state == {"of": 3} and not passed
    data = last / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "step_2" / manifest.NAME).unlink()
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_9.tmp")
    (tmp_path / "step_4").mkdir()  # empty
    opened, passed = newest_checkpoint(tmp_path)
    assert opened is not None and opened.step == 1
    assert [d.code for d in passed] == ["checkpoint-not-found", "checkpoint-damaged", "checkpoint-damaged"]
    assert {d.severity for d in passed} == {"warning"} and {d.help for d in passed} == {"it is passed over"}
    shutil.rmtree(tmp_path / "step_1")
    assert newest_checkpoint(tmp_path)[0] is None


def test_what_is_no_checkpoint_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, said in ((tmp_path / "none", "there is no checkpoint"), (tmp_path, "this folder is no checkpoint"),
                       (tmp_path / "file", "this file is no checkpoint")):  # fmt: skip
        with pytest.raises(PlanError, match="checkpoint-not-found") as error:
            open_checkpoint(path)
        assert error.value.diagnostics[0].message == said


def test_weights_alone_are_loaded_without_an_optimizer(tmp_path: Path) -> None:
    model = Alone()
    opened = load_checkpoint(saved(tmp_path, 2), model)
    assert opened.step == 2 and opened.mesh == {}


def test_random_states_go_on(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    expected = torch.rand(3)
    load(path)
    assert torch.equal(torch.rand(3), expected)
