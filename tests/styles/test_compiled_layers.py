"""Equal layers under `compile` share one graph, on every mesh, and watching the first step leaves it whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.configuration.setup import Setup
from parallelizer.mesh import build_mesh
from parallelizer.runtime.initialize import materialize
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.planned import differences, observing, of_the_step, outside_compiled
from parallelizer.simulate.record.trace import local_parts
from tests.ranks import run_ranks
from tests.simulate.setups import LLAMA, setup_of

LAYERS = 12
"""More than `torch._dynamo.config.recompile_limit`, behind which torch runs a function without compiling it."""

COMPILE = "layers.*: {{style: compile, backend: {backend}}}"
CASES = {
    "tp2": ("tp2", ""),
    "cp2": ("cp2", "all-gather"),
    "cp2 ring": ("cp2", "ring"),
    "cp2 ulysses": ("cp2", "ulysses"),
    "fsdp2": ("fsdp2", ""),
    "fsdp2_tp2": ("fsdp2_tp2", ""),
    "cp2_tp2": ("cp2_tp2", "all-gather"),
    "cp2_tp2 ring": ("cp2_tp2", "ring"),
}
SLOW = CASES.keys() - {"tp2", "cp2 ring"}

Counts = tuple[int, int]
"""How many graphs were made in a step, and how many ran."""


def small(preset: str, method: str, *rules: str, layers: int) -> Setup:
    attention = f"layers.*.attention.inner: {{style: context-parallel, method: {method}}}"
    given = ", ".join(f'"{rule}"' for rule in (*rules, *([attention] if method else ())))
    sizes = (
        "model.dim=16",
        "model.hidden_dim=32",
        "model.n_heads=4",
        "model.n_kv_heads=2",
        f"model.n_layers={layers}",
    )
    return setup_of(*LLAMA, *sizes, "train.seq_len=16", f"parallel={preset}", f"rules=[{given}]")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The graphs that are made and that run meanwhile, by a backend that runs them as they are."""
    found: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found["made"] += 1

        def run(*args: Any) -> Any:
            found["ran"] += 1
            return graph.forward(*args)

        return run

    compiled = torch.compile
    torch.compile = lambda function, **options: compiled(function, **{**options, "backend": backend})  # type: ignore[assignment]
    try:
        yield found
    finally:
        torch.compile = compiled


def steps(
    setup: Setup, number: int
) -> tuple[list[Counts], list[Collective], list[str], dict[str, torch.Tensor]]:
    """Steps of which the first is watched on rank 0: the graphs of each; the collectives of the first, the compiled modules,
    and this rank's parts of the first's gradients.
    """
    with counted() as graphs:
        model = setup.build_model()
        program, recipe = setup.compile(model), setup.recipe()
        mesh = build_mesh(setup.mesh, "cpu")
        pz.apply(program, model, mesh)
        materialize(model, device="cpu", seed=0)
        optimizer = recipe.optimizer(model)
        parts = local_parts(recipe.workload, program, mesh)
        counts = []
        with observing(program, mesh, model, active=torch.distributed.get_rank() == 0) as observed:
            pz.train_step(model, parts, recipe.loss, optimizer)
        gradients = {n: _local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        counts.append((graphs["made"], graphs["ran"]))
        for _ in range(number - 1):
            graphs.clear()
            pz.train_step(model, parts, recipe.loss, optimizer)
            counts.append((graphs["made"], graphs["ran"]))
    assert observed.failure is None
    return counts, of_the_step(observed.entries), observed.compiled, gradients


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone()


def compiled_and_plain(preset: str, method: str) -> tuple[list[Counts], list[Any]]:
    """The graphs of three steps, and what differs from the model without `compile`."""
    rule = COMPILE.format(backend="eager")
    counts, sent, compiled, gradients = steps(small(preset, method, rule, layers=LAYERS), 3)
    none, whole, _, expected = steps(small(preset, method, layers=LAYERS), 1)
    assert none == [(0, 0)] and gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-8, msg=name)
    return counts, differences(outside_compiled(whole, compiled), sent)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_equal_layers_share_one_graph_in_watched_and_later_steps(name: str) -> None:
    preset, method = CASES[name]
    ranks = small(preset, method, layers=2).mesh.world_size
    for counts, apart in run_ranks(compiled_and_plain, ranks, preset, method):
        assert counts == [(1, LAYERS), (0, LAYERS), (0, LAYERS)]
        assert apart == []
