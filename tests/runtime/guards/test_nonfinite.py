"""Steps with numbers that are not finite: left out by all ranks or by none, without a trace, and with their source named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.runtime.guards.nonfinite import Nonfinite, find_nonfinite, nonfinite
from parallelizer.runtime.step import Batch
from tests.chosen import chosen
from tests.parity import plan, token_loss
from tests.ranks import run_ranks
from tests.runtime.guards.planted import adam, digest, mesh_of, parallel, parts_of, spoilt

Seen = dict[str, Any]
LAST = "layers.1.feed_forward.w2"


def loss_with_nan(rank: int) -> Callable[[Tensor, Batch], tuple[Tensor, Tensor]]:
    """A NaN in one rank's data loss."""

    def loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        total, weight = token_loss(output, batch)
        return (total * torch.nan if dist.get_rank() == rank else total), weight

    return loss


def once(planted: AbstractContextManager[Any], model: nn.Module, parts: Any, loss: Any, again: bool) -> Seen:
    """A step that is skipped, between two that are not, and what is found of it."""
    optimizer = adam(model)
    pz.train_step(model, parts, token_loss, optimizer, 1.0, skip_nonfinite=True)
    before = digest(model, optimizer)
    with planted:
        done = pz.train_step(model, parts, loss, optimizer, 1.0, skip_nonfinite=True)
        unchanged = digest(model, optimizer) == before
        skipped = done.skipped is not None
        if again:
            found = find_nonfinite(model, parts, loss, done.skipped)
    if not again:
        found = find_nonfinite(model, parts, token_loss, done.skipped)
    unchanged &= digest(model, optimizer) == before
    message = nonfinite(2, done, found).message
    after = pz.train_step(model, parts, token_loss, optimizer, 1.0, skip_nonfinite=True)
    return {
        "skipped": skipped,
        "unchanged": unchanged,
        "found": found,
        "message": message,
        "after": (after.loss.item(), after.grad_norm.item(), after.skipped, digest(model, optimizer)),
    }


def reference(model: nn.Module, parts: Any) -> tuple[float, float, None, str]:
    """The same without the step that is skipped, and without looking at all."""
    optimizer = adam(model)
    for _ in range(2):
        done = pz.train_step(model, parts, token_loss, optimizer, 1.0)
    return done.loss.item(), done.grad_norm.item(), None, digest(model, optimizer)


CASES = ("forward", "backward", "loss")
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp2": ({"dp_shard": 2}, {"accumulate": 2, "cases": (*CASES, "not again")}),
    "tp2": ({"tp": 2}, {"rules": "layers.*: {style: checkpoint, mode: selective}"}),
    "cp2": ({"cp": 2}, {"rules": "layers.*: checkpoint"}),
    "tp2 llama_tp": ({"tp": 2}, {"extends": "llama_tp"}),
    "replicate2 whole": ({"dp_replicate": 2}, {"fsdp": {"min_size": 10**9}}),
    "fsdp2 compiled": ({"dp_shard": 2}, {"rules": "layers.*.feed_forward: {style: compile, backend: eager}"}),
}


