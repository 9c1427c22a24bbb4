"""What a failing run and its reference are compared by, and the first difference that was found: where it is,
how it looks, and which rule governs the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import REPLICA_AXES, Mesh, Rule
from parallelizer.proof.compare import Difference, ProofVerdict
from parallelizer.proof.observe import STEPS, Observation
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel.order import Order, static_order


@dataclass(frozen=True)
class Divergence:
    """The first module in order of execution whose value differs; `module` is empty for what belongs to no
    one module.

    `phase` is initialization, forward, loss, backward, clip, optimizer or evaluation.
    """

    module: str
    phase: str
    axis: str | None
    rule: Rule | None
    description: str
    line: Span | None = None
    """Where the model or the loss decides by values, if the runs differ in a scene alone."""


@dataclass(frozen=True)
class Comparison:
    """The two sides, with the bounds of gradients and of everything else. `step` is the one whose outputs are compared."""

    program: Program
    reference: Observation
    ranks: Sequence[Observation]
    verdict: ProofVerdict
    step: int = STEPS

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def order(self) -> Order:
        """How the sequence is dealt out, where the plan alone says it."""
        return static_order(self.program.plan.balance, self.mesh.sizes["cp"])

    @property
    def by_batch(self) -> bool:
        """Whether it was dealt out as the batch says, or padded."""
        return any(rank.by_batch for rank in self.ranks)

    @property
    def bound(self) -> float:
        """What outputs may differ by: the largest bound of any gradient. Before the first update, where nothing has grown yet, at
        most a thousand times the largest one there.
        """
        gradients = self.verdict.of("gradient")
        largest = max((d.bound for d in gradients), default=1e-9)
        first = max((d.bound for d in gradients if d.step == 0), default=largest)
        return min(largest, 1000 * first) if self.step == 0 else largest

    def compared(self, what: str, step: int) -> dict[str, Difference]:
        """The differences of one kind in one step, by name."""
        return {d.name: d for d in self.verdict.of(what) if d.step == step}


def found(case: Comparison, name: str, phase: str, axis: str | None, text: str) -> Divergence:
    """The divergence of a parameter or buffer, or of a module whose path is given with a dot behind it."""
    module = name.rpartition(".")[0]
    return Divergence(module, phase, axis, governing_rule(case.program, module, axis), text)


def governing_rule(program: Program, module: str, axis: str | None) -> Rule | None:
    """The rule that governs a module on an axis: its own, one that leaves it without a style, or that of the
    nearest module around it. For a data axis the fsdp rule that takes in the module, unless context
    parallelism is what the axis is for; without an axis that too where there is no other.
    """
    parts = set(axis.split(" x ")) if axis else set()
    experts = next((u for u in program if u.slot == "experts" and u.module == module), None)
    if experts is not None and parts & set(REPLICA_AXES):  # their ranks share out its experts
        return experts.rule
    if parts:
        return _nearest(program, module, parts, data=parts <= {"dp_replicate", "dp_shard"})
    return _nearest(program, module, parts, data=False) or _nearest(program, module, parts, data=True)


def _nearest(program: Program, module: str, parts: set[str], *, data: bool) -> Rule | None:
    at: str | None = module
    while at is not None:
        uses = [
            u
            for u in program
            if u.module == at and (u.slot == "fsdp") == data and (not parts or parts & set(u.axes))
        ]
        if uses:
            return uses[0].rule
        emptied = [r for r in program.plan.rules if r.empties and r.glob.select([at])]
        if emptied and at == module:
            return emptied[-1]
        at = at.rpartition(".")[0] if at else None
    return None


def at_step(step: int) -> str:
    """` of step 1`; nothing for the first step."""
    return f" of step {step}" if step else ""


def on_ranks(wrong: Sequence[int], mesh: Mesh) -> str:
    """`on ranks 1, 3`."""
    return (
        "on every rank"
        if len(wrong) == mesh.world_size
        else f"on rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
    )


def between(mesh: Mesh, a: int, b: int) -> str | None:
    """The one axis on which two ranks differ."""
    here, there = mesh.coordinate(a), mesh.coordinate(b)
    axes = [axis for axis in here if here[axis] != there[axis]]
    return axes[0] if len(axes) == 1 else None
