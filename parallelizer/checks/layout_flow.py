"""What was seen of a followed step, as findings: each names what is wrong, where it began, and the rule there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from parallelizer.checks.left_out import MIXED, left_out
from parallelizer.diagnostics import Diagnostic, Related, Span
from parallelizer.fold import fold_paths
from parallelizer.matching import taken_away
from parallelizer.simulate.modules import within
from parallelizer.simulate.whole_numbers import advised, heads_read
from parallelizer.styles.sizes import TENSOR_AXES
from parallelizer.wording import SHARDED_LOSS

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.program import Application, Program
    from parallelizer.setup import Setup
    from parallelizer.simulate.attention_shapes import OtherShape
    from parallelizer.simulate.flow import Arrival, Failure, Flow, Unreduced
    from parallelizer.simulate.varying import EqualSum, Operand
    from parallelizer.simulate.whole import WholeNeeded

T = TypeVar("T")
OPTIONS = ("output", "layout", "input", "grad")


def check_layout_flow(setup: Setup, program: Program, model: nn.Module) -> tuple[Diagnostic, ...]:
    """Follow one step of the program on a fake world, in a child of this process, and say what is wrong.

    Nothing is followed on a mesh of data axes alone, whose ranks do the same with other tokens. Raises PlanError
    when the configured loss cannot be had.
    """
    with following(setup, program, model) as findings:
        return findings()


@contextmanager
def following(
    setup: Setup, program: Program, model: nn.Module
) -> Iterator[Callable[[], tuple[Diagnostic, ...]]]:
    """As `check_layout_flow`, beside what runs inside: what is yielded waits for the findings."""
    from parallelizer.simulate.flow import follow, runs_alone
    from parallelizer.simulate.world import Children, in_children

    if program.mesh.size("cp", *TENSOR_AXES) == 1:
        yield tuple
        return
    given = program, model, setup.workload, setup.loss()
    with Children([(follow, *given)]) as children:

        def findings() -> tuple[Diagnostic, ...]:
            (flow,) = children.results()
            alone = True
            if flow.failure is not None:
                (alone,) = in_children([(runs_alone, *given)])
            return layout_flow(program, model, flow, runs_alone=alone)

        yield findings


def layout_flow(
    program: Program, model: nn.Module, flow: Flow, *, runs_alone: bool = True
) -> tuple[Diagnostic, ...]:
    """The findings of a followed step. `model` is as it was compiled; `runs_alone` says whether it runs on fake
    tensors without the plan, which tells whose fault a failure is.
    """
    report = _Report(program, model, flow)
    found = [*report.arrivals(), *report.sums(), *report.attentions(), *report.positions(), *report.fused()]
    found += [*report.unpacked(), *report.wholes(), *report.shapes()]
    draws = tuple(report.draws())
    if flow.failure is not None:
        # A tensor that lies otherwise than it is taken to lie fails somewhere further on: one finding, not two.
        if not found or not runs_alone:
            found.append(report.failure(flow.failure) if runs_alone else _untraceable(flow.failure))
        return (*found, *draws)
    return (*found, *report.gradients(), *report.loss(), *draws)


class _Report:
    def __init__(self, program: Program, model: nn.Module, flow: Flow) -> None:
        self.program, self.model, self.flow = program, model, flow

    def arrivals(self) -> Iterator[Diagnostic]:
        def alike(a: Arrival) -> Hashable:
            return self._key(a.module, a.axis), a.name, a.axis, a.expected, a.since is None, a.lies

        for same in _grouped(self.flow.arrivals, alike):
            first, where = same[0], self._folded(a.module for a in same)
            name = f"the input {first.name} of" if first.name else "the input of"
            if first.since is None:
                related: tuple[Related, ...] = ()
                lies = f"arrives whole on every rank of {first.axis}"
                help_text = f"write `replicate` for what arrives whole, or let what comes before hand on {first.expected}"
            else:
                lies, related = (
                    f"differs from rank to rank of {first.axis}",
                    self._since(first.since, first.axis),
                )
                help_text = "say how it arrives (`shard(1) -> replicate` gathers it), or gather it before"
                if first.lies is not None:
                    lies = f"is split along dimension {first.lies} over {first.axis}"
                    help_text = f"say how it arrives: `shard({first.lies})`, or `shard({first.lies}) -> {first.expected}`"
            yield Diagnostic(
                "layout-mismatch",
                f"{name} {where} {lies}, its rule takes it for {first.expected}",
                self._span(first.module, first.axis, ("input", "layout")),
                help_text,
                related=related,
            )

    def sums(self) -> Iterator[Diagnostic]:
        def alike(s: EqualSum) -> Hashable:
            return self._key(s.module, s.axis), s.axis, s.phase

        for same in _grouped(self.flow.sums, alike):
            first, where = same[0], self._folded(s.module for s in same)
            size = self.program.mesh.sizes[first.axis]
            what = "the gradients in" if first.phase == "backward" else "the values from"
            yield Diagnostic(
                "replicated-sum",
                f"{what} {where} are summed over {first.axis}, though every rank of it holds the same: the sum is {size} "
                "times too large",
                self._span(first.module, first.axis, ("grad", "output", "input")),
                "write `grad: replicate` where every rank computes the same gradient; `partial` is for terms of a sum",
            )

    def gradients(self) -> Iterator[Diagnostic]:
        def alike(u: Unreduced) -> Hashable:
            module = u.parameter.rpartition(".")[0]
            own = self._application(module, u.axis)
            return (
                u.axis,
                u.since is None,
                own and id(own.rule),
                type(self.model.get_submodule(self._one(module))),
            )

        for same in _grouped(self.flow.unreduced, alike):
            yield self._gradient(same)

    def _gradient(self, same: list[Unreduced]) -> Diagnostic:
        first, axis = same[0], same[0].axis
        names = self._folded(u.parameter for u in same)
        modules = fold_paths(p for u in same for p in self.flow.paths(u.parameter.rpartition(".")[0]))
        module = first.parameter.rpartition(".")[0]
        own = self._application(module, axis)
        message = (
            f"the gradient of {names} differs from rank to rank of {axis}, though every rank holds it whole: "
            "nothing sums it"
        )
        if first.since is not None:
            message += f"; what comes in is split since {self._folded([first.since]) or 'the root'}"
        related = self._since(first.since, axis) if first.since is not None else ()
        if own is not None:
            help_text = "write `grad: partial`, which sums it"
            if own.style == "sequence":
                help_text = "write `layout: shard(1)`: it runs on a part of the sequence"
            return Diagnostic(
                "varying-gradient",
                message,
                self._span(module, axis, ("grad", "layout")),
                help_text,
                related=related,
            )
        style = self._style_of_like(module, axis)
        help_text = f"add the rule `{modules[0]}: {style}`, which sums it" + (
            f", and the same for {', '.join(modules[1:])}" if modules[1:] else ""
        )
        span = related[0].span if related else self._span(module, axis, OPTIONS)
        others = tuple(r for r in related if r.span != span)
        taken = taken_away(self.program.plan.rules, [self._one(module)])
        return Diagnostic("varying-gradient", message, span, help_text, related=others + taken)

    def loss(self) -> Iterator[Diagnostic]:
        for axis, since in self.flow.loss.items():
            yield Diagnostic(
                "varying-loss",
                f"the loss differs from rank to rank of {axis}: the ranks see different logits",
                self._span(since, axis, ("output",)),
                "hand them on with `local: false`, so that the loss knows how they lie, or gather them: `output: replicate`",
            )

    def attentions(self) -> Iterator[Diagnostic]:
        if self.flow.attentions:
            where = self._folded(self.flow.attentions)
            yield Diagnostic(
                "local-attention",
                f"attention in {where} sees only its own rank's part of the sequence, which is split over cp",
                self._context_span(),
                f"give `context-parallel` to {where} too",
            )

    def positions(self) -> Iterator[Diagnostic]:
        tensors = [p for p in self.flow.positions if p.counted.tensor is not None]
        for same in _grouped(tensors, lambda p: p.module.rpartition(".")[2]):
            first = same[0]
            names = ", ".join(dict.fromkeys(str(p.counted.tensor) for p in same))
            listed = ", ".join(f"{p.counted.tensor}: {p.counted.dim}" for p in same)
            yield Diagnostic(
                "missing-buffers",
                f"every rank of cp takes the first rows of {names}, and they meet other rows of the sequence in "
                f"{self._folded([first.module])}",
                self._context_span(),
                f"add `{listed}` to buffers.model of {self.program.plan.file}",
            )
        made = [p for p in self.flow.positions if p.counted.tensor is None]
        for same in _grouped(made, lambda p: p.counted.module):
            first = same[0]
            yield Diagnostic(
                "local-positions",
                f"{self._folded([first.counted.module])} counts positions from 0 on every rank of cp, and they meet "
                f"other rows of the sequence in {self._folded([first.module])}",
                self._context_span(),
                "let forward take the positions, and add an entry for them to buffers.batch: `position_ids: positions`",
            )

    def draws(self) -> Iterator[Diagnostic]:
        drawn = [d for d in self.flow.draws if d.axis in TENSOR_AXES]
        for same in _grouped(drawn, lambda d: (d.axis, _any_layer(d.module))):
            first, where = same[0], self._folded(d.module for d in same)
            began = self._since(first.since, first.axis)
            span = self._span(first.module, first.axis, OPTIONS) or next((r.span for r in began), None)
            yield Diagnostic(
                "equal-random",
                f"{where} draws the same random numbers on every rank of {first.axis}, each of which has another part: what is "
                "dropped repeats from part to part",
                span,
                f"let each rank draw its own: `{where}: local-random`",
                "warning",
                tuple(r for r in began if r.span != span),
            )

    def shapes(self) -> Iterator[Diagnostic]:
        def alike(o: OtherShape) -> Hashable:
            return self._key(o.module, "tp"), o.seen, o.whole

        for same in _grouped(self.flow.shapes, alike):
            first, where = same[0], self._folded(o.module for o in same)
            path = self._one(first.module)
            module, tp = self.model.get_submodule(path), self.program.mesh.sizes["tp"]
            numbers = heads_read(path, module, first.heads, first.whole.size, tp)
            otherwise = (
                "tensor parallelism splits heads and context parallelism rows, and nothing else: see how forward makes "
                "heads of features, and what splits its projections"
            )
            help_text, near = advised(self.program, numbers, otherwise)
            yield Diagnostic(
                "attention-shape",
                f"attention in {where} {first.described()}",
                near.rule.span if near else self._span(first.module, None, ()) or self._span_inside(path),
                help_text,
            )

    def fused(self) -> Iterator[Diagnostic]:
        for same in _grouped(self.flow.taken_apart, lambda t: (self._rule_of(t.projection), t.sizes)):
            first, where = same[0], self._folded(t.projection for t in same)
            parts = ", ".join(map(str, first.sizes)) or "<the sizes of its parts>"
            yield Diagnostic(
                "fused-features",
                f"the output features of {where} are taken apart in {self._folded(t.module for t in same)}, and a rank has "
                "a run of neighbours, not its slice of each part",
                self._span(first.projection, None, ("output",)),
                f"write `packed: [{parts}]`, which splits each part by itself",
            )

    def unpacked(self) -> Iterator[Diagnostic]:
        for same in _grouped(self.flow.unpacked, lambda u: self._rule_of(u.projection)):
            where = self._folded(u.projection for u in same)
            yield Diagnostic(
                "fused-features",
                f"`packed` gives each rank a slice of each part of what {where} makes, and nothing takes the parts from "
                f"each other before {self._folded(u.module for u in same)}, whose rows are in another order",
                self._span(same[0].projection, None, ("packed",)),
                "leave `packed` out: it is for projections that make several things at once, such as `q|k|v`",
            )

    def wholes(self) -> Iterator[Diagnostic]:
        def alike(w: WholeNeeded) -> Hashable:
            return self._key(w.since, w.axis), w.axis, w.operator, w.dim, w.written

        for same in _grouped(self.flow.wholes, alike):
            first, where = same[0], self._folded(w.module for w in same)
            shape = f"[{', '.join(map(str, first.shape))}]"
            if first.dim is None:
                message = f"`{first.operator}` in {where} uses a sum over {first.axis} of which each rank holds only its term"
                help_text = f"add them up before: `input: partial -> replicate` with `axis: {first.axis}` on what comes next"
            else:
                message = (
                    f"`{first.operator}` in {where} needs dimension {first.dim} of {shape} whole, and each rank of "
                    f"{first.axis} has its part of it"
                )
                help_text = self._whole_before(first)
            began = self._since(first.since, first.axis)
            around = self._span(first.module, first.axis, ("input", "layout"))
            span = around or (began[0].span if began else self._context_span())
            written = (Related(first.written, "here"),) if first.written else ()
            related = tuple(r for r in began if r.span != span)
            yield Diagnostic("needs-whole", message, span, help_text, related=(*written, *related))

    def _whole_before(self, needed: WholeNeeded) -> str:
        lies = f"shard({needed.dim}) -> replicate"
        if needed.axis == "cp":
            return (
                "context parallelism carries attention over the cut, and nothing else: around a module that does this, write "
                f"`{{style: prepare-io, axis: cp, input: {lies}, output: replicate -> shard({needed.dim})}}`"
            )
        began = self._folded([needed.since]) or "the root"
        return f"let {began} hand on the whole (`output: replicate`), or gather it before (`{lies}`)"

    def _rule_of(self, module: str) -> Hashable:
        own = self._application(module, None)
        return id(own.rule) if own else module

    def _context_span(self) -> Span | None:
        """The rule that makes attention context-parallel; without one, the first batch entry that is split."""
        rule = next((a.rule.span for a in self.program.of_slot("attention")), None)
        return rule or next((b.span for b in self.program.plan.batch.values()), None)

    def failure(self, failure: Failure) -> Diagnostic:
        where = self._folded([failure.module]) if failure.module else "the root"
        stage = f"{failure.phase} of " if failure.phase in ("forward", "backward") else ""
        made = [o for o in failure.operands if o.maker]
        axes = [a for a in TENSOR_AXES if self.program.mesh.sizes[a] > 1]
        operands = ""
        if made and axes:
            operands = "; it is given " + " and ".join(self._operand(o, axes) for o in failure.operands)
        spans = {self._span(o.maker or "", None, ("output", "layout", "input")): o for o in made}
        own = self._span(failure.module, None, OPTIONS)
        began = [
            r.span for o in failure.operands for a in axes if a in o.axes for r in self._since(o.axes[a], a)
        ]
        span = own or next((s for s in spans if s), None) or next(iter(began), None)
        related = tuple(
            Related(s, f"{self._folded([o.maker or ''])} hands this on")
            for s, o in spans.items()
            if s and s != span
        )
        found = left_out(self.program, self.model, self._one(failure.module), failure.text, related)
        if found is not None:
            return found
        if failure.phase == "loss" and self.flow.sharded_output and MIXED in failure.text:
            loss = (Related(failure.span, "the loss"),) if failure.span else ()
            message = f"the loss cannot take logits that lie sharded: {failure.text}"
            return Diagnostic("sharded-logits", message, span, SHARDED_LOSS, related=loss + related)
        numbers = failure.numbers
        if numbers is not None:
            numbers = dataclasses.replace(numbers, module=self._one(numbers.module))
        help_text, near = advised(self.program, numbers, _advice(failure, where))
        if near is not None:
            span = near.rule.span
            related = tuple(r for r in related if r.span != span)
        # A refusal of the runtime's own says what it is about; the operator before it has nothing to do with it.
        own_words = failure.error == "ContextParallelError"
        at = "" if own_words else f" at {failure.operator or 'no operator'}"
        return Diagnostic(
            "does-not-run",
            f"the plan does not run: {stage}{where} fails{at}: {failure.text}{operands}",
            span,
            help_text,
            related=related + self._taken_near(failure.module),
        )

    def _taken_near(self, module: str) -> tuple[Related, ...]:
        """Rules that take a style away from a module, from what is right inside it, or from what is around it."""
        path = self._one(module)
        around = [p for p, _ in self.model.named_modules() if path == p or path.startswith(f"{p}.")]
        inside = [f"{path}.{name}".lstrip(".") for name, _ in self.model.get_submodule(path).named_children()]
        return taken_away(self.program.plan.rules, [*around, *inside])

    def _operand(self, operand: Operand, axes: list[str]) -> str:
        shape = f"[{', '.join(map(str, operand.shape))}]"
        if operand.maker is None:
            return f"{shape} as it is held"
        lies = ", ".join(
            f"{'a part' if a in operand.axes else 'the same on every rank'} over {a}" for a in axes
        )
        return f"{shape} from {self._folded([operand.maker])} ({lies})"

    def _since(self, module: str, axis: str) -> tuple[Related, ...]:
        """Where a value began to vary."""
        span = self._span(module, axis, ("output", "layout", "input"))
        return (
            (Related(span, f"what {self._folded([module]) or 'the root'} hands on differs over {axis}"),)
            if span
            else ()
        )

    def _span(self, module: str, axis: str | None, options: Iterable[str]) -> Span | None:
        """The option, or the rule, of the nearest module around that stands on the axis."""
        path = module
        while True:
            found = self._application(path, axis)
            if found is not None:
                inside = path == module
                option = next((o for o in options if o in found.spans), None) if inside else None
                return found.spans[option] if option else found.rule.span
            if not path:
                return None
            path = path.rpartition(".")[0]

    def _span_inside(self, path: str) -> Span | None:
        """The first rule that stands inside a module; else that of context parallelism."""
        inside = (a for a in self.program.of_slot("params", "io") if within(a.module, path))
        return next((a.rule.span for a in inside), None) or self._context_span()

    def _application(self, module: str, axis: str | None) -> Application | None:
        path = self._one(module)
        for slot in ("params", "io", "attention"):
            for a in self.program.of_slot(slot):
                if a.module == path and (axis is None or axis in a.axes):
                    return a
        return None

    def _key(self, module: str, axis: str) -> Hashable:
        own = self._application(module, axis)
        return id(own.rule) if own else module

    def _style_of_like(self, module: str, axis: str) -> str:
        """The style of a module of the same class that keeps its parameters whole; `replicate` if there is none."""
        kind = type(self.model.get_submodule(self._one(module)))
        for a in self.program.of_slot("params"):
            if a.style == "sequence" and axis in a.axes and type(self.model.get_submodule(a.module)) is kind:
                return "sequence"
        return "replicate"

    def _one(self, path: str) -> str:
        """One path in the whole model that a path in the followed one stands for."""
        return next(self.flow.paths(path))

    def _folded(self, paths: Iterable[str]) -> str:
        whole = [each for path in paths for each in self.flow.paths(path)]
        if "" in whole:
            return "the root"
        folded = fold_paths(whole)
        return ", ".join(folded[:3]) + (f" and {len(folded) - 3} more" if folded[3:] else "")


def _advice(failure: Failure, where: str) -> str:
    if MIXED in failure.text:
        return f"{where} meets a DTensor with a plain tensor: give it a style, or let what comes before hand on plain tensors"
    if any(word in failure.text for word in ("broadcast", "reduction dim", "must match", "shape", "size")):
        return "tensors that lie otherwise than each other meet there: see `input` and `output` of the rules around"
    return f"`python -m parallelizer explain {where}` shows the rules there"


def _untraceable(failure: Failure) -> Diagnostic:
    where = failure.module or "the root"
    message = (
        f"the step cannot run on fake tensors: {where} at {failure.operator or 'its start'}: {failure.error}"
    )
    reason = "" if failure.text in ("", failure.operator) else f": {failure.text}"
    return Diagnostic("trace-failed", message + reason, failure.span, failure.remedy, "warning")


def _any_layer(module: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