def on(
    sizes: dict[str, int],
    *,
    extends: str = "llama",
    rules: str = "",
    accumulate: int = 1,
    cases: tuple[str, ...] = CASES,
    **options: Any,
) -> dict[str, Any]:
    """What is planted on one mesh, case by case."""
    mesh, of = mesh_of(**sizes), plan(f"extends: {extends}" + (f"\nrules:\n  {rules}" if rules else ""))
    parts = parts_of(mesh, of, accumulate)

    def run(case: str) -> Seen:
        model = parallel(mesh, of, options=options)
        module = model.get_submodule("layers.0.attention.wo" if case == "backward" else LAST)
        planted = nullcontext() if case == "loss" else spoilt(module, 1, backward=case == "backward")
        loss = loss_with_nan(1) if case == "loss" else token_loss
        return once(planted, model, parts, loss, case != "not again")

    found = {case: run(case) for case in cases}
    return found | {"reference": reference(parallel(mesh, of, options=options), parts)}


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """All meshes that somebody asks for in one start of ranks."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = ["fsdp2", "tp2", *(call.params["mesh"] for call in calls if call and "mesh" in call.params)]
    return run_ranks(
        lambda: {name: on(MESHES[name][0], **MESHES[name][1]) for name in dict.fromkeys(names)}, 2
    )


ON_MESHES = pytest.mark.parametrize("mesh", chosen(MESHES, ("fsdp2", "tp2")))


@pytest.mark.ranks
@ON_MESHES
def test_a_skipped_step_leaves_no_trace_on_any_rank(mesh: str, two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        for case, seen in rank[mesh].items():
            if case != "reference":
                assert seen["skipped"] and seen["unchanged"], case
                assert seen["after"] == rank[mesh]["reference"], case
                assert seen["message"] == two_ranks[0][mesh][case]["message"]


def sources(found: tuple[Nonfinite, ...]) -> list[tuple[int, str, str, str]]:
    return [(f.rank, f.sighting.where, f.name, f.kind) for f in found if f.sighting]


@pytest.mark.ranks
@ON_MESHES
def test_the_source_is_named_and_not_what_it_spread_to(mesh: str, two_ranks: list[dict[str, Any]]) -> None:
    cases = two_ranks[0][mesh]
    assert sources(cases["forward"]["found"]) == [(1, "forward", LAST, "NaN")]
    assert sources(cases["backward"]["found"]) == [(1, "backward", "layers.0.attention.wo", "infinite")]
    assert sources(cases["loss"]["found"]) == [(1, "loss", "", "NaN")]


@pytest.mark.ranks
def test_the_ranks_whose_own_loss_is_not_finite_are_named(two_ranks: list[dict[str, Any]]) -> None:
    def losses(mesh: str, planted: str) -> list[int]:
        return [f.rank for f in two_ranks[0][mesh][planted]["found"] if f.where == "loss"]

    assert losses("fsdp2", "loss") == losses("tp2", "loss") == [1]
    assert losses("fsdp2", "forward") == [1]
    assert losses("tp2", "forward") == [0, 1]  # it goes through the sum of w2's output
    assert losses("fsdp2", "backward") == []


@pytest.mark.ranks
def test_the_message_says_what_where_and_since_when(two_ranks: list[dict[str, Any]]) -> None:
    messages = {case: seen["message"] for case, seen in two_ranks[0]["fsdp2"].items() if case != "reference"}
    assert messages["forward"] == (
        f"step 2: the loss is NaN and the gradient norm NaN: it begins in forward, with the output of {LAST} (NaN) on rank "
        "1; the sum of the losses of rank 1 is NaN; the gradients of {tok_embeddings,norm,output}.weight, "
        "layers.{0,1}.{attention_norm,ffn_norm}.weight, layers.{0,1}.attention.{wq,wk,wv,wo}.weight and 1 more are NaN on "
        "ranks 0, 1"
    )
    assert messages["backward"].startswith(
        "step 2: the gradient norm is NaN: it begins in backward of layers.0.attention.wo (infinite) on rank 1; "
    )
    assert "it did not happen again on the same batch" in messages["not again"]
    of_tp = two_ranks[0]["tp2"]["loss"]["message"]  # rank 0's own loss is finite there
    assert of_tp.startswith(
        "step 2: the loss is NaN and the gradient norm NaN: it begins in the loss function (NaN) on rank 1;"
    )


# One process


class Picky(nn.Module):
    """Two linears with statistics between them, and a NaN where a random number wants one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)
        self.spoil: float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.first(x)))
        if torch.rand(()) < self.spoil:
            h = h.log()
        out: Tensor = self.last(h)
        return out


