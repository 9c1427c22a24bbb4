"""A program with one step of it that was followed, as checks look at it, and the rules behind what they find."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from torch import nn

from parallelizer.compiler.observe.running_module import within
from parallelizer.diagnostics.diagnostic import Related, Span
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import TENSOR_AXES
from parallelizer.simulate.follow.flow import FollowedStep, StepFailure
from parallelizer.simulate.places import Places
from parallelizer.styles.application import Application, Program

OPTIONS = ("output", "layout", "input", "grad")
"""The options of a rule that say how something lies, in the order in which one of them is pointed at."""

MIXED = "mixed torch.Tensor and DTensor"
"""What torch says where a plain tensor meets a DTensor."""


@dataclass(frozen=True)
class Followed:
    """What checks of a followed step look at. `model` is as it was compiled; `alone` is why it does not run on
    fake tensors without the plan either, which tells whose fault a failure is; None where it runs. `places` are those of
    the configuration.
    """

    program: Program
    model: nn.Module
    flow: FollowedStep
    alone: StepFailure | None = None
    places: Places = field(default_factory=Places)

    @property
    def failure(self) -> StepFailure | None:
        """Why the step failed, where the plan is to blame."""
        return self.flow.failure if self.alone is None else None

    def one(self, path: str) -> str:
        """One path in the whole model that a path in the followed one stands for."""
        return next(self.flow.paths(path))

    def folded(self, paths: Iterable[str]) -> str:
        """Paths in the followed model as people read them: few globs of the whole model."""
        whole = [each for path in paths for each in self.flow.paths(path)]
        if "" in whole:
            return "the root"
        folded = fold_paths(whole)
        return ", ".join(folded[:3]) + (f" and {len(folded) - 3} more" if folded[3:] else "")

    def application(self, module: str, axis: str | None) -> Application | None:
        """What a rule applies to the module itself, on one axis or on any."""
        path = self.one(module)
        for slot in ("params", "io", "random", "attention"):
            for a in self.program.of_slot(slot):
                if a.module == path and (axis is None or axis in a.axes):
                    return a
        return None

    def rule_of(self, module: str, axis: str | None = None) -> Hashable:
        """What modules of one rule have in common; a module that no rule stands on is by itself."""
        own = self.application(module, axis)
        return id(own.rule) if own else module

    def span(self, module: str, axis: str | None, options: Iterable[str]) -> Span | None:
        """The option, or the rule, of the nearest module around that stands on the axis."""
        path = module
        while True:
            found = self.application(path, axis)
            if found is not None:
                inside = path == module
                option = next((o for o in options if o in found.spans), None) if inside else None
                return found.spans[option] if option else found.rule.span
            if not path:
                return None
            path = path.rpartition(".")[0]

    def span_inside(self, path: str) -> Span | None:
        """The first rule that stands inside a module; else that of context parallelism."""
        inside = (a for a in self.program.of_slot("params", "io") if within(a.module, path))
        return next((a.rule.span for a in inside), None) or self.context_span()

    def context_span(self) -> Span | None:
        """The rule that makes attention context-parallel; without one, the first batch entry that is split."""
        rule = next((a.rule.span for a in self.program.of_slot("attention")), None)
        return rule or next((b.span for b in self.program.plan.batch.values()), None)

    def since(self, module: str, axis: str) -> tuple[Related, ...]:
        """Where a value began to vary over an axis."""
        span = self.span(module, axis, ("output", "layout", "input"))
        return (
            (Related(span, f"the output of {self.folded([module]) or 'the root'} differs over {axis}"),)
            if span
            else ()
        )

    def blamed(self, failure: StepFailure) -> tuple[Span | None, tuple[Related, ...]]:
        """The rule to point at for a step that failed, and those that made what it was given."""
        axes = [a for a in TENSOR_AXES if self.program.mesh.sizes[a] > 1]
        made = [o for o in failure.operands if o.maker]
        spans = {self.span(o.maker or "", None, ("output", "layout", "input")): o for o in made}
        own = self.span(failure.module, None, OPTIONS)
        began = [
            r.span for o in failure.operands for a in axes if a in o.axes for r in self.since(o.axes[a], a)
        ]
        span = own or next((s for s in spans if s), None) or next(iter(began), None)
        related = tuple(
            Related(s, f"this is the output of {self.folded([o.maker or ''])}")
            for s, o in spans.items()
            if s and s != span
        )
        return span, related
