"""Checkpoints of models that are cut into stages: each layout goes on from others, and others from it, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.checkpoint.loading import load_checkpoint, open_checkpoint
from parallelizer.runtime.checkpoint.saving import save_checkpoint
from tests.chosen import chosen
from tests.parity import token_loss
from tests.ranks import run_ranks
from tests.runtime.checkpoint.models import Counting, gathered_state
from tests.runtime.pipeline.models import (
    ALONE,
    PP2,
    PP2_FSDP2,
    PP2_TP2,
    PP4,
    TP2,
    ZBV,
    Layout,
    Staged,
    adamw,
    own_rows,
    parallel,
    tied,
    train,
)

LAYOUTS = {
    "alone": ALONE, "pp2": PP2, "zbv": ZBV, "tp2": TP2, "pp4": PP4, "pp2_fsdp2": PP2_FSDP2, "pp2_tp2": PP2_TP2,
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {"plain": Staged, "tied": tied}
CHOSEN = [
    ("tp2", "pp2", "plain"), ("pp2", "pp4", "plain"), ("zbv", "pp2_fsdp2", "tied"), ("pp2", "alone", "tied"),
]  # fmt: skip
NAMES = list(LAYOUTS)
TURNS = [
    (source, NAMES[(place + far) % len(NAMES)], model)
    for far, model in ((1, "plain"), (3, "tied"))
    for place, source in enumerate(NAMES)
]
"""Each layout is loaded by another and loads another, with both models; tests/survival has more presets."""


def on(layout: Layout, worker: Callable[[], Any]) -> Any:
    """What the first of the ranks of a layout returns; all return the same."""
    if not layout.sizes:
        return worker()
    every = run_ranks(worker, layout.ranks)
    assert all(one == every[0] for one in every)
    return every[0]


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return Counting(p for p in model.parameters() if p.requires_grad)


def saved(
    layout: Layout, build: Callable[[], nn.Module], folder: Path, make: Any = adamw
) -> tuple[Any, float]:
    """Two steps, an evaluation and a checkpoint. The hashes of the model's tensors, and the loss of the next step."""

    def worker() -> tuple[Any, float]:
        model = parallel(layout, build)
        optimizer = make(model)
        train(model, optimizer, range(2))
        pz.evaluate(model, [own_rows(model, 7)], token_loss)  # which may leave parameters gathered
        save_checkpoint(folder, 2, model, optimizer, {"samples": 8})
        return gathered_state(model, None), train(model, optimizer, [2])[0]

    found: tuple[Any, float] = on(layout, worker)
    return found


def loaded(
    layout: Layout, build: Callable[[], nn.Module], path: Path, again: Path, make: Any = adamw
) -> tuple[Any, float]:
    """The same of a model that was loaded, and saved `again`."""

    def worker() -> tuple[Any, float]:
        model = parallel(layout, build, seed=9)
        optimizer = make(model)
        load_checkpoint(path / "step_2", model, optimizer)
        save_checkpoint(again, 2, model, optimizer)
        return gathered_state(model, None), train(model, optimizer, [2])[0]

    found: tuple[Any, float] = on(layout, worker)
    return found


def of_one_process(path: Path, build: Callable[[], nn.Module], make: Any = adamw) -> dict[str, str]:
    """The hashes of all tensors of a checkpoint, the optimizer's too, as one process reads them."""
    model = parallel(ALONE, build, seed=5)
    optimizer = make(model)
    load_checkpoint(path / "step_2", model, optimizer)
    return gathered_state(model, optimizer)


@pytest.mark.ranks
@pytest.mark.parametrize("pair", chosen(dict.fromkeys([*CHOSEN, *TURNS]), CHOSEN), ids=" ".join)
def test_any_layout_goes_on_from_any_other(pair: tuple[str, str, str], tmp_path: Path) -> None:
    source, target, kind = pair
    build = MODELS[kind]
    before, next_loss = saved(LAYOUTS[source], build, tmp_path / "a")
    after, loss = loaded(LAYOUTS[target], build, tmp_path / "a", tmp_path / "b")
    assert after == before and len(before) > 30
    assert abs(loss - next_loss) < 1e-5  # of 3.5, in float32
    states = of_one_process(tmp_path / "a", build)
    assert states == of_one_process(tmp_path / "b", build)
    assert {"optimizer.before.weight.exp_avg", "optimizer.scale.step"} <= set(states)
    assert {name: text for name, text in states.items() if name.startswith("model.")} == before


@pytest.mark.ranks
def test_what_an_optimizer_keeps_beside_tensors_is_gathered_from_all_stages(tmp_path: Path) -> None:
    before, next_loss = saved(PP2, tied, tmp_path / "a", counting)
    about = open_checkpoint(tmp_path / "a" / "step_2").about["optimizer"]
    trained = [n for n, p in Staged(tied=True).named_parameters() if p.requires_grad]
    idle = {"spare.weight", "spare.bias", "idle"}  # no forward reads them, so they have no gradient
    assert set(about["values"]) == set(trained) - idle and set(about["without_state"]) == idle
    after, loss = loaded(ZBV, tied, tmp_path / "a", tmp_path / "b", counting)
    assert after == before and abs(loss - next_loss) < 1e-5
    assert of_one_process(tmp_path / "a", tied, counting) == of_one_process(tmp_path / "b", tied, counting)


class Shallow(Staged):
    """With one layer less."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[3]


@pytest.mark.ranks
def test_a_checkpoint_of_another_model_is_refused_on_all_ranks_by_the_whole_models_names(
    tmp_path: Path,
) -> None:
    saved(ALONE, Staged, tmp_path)

    def worker() -> str:
        model = parallel(PP2, Shallow)
        with pytest.raises(PlanError) as caught:
            load_checkpoint(tmp_path / "step_2", model, adamw(model))
        return "; ".join(f"{one.code}: {one.message}" for one in caught.value.diagnostics)

    said = on(PP2, worker)
    assert said.startswith("checkpoint-mismatch: the checkpoint has layers.3.") and "has no " not in said


@pytest.mark.ranks
def test_an_optimizer_that_trains_less_on_one_stage_is_refused_on_all_ranks(tmp_path: Path) -> None:
    saved(ALONE, Staged, tmp_path)

    def worker() -> str:
        model = parallel(PP2)
        few = [p for n, p in model.named_parameters() if p.requires_grad and n != "after.weight"]
        optimizer = torch.optim.AdamW(few, lr=1e-2)
        with pytest.raises(PlanError) as caught:
            load_checkpoint(tmp_path / "step_2", model, optimizer)
        return "; ".join(f"{one.code}: {one.message}" for one in caught.value.diagnostics)

    said = on(PP2, worker)
    assert said == (
        "checkpoint-optimizer: the checkpoint's optimizer trained after.weight, and this run does not"
    )


@pytest.mark.ranks
def test_each_rank_draws_on_where_it_was_on_the_same_mesh(tmp_path: Path) -> None:
    def worker() -> tuple[list[float], list[float]]:
        model = parallel(PP2)
        torch.manual_seed(torch.distributed.get_rank())
        save_checkpoint(tmp_path, 2, model)
        drawn = torch.rand(3).tolist()
        load_checkpoint(tmp_path / "step_2", model)
        return drawn, torch.rand(3).tolist()

    first, second = run_ranks(worker, 2)
    assert first[0] == first[1] and second[0] == second[1] and first != second