def mean_square(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return output.square().sum(), torch.tensor(float(batch.get("weight", torch.tensor(output.shape[0]))))


def picky_step(spoil: float = 0.0, **batch: Tensor) -> tuple[Any, str, Picky]:
    torch.manual_seed(1)
    model = Picky()
    optimizer = adam(model)
    batch = {"x": torch.randn(8, 4), **batch}
    pz.train_step(model, batch, mean_square, optimizer, skip_nonfinite=True)
    before, model.spoil = digest(model, optimizer), spoil
    done = pz.train_step(model, batch, mean_square, optimizer, skip_nonfinite=True)
    after, state = digest(model, optimizer), torch.get_rng_state()
    assert (done.skipped is not None) == (before == after)
    message = ""
    if done.skipped is not None:
        assert any(p.grad is not None for p in model.parameters())  # kept for whoever looks
        message = nonfinite(2, done, find_nonfinite(model, batch, mean_square, done.skipped)).message
        assert digest(model, optimizer) == after and torch.equal(state, torch.get_rng_state())
        assert all(p.grad is None for p in model.parameters())
    return done, message, model


def test_running_statistics_are_put_back_and_the_replay_draws_what_the_step_drew() -> None:
    drawn = [picky_step(spoil) for spoil in (0.0, 1.0, 0.5)]
    assert drawn[0][0].skipped is None and drawn[1][0].skipped is not None
    assert "it begins in forward of the model, in what is given to last (NaN) on rank 0" in drawn[1][1]
    # With a chance of a half a replay that drew anew would see nothing now and then.
    outcomes = []
    for seed in range(8):
        torch.manual_seed(seed)
        model = Picky()
        model.spoil = 0.5
        batch = {"x": torch.randn(8, 4)}
        done = pz.train_step(model, batch, mean_square, adam(model), skip_nonfinite=True)
        if done.skipped is not None:
            torch.manual_seed(100)  # somebody else has drawn meanwhile
            outcomes.append(
                [f.name for f in find_nonfinite(model, batch, mean_square, done.skipped) if f.sighting]
            )
    assert len(outcomes) >= 2 and all(outcomes)


def test_data_that_is_not_finite_is_told_from_a_model_that_makes_it_so() -> None:
    done, message, _ = picky_step(x=torch.full((8, 4), torch.inf))
    assert done.skipped is not None and "the batch's x is infinite on rank 0; it begins " in message


def test_a_batch_in_which_no_token_counts_is_told_as_what_it_is() -> None:
    done, message, _ = picky_step(weight=torch.tensor(0.0))
    assert done.skipped is not None and message.endswith("no token of the batch counts, on any rank")


def test_a_parameter_that_is_not_finite_is_named() -> None:
    torch.manual_seed(1)
    model = Picky()
    with torch.no_grad():
        model.last.weight[0, 0] = torch.nan
    batch = {"x": torch.randn(8, 4)}
    done = pz.train_step(model, batch, mean_square, adam(model), skip_nonfinite=True)
    message = nonfinite(1, done, find_nonfinite(model, batch, mean_square, done.skipped)).message
    assert "last.weight is NaN on rank 0; it begins in forward, with the output of last (NaN)" in message


class Masked(nn.Module):
    """Attention scores under a mask that a module without parameters makes of minus infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.mask, self.out = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(torch.full((8, 4), -torch.inf).triu(1))
        out: Tensor = self.out((self.score(x) + mask).softmax(-1) * self.scale)
        return out


def test_the_minus_infinities_of_a_mask_are_no_finding() -> None:
    torch.manual_seed(1)
    model = Masked()
    model.scale = torch.inf
    batch = {"x": torch.randn(8, 4)}
    done = pz.train_step(model, batch, mean_square, adam(model), skip_nonfinite=True)
    [source] = [f for f in find_nonfinite(model, batch, mean_square, done.skipped) if f.sighting]
    assert source.sighting and source.sighting.near == "out"


def test_without_being_asked_a_step_is_taken_whatever_comes_of_it() -> None:
    torch.manual_seed(1)
    model = Picky()
    model.spoil = 1.0
    done = pz.train_step(model, {"x": torch.randn(8, 4)}, mean_square, adam(model))
    assert done.skipped is None and not torch.isfinite(model.last.weight).all()
