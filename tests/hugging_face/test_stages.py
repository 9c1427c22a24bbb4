"""Weights of a transformers model that is cut into stages: loaded and saved as one process does, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.hugging_face import causal_lm
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.runtime.step import forward
from tests.chosen import chosen
from tests.hugging_face.folders import PLANS, digests, values, write
from tests.parity import plan
from tests.ranks import run_ranks

WORKLOAD = Workload({"input_ids": Entry(("batch", "sequence"), "int64", (0, 96))}, 8, 8)
LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "pp2": ({"pp": 2}, "1f1b"), "zbv": ({"pp": 2}, "zbv"), "pp4": ({"pp": 4}, "1f1b"),
    "pp2_fsdp2": ({"pp": 2, "dp_shard": 2}, "1f1b"), "pp2_tp2": ({"pp": 2, "tp": 2}, "1f1b"),
}  # fmt: skip
FAMILIES = ("llama", "llama_tied", "gpt2", "phi3", "mixtral")
CASES = [(layout, family) for layout in LAYOUTS for family in FAMILIES]
DAILY = [("pp2", "llama_tied"), ("zbv", "llama_tied"), ("pp2_fsdp2", "gpt2"), ("pp2_tp2", "phi3")]


def folder_of(family: str, path: Path) -> Path:
    """Four layers, in several files."""
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return write(path, family, file_size="20KB", **{layers: 4})


def on_meta(folder: Path) -> nn.Module:
    with torch.device("meta"):
        return causal_lm(str(folder))


def cut(layout: str, family: str, folder: Path) -> nn.Module:
    """The model on meta, in stages."""
    sizes, schedule = LAYOUTS[layout]
    blocks = "transformer.h.*" if family == "gpt2" else "model.layers.*"
    text = f'version: 1\nrules:\n{PLANS[family].strip(chr(10))}\n  {blocks}: [fsdp, stage]\n  "": fsdp\n'
    model, mesh = on_meta(folder), pz.build_mesh(Mesh(sizes), "cpu")
    program = pz.compile(plan(text), model, mesh, workload=WORKLOAD, pipeline=Pipeline(schedule))
    return pz.apply(program, model, mesh)


@pytest.mark.ranks
@pytest.mark.parametrize("case", chosen(CASES, DAILY), ids="-".join)
def test_a_folder_goes_through_stages_and_comes_back_the_same(case: tuple[str, str], tmp_path: Path) -> None:
    layout, family = case
    folder = folder_of(family, tmp_path / "folder")
    wanted = {name: tensor.detach() for name, tensor in values(folder).items()}
    alone = pz.load_pretrained(on_meta(folder), folder, device="cpu").eval()
    batch = {"input_ids": torch.arange(16).view(2, 8)}
    with torch.no_grad():
        logits = forward(alone, batch)

    def worker() -> tuple[list[str], bool]:
        model = cut(layout, family, folder).eval()
        pz.load_pretrained(model, folder, device="cpu")
        found = pz.whole_state_dict(model)
        other = [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name])]
        # Buffers that no file has, such as rotary frequencies, show in what the model computes.
        close = "tp" in LAYOUTS[layout][0] or torch.allclose(forward(model, batch), logits, atol=1e-4)
        pz.save_pretrained(model, tmp_path / "saved")
        return other, close

    ranks = Mesh(LAYOUTS[layout][0]).world_size
    assert run_ranks(worker, ranks) == [([], True)] * ranks
    assert digests(tmp_path / "saved") == digests(folder)


@pytest.mark.ranks
@pytest.mark.parametrize("family", chosen(FAMILIES, ["llama_tied"]))
def test_a_model_that_came_from_no_folder_is_saved_as_one_process_saves_it(
    family: str, tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path / "folder")

    def saved(make: Callable[[], nn.Module], name: str) -> None:
        pz.save_pretrained(pz.materialize(make(), device="cpu", seed=3), tmp_path / name)

    saved(lambda: on_meta(folder), "alone")
    run_ranks(lambda: saved(lambda: cut("zbv", family, folder), "stages"), 2)
    assert digests(tmp_path / "stages") == digests(tmp_path / "alone")


@pytest.mark.ranks
def test_a_folder_that_lacks_a_tensor_of_one_stage_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", "llama", num_hidden_layers=3)
    deeper = write(tmp_path / "deeper", "llama", num_hidden_layers=4)

    def worker() -> str:
        model = cut("pp2", "llama", deeper)
        with pytest.raises(pz.PlanError) as caught:
            pz.load_pretrained(model, folder, device="cpu")
        return "; ".join(dict.fromkeys(one.message for one in caught.value.diagnostics))

    first, last = run_ranks(worker, 2)
    assert first == last and "has no values for model.layers.3." in first
