"""What a report of a proof tells: how many quantities were compared, and the largest error of each parameter."""

from __future__ import annotations

from dataclasses import dataclass

from parallelizer.proof.proof import Proof


@dataclass(frozen=True)
class ErrorRow:
    """A parameter's largest relative errors over the steps; `gradient` is None where it has none, frozen."""

    name: str
    gradient: float | None
    update: float


def error_rows(proof: Proof) -> list[ErrorRow]:
    """Every parameter, in the order in which they were compared."""
    gradients, updates = _largest(proof, "gradient"), _largest(proof, "parameter")
    return [
        ErrorRow(name, None if name in proof.frozen else error, updates[name])
        for name, error in gradients.items()
    ]


def loss_error(proof: Proof) -> float:
    """The relative error of the first step's loss."""
    return max((d.error for d in proof.verdict.of("loss") if d.step == 0), default=0.0)


def number_compared(proof: Proof, what: str) -> int:
    """How many quantities of a kind were compared, each counted once over the steps."""
    return len({d.name for d in proof.verdict.of(what)})


def _largest(proof: Proof, what: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for difference in proof.verdict.of(what):
        found[difference.name] = max(found.get(difference.name, 0.0), difference.error)
    return found
