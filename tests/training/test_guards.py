"""A run's policy: what ends it, what it goes on from with a warning, and that all ranks do the same."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.guards.drift import Drift
from parallelizer.runtime.step import Batch
from parallelizer.training import guards
from parallelizer.training.guards import MOST_SKIPPED, Guards
from parallelizer.training.settings import Settings, read_settings
from tests.parity import token_loss
from tests.ranks import run_ranks
from tests.runtime.guards.planted import adam, mesh_of, parallel, parts_of

SETTINGS = read_settings(*compose_config(()))


class Run:
    """A loop as the recipe's: what comes of its steps, of which some are spoilt on one rank."""

    def __init__(self, model: nn.Module, parts: Any, **settings: Any) -> None:
        self.model, self.parts, self.optimizer = model, parts, adam(model)
        self.settings: Settings = dataclasses.replace(SETTINGS, **settings)
        self.spoilt: set[int] = set()
        self.step = 0
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.guards = Guards(self.settings, model, self.optimizer, self.loss, leads=rank == 0)

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        total, weight = token_loss(output, batch)
        rank = dist.get_rank() if dist.is_initialized() else 0
        last = dist.get_world_size() - 1 if dist.is_initialized() else 0
        return (total * torch.nan if self.step in self.spoilt and rank == last else total), weight

    def go(self, steps: int, **told: Any) -> tuple[list[int], str]:
        """The signals that were heard, and what was written to stderr."""
        heard, written = [], io.StringIO()
        with contextlib.redirect_stderr(written):
            for _ in range(steps):
                self.step += 1
                done = pz.train_step(
                    self.model, self.parts, self.loss, self.optimizer, 1.0, skip_nonfinite=True
                )
                heard.append(self.guards.after(self.step, done, self.parts, samples=self.step, **told))
        return heard, written.getvalue()

    def ends(self, steps: int, **told: Any) -> tuple[str, str, int]:
        """The finding that ends it, and the step at which."""
        try:
            self.go(steps, **told)
        except PlanError as error:
            [finding] = error.diagnostics
            return finding.code, finding.message, self.step
        return "", "", self.step


def worker() -> dict[str, Any]:
    mesh, found = mesh_of(dp_shard=2), {}
    model, parts, rank = parallel(mesh), parts_of(mesh), dist.get_rank()
    run = Run(model, parts)
    found["quiet"] = run.go(2, stop=15 * rank)
    run.spoilt = {3}
    found["stops"] = run.ends(2)
    run = Run(model, parts, on_nonfinite="skip")
    run.spoilt = {1, 3}
    found["skips"] = run.go(4)
    norm = model.get_parameter("norm.weight")
    run.spoilt = set(range(5, 5 + MOST_SKIPPED))
    found["gives up"] = run.ends(3 * MOST_SKIPPED)

    run = Run(model, parts, check_every=2)
    found["no drift"] = run.go(2)
    state = run.optimizer.state[norm]["step"]
    state.add_(rank)
    found["drift"] = run.ends(5)
    run = Run(model, parts, check_every=2, on_drift="warn")
    run.go(1)
    run.optimizer.state[norm]["step"].add_(rank)
    found["warns once"] = run.go(5)
    run = Run(model, parts, check_every=0)
    run.go(1)
    run.optimizer.state[norm]["step"].add_(rank)
    found["does not look"] = run.go(2)
    run.step += rank
    found["out of step"] = run.ends(1)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(worker, 2)


@pytest.mark.ranks
def test_what_ends_a_run_ends_it_on_all_ranks_with_the_same_words(ranks: list[dict[str, Any]]) -> None:
    for name in ("stops", "gives up", "drift"):
        assert ranks[0][name] == ranks[1][name], name
    assert ranks[0]["out of step"][:2] == ranks[1]["out of step"][:2]


@pytest.mark.ranks
def test_a_signal_that_one_rank_got_is_heard_by_all_in_the_same_step(ranks: list[dict[str, Any]]) -> None:
    assert [rank["quiet"] for rank in ranks] == [([15, 15], "")] * 2


@pytest.mark.ranks
def test_a_step_that_is_not_finite_ends_the_run(ranks: list[dict[str, Any]]) -> None:
    code, message, step = ranks[0]["stops"]
    assert (code, step) == ("nonfinite", 3)
    assert message.startswith("step 3: the loss is NaN") and "in the loss function (NaN) on rank 1" in message


@pytest.mark.ranks
def test_steps_are_skipped_on_demand_with_a_warning_each_and_not_forever(ranks: list[dict[str, Any]]) -> None:
    heard, written = ranks[0]["skips"]
    assert heard == [0, 0, 0, 0] and written.count("warning[nonfinite]: step ") == 2
    assert "step 1: " in written and "step 3: " in written and ranks[1]["skips"][1] == ""
    code, message, step = ranks[0]["gives up"]
    assert (code, step) == ("nonfinite", 4 + MOST_SKIPPED) and message.endswith(
        "10th step in a row that is skipped"
    )


@pytest.mark.ranks
def test_drift_is_looked_for_every_so_many_steps(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["no drift"] == ([0, 0], "")
    code, message, step = ranks[0]["drift"]
    assert (code, step) == (
        "ranks-drifted",
        4,
    ) and "ranks 0, 1 from each other in step of norm.weight" in message
    heard, written = ranks[0]["warns once"]
    assert (
        len(heard) == 5 and written.count("warning[ranks-drifted]: after step 2 ") == written.count("[") == 1
    )
    assert ranks[0]["does not look"] == ([0, 0], "")


@pytest.mark.ranks
def test_ranks_out_of_step_end_the_run_before_they_exchange_anything_else(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["out of step"][:2] == ("out-of-step", "rank 0 is at step 4; rank 1 is at step 5")


def test_one_process_is_guarded_too() -> None:
    from parallelizer.models.llama import Llama
    from tests.parity import token_batch
    from tests.runtime.guards.planted import SIZES

    torch.manual_seed(0)
    run = Run(Llama(**SIZES), [token_batch()], check_every=1)
    run.spoilt = {2}
    assert run.go(1, stop=10) == ([10], "") and run.ends(1)[0] == "nonfinite"


@pytest.mark.parametrize(
    ("on_drift", "device", "raises"),
    [
        ("auto", "cpu", True),
        ("auto", "cuda", False),
        ("stop", "cuda", True),
        ("warn", "cpu", False),
    ],
)
def test_drift_stops_a_run_on_cpus_and_is_a_warning_on_gpus(
    on_drift: str, device: str, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drift = Drift("weight", "", (1,), (0, 1), 1e-3)
    monkeypatch.setattr(guards, "find_drift", lambda model, optimizer: (drift,))
    monkeypatch.setattr(guards, "device_of", lambda model: torch.device(device))
    model = nn.Linear(1, 1)
    run = Guards(
        dataclasses.replace(SETTINGS, on_drift=on_drift), model, adam(model), token_loss, leads=False
    )
    with pytest.raises(PlanError, match="ranks-drifted") if raises else contextlib.nullcontext():
        run.compare(3)
