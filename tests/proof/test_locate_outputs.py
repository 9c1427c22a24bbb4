"""Gradients of outputs that ranks rightly hold a term of, and those that they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from parallelizer.language.plan import Mesh, Plan
from parallelizer.proof.compare import ProofVerdict
from parallelizer.proof.divergence import Comparison
from parallelizer.proof.locate_outputs import output_gradients
from parallelizer.styles.application import Program

MESH = Mesh({"dp_shard": 2, "tp": 2})


def seen(output: torch.Tensor, gradient: torch.Tensor) -> Any:
    return SimpleNamespace(outputs=[{"wpe": output}], output_gradients=[{"wpe": gradient}], by_batch=False)


def wrong(reference: Any, ranks: list[Any]) -> list[tuple[str, str | None]]:
    program = Program(Plan("none", "<none>"), MESH, ())
    case = Comparison(program, cast(Any, reference), ranks, ProofVerdict((), 16.0, ()))
    return [(d.module, d.axis) for d in output_gradients(case, 0, True)]


def test_embeddings_of_positions_have_a_gradient_that_is_summed_over_the_data_later() -> None:
    """Of shape [positions, features]: each data rank has its rows' term, and each rank of tp its positions."""
    output, terms = torch.randn(4, 3), [torch.randn(4, 3) for _ in range(2)]
    reference = seen(output, terms[0] + terms[1])
    ranks = [seen(output.chunk(2)[tp], terms[dp].chunk(2)[tp]) for dp in range(2) for tp in range(2)]
    assert wrong(reference, ranks) == []
    ranks[0].output_gradients[0]["wpe"] = torch.randn(2, 3)
    assert [module for module, _ in wrong(reference, ranks)] == ["wpe"]


def test_a_gradient_of_rows_is_summed_over_no_data() -> None:
    output, terms = torch.randn(4, 3), [torch.randn(4, 3) for _ in range(2)]
    reference = seen(output, terms[0] + terms[1])
    ranks = [seen(output.chunk(2)[dp], terms[dp]) for dp in range(2) for _ in range(2)]
    assert wrong(reference, ranks) == [("wpe", "dp_shard")]
