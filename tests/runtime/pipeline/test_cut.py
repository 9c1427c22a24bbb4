"""What a rank keeps of a model that is cut: its stages' modules, and nothing of others in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.runtime.state import state_of
from tests.chosen import chosen
from tests.ranks import run_ranks
from tests.runtime.pipeline.models import (
    ALONE,
    PP2,
    PP2_FSDP2,
    PP4,
    ZBV,
    Layout,
    Staged,
    adamw,
    own_rows,
    parallel,
    program,
    tied,
    token_loss,
    train,
)


def with_values(build: Callable[[], nn.Module]) -> nn.Module:
    """The model as its constructor fills it, the same on every rank."""
    torch.manual_seed(4)
    return build()


@pytest.mark.ranks
@pytest.mark.parametrize("build", [Staged, tied])
@pytest.mark.parametrize("layouts", chosen([(PP2, ZBV), (PP4, PP2_FSDP2)], [(PP2, ZBV)]), ids=str)
def test_initial_values_are_those_of_one_process_to_the_bit(
    layouts: tuple[Layout, ...], build: Callable[[], nn.Module]
) -> None:
    """From the modules' own initializers, from the constructor by `whole`, and kept by a model that has values."""
    alone = pz.whole_state_dict(parallel(ALONE, build))
    by_whole = pz.materialize(with_meta(build), device="cpu", seed=0, whole=build).state_dict()
    kept = with_values(build).state_dict()

    def worker() -> list[str]:
        wrong = []
        for layout in layouts:
            wrong += differing("own", alone, parallel(layout, build))
            wrong += differing(
                "whole",
                by_whole,
                pz.materialize(cut(layout, with_meta(build)), device="cpu", seed=0, whole=build),
            )
            wrong += differing("kept", kept, cut(layout, with_values(build)))
        return wrong

    assert run_ranks(worker, layouts[0].ranks) == [[]] * layouts[0].ranks


def with_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def cut(layout: Layout, model: nn.Module) -> nn.Module:
    mesh = pz.build_mesh(Mesh(dict(layout.sizes)), "cpu")
    return pz.apply(program(layout, model), model, mesh)


def differing(case: str, wanted: dict[str, torch.Tensor], model: nn.Module) -> list[str]:
    found = pz.whole_state_dict(model)
    if list(found) != list(wanted):
        return [f"{case}: other names: {list(found)}"]
    return [f"{case}: {name}" for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]


@pytest.mark.ranks
def test_a_whole_state_dict_goes_into_any_layout() -> None:
    given = {name: tensor + 1 for name, tensor in with_values(tied).state_dict().items()}

    def worker() -> list[str]:
        model = parallel(ZBV, tied)
        pz.load_whole_state_dict(model, given)
        with pytest.raises(ValueError, match="the model has no else"):
            pz.load_whole_state_dict(model, {**given, "else": torch.zeros(1)})
        lacking = {name: tensor for name, tensor in given.items() if name != "layers.1.norm.weight"}
        with pytest.raises(
            ValueError, match=r"layers\.1\.norm\.weight is missing"
        ):  # on ranks that have it and that have not
            pz.load_whole_state_dict(model, lacking)
        return differing("loaded", given, model)

    assert run_ranks(worker, 2) == [[], []]


@pytest.mark.ranks
def test_a_state_dict_has_a_ranks_part_sharded_as_it_lies_also_behind_an_evaluation() -> None:
    def worker() -> tuple[set[str], bool]:
        model = parallel(PP2_FSDP2)
        pz.evaluate(model, [own_rows(model, 0)], token_loss)
        state = model.state_dict()
        sharded = [n for n in state if isinstance(state[n], torch.distributed.tensor.DTensor)]
        return set(state), set(sharded) >= {
            n for n, p in model.named_parameters() if n not in ("idle", "spare.weight", "spare.bias")
        }

    every = run_ranks(worker, 4)
    assert all(sharded for _, sharded in every)
    first, _, last, _ = (names for names, _ in every)
    assert first | last == set(Staged().state_dict())
    assert first & last == {"total"}  # a buffer of the root
    assert {"before.weight", "idle", "spare.bias"} <= first and {"scale", "after.weight"} <= last


@pytest.mark.ranks
def test_parameters_of_other_stages_are_freed() -> None:
    def worker() -> list[str]:
        model = with_values(tied)
        there = {name: weakref.ref(param) for name, param in model.named_parameters()}
        cut(PP2, model)
        gc.collect()
        return [name for name, param in there.items() if param() is not None]

    first, last = run_ranks(worker, 2)
    assert "layers.0.up.weight" in first and "layers.3.up.weight" in last
    assert not [n for n in first if n.startswith(("layers.2", "layers.3", "norm", "scale"))]
    assert not [n for n in last if n.startswith(("layers.0", "layers.1", "before", "idle", "spare"))]


@pytest.mark.ranks
def test_dropout_is_drawn_apart_on_each_stage_and_again_alike_in_each_run() -> None:
    def dropping() -> nn.Module:
        return Staged(dropout=0.5)

    def losses(layout: Layout) -> list[float]:
        model = parallel(layout, dropping)
        state = state_of(model)
        assert state is not None
        pz.seed_ranks(state.mesh, 3)
        return train(model, adamw(model), range(2))

    def worker() -> tuple[list[float], list[float], list[float]]:
        mesh = pz.build_mesh(Mesh({"pp": 2}), "cpu")
        pz.seed_ranks(mesh, 3)
        return torch.rand(4).tolist(), losses(PP2), losses(PP2)

    first, last = run_ranks(worker, 2)
    assert first[0] != last[0]
    assert first[1] == first[2] == last[1] == last[2]
