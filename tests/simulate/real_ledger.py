"""The ledger of a real step: the same recorder, on gloo ranks that do talk to each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from parallelizer import train_step
from parallelizer.compiler.observe.running_module import Running
from parallelizer.configuration.setup import Setup
from parallelizer.language.routing import Routing
from parallelizer.mesh import build_mesh
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import materialize
from parallelizer.simulate.record.ledger import Collective, Ledger
from parallelizer.simulate.record.trace import local_parts
from parallelizer.styles.experts.recorded import counted_rows
from parallelizer.training.watch.expert_load import write_routing
from tests.ranks import run_ranks


def real_ledgers(setups: Sequence[Setup]) -> list[list[tuple[Collective, ...]]]:
    """The second step's entries of each setup, rank by rank. All have one number of ranks and run in one
    start of them.
    """

    def worker() -> list[tuple[Collective, ...]]:
        return [_second_step(setup) for setup in setups]

    by_rank = run_ranks(worker, setups[0].mesh.world_size)
    return [[ledgers[i] for ledgers in by_rank] for i in range(len(setups))]


def real_steps(setups: Sequence[Setup], folder: Path) -> list[tuple[list[tuple[Collective, ...]], Routing]]:
    """As `real_ledgers`, with the tokens of experts that ran, as a dry run takes them."""

    def worker() -> list[tuple[Collective, ...]]:
        return [_second_step(setup, folder / f"{at}.json") for at, setup in enumerate(setups)]

    by_rank = run_ranks(worker, setups[0].mesh.world_size)
    return [
        ([steps[at] for steps in by_rank], Routing(counted=json.loads((folder / f"{at}.json").read_text())))
        for at in range(len(setups))
    ]


def _second_step(setup: Setup, routing: Path | None = None) -> tuple[Collective, ...]:
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    mesh = build_mesh(setup.mesh, "cpu")
    apply(program, model, mesh)
    running = Running(model)
    ledger = Ledger(program, mesh, running)
    materialize(model, device="cpu", seed=0)
    ledger.label(model)
    optimizer = recipe.optimizer(model)
    parts = local_parts(recipe.workload, program, mesh)
    train_step(model, parts, recipe.loss, optimizer, recipe.clip)
    with ledger, counted_rows() as counts:
        train_step(model, parts, recipe.loss, optimizer, recipe.clip)
    if routing is not None:
        write_routing(model, counts, routing)
    return tuple(ledger.entries)
