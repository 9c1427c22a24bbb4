"""What a proof found."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.language.plan import Mesh
from parallelizer.proof.compare import Difference, ProofVerdict
from parallelizer.proof.divergence import Divergence
from parallelizer.proof.float8_distance import Distance


@dataclass(frozen=True)
class Proof:
    """What a proof found. `changes` says how the subject was made small, `diagnostics` are what was found before,
    `divergence` says where a failing run first differs. `broken_axes` are the axes on which a failing subject is not proven by
    itself either, with every other axis at 1; empty when each of them is, and None when the mesh has one axis. `mixed_rows` is
    where the model or the loss mixes rows of the batch, if a subject fails on data axes or pp alone, `departure` the line on
    which ranks first compute what the unsharded run does not have, if it fails in forward otherwise. `lowered` says
    whether anything computed in `dtype`, `float8` how far modules in float8 are from full precision, and `one_sided`
    which decisions by values took one side every time.
    """

    plan: str
    mesh: Mesh
    dtype: str
    verdict: ProofVerdict
    losses: tuple[float, float]
    divergence: Divergence | None = None
    broken_axes: tuple[str, ...] | None = None
    mixed_rows: Span | None = None
    departure: Span | None = None
    unequal: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    one_sided: tuple[str, ...] = ()
    lowered: bool = True
    changes: tuple[str, ...] = ()
    float8: tuple[Distance, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = field(default=())

    @property
    def is_verdict(self) -> bool:
        """Whether this is a proof, and no report of drift.

        In float32 a sum in another order differs so much that float8 rounds a few values behind it to their other
        neighbour: equality cannot be asked for.
        """
        return self.dtype == "float64" or (self.dtype == "float32" and not self.float8)

    @property
    def proven(self) -> bool | None:
        """Whether the runs are equal; None where that is not asked."""
        return self.verdict.passed if self.is_verdict else None

    @property
    def passed(self) -> bool:
        """False only for what was not proven: information cannot fail."""
        return self.proven is not False

    def __str__(self) -> str:
        """What was compared, the worst three parameters, where a run first differs, and the verdict."""
        rows = [("loss", f"{self.losses[0]:.12g} unsharded, {self.losses[1]:.12g} sharded")]
        rows += [
            (d.name, f"{d.what} {d.when}: error {d.error:.2g}, bound {d.bound:.2g}") for d in self.worst()
        ]
        if self.divergence is not None:
            rows.append(("first difference", self.divergence.description))
        width = max(len(name) for name, _ in rows)
        verdict = {None: "information, not a verdict", True: "proven", False: "NOT proven"}[self.proven]
        lines = [f"{self.plan} on {self.mesh}, in {self.dtype}: {verdict}"]
        return "\n".join([*lines, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def worst(self, count: int = 3) -> list[Difference]:
        """The parameters nearest to their bounds, or furthest over them, each once; without a verdict, those
        with the largest errors.
        """
        kinds = ("gradient", "parameter", "initial value", "optimizer state")
        once: dict[str, Difference] = {}
        of_parameters = [d for d in self.verdict.differences if d.what in kinds]
        for difference in sorted(of_parameters, key=lambda d: -(d.share if self.is_verdict else d.error)):
            once.setdefault(difference.name.partition(":")[0], difference)
        return list(once.values())[:count]
