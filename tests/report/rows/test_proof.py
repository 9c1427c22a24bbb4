"""The figures of a proof: each quantity once, with its largest error over the steps."""

from __future__ import annotations

from parallelizer.language.plan import Mesh
from parallelizer.proof.compare import Difference, ProofVerdict
from parallelizer.proof.proof import Proof
from parallelizer.report.rows.proof import error_rows, loss_error, number_compared

PROOF = Proof(
    "llama",
    Mesh({"tp": 2}),
    "float64",
    ProofVerdict(
        (
            Difference("loss", "", 0, 3e-9, 1),
            Difference("loss", "", 1, 5e-9, 1),
            Difference("gradient", "a", 0, 1e-9, 1),
            Difference("gradient", "a", 1, 4e-9, 1),
            Difference("gradient", "b", 0, 2e-9, 1),
            Difference("parameter", "a", 0, 7e-9, 1),
            Difference("parameter", "b", 0, 0.0, 1),
        ),
        16,
    ),
    (1.0, 1.0),
    frozen=frozenset({"b"}),
)


def test_a_parameter_has_its_largest_errors_and_a_frozen_one_no_gradient() -> None:
    rows = [(row.name, row.gradient, row.update) for row in error_rows(PROOF)]
    assert rows == [("a", 4e-9, 7e-9), ("b", None, 0.0)]


def test_quantities_are_counted_once_and_the_loss_is_the_first_step_s() -> None:
    assert [number_compared(PROOF, what) for what in ("gradient", "buffer")] == [2, 0]
    assert loss_error(PROOF) == 3e-9
