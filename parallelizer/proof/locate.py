"""Where a run first differs, in the order of execution: initial values, outputs, loss, gradients, norm,
updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from parallelizer.proof.compare import ProofVerdict
from parallelizer.proof.divergence import Comparison, Divergence, at_step, found
from parallelizer.proof.locate_outputs import output_gradients, outputs
from parallelizer.proof.locate_parameters import buffers, gradients, initial_values, states, updates
from parallelizer.proof.observe import STEPS, Observation
from parallelizer.styles.application import Program


def locate(
    program: Program, reference: Observation, ranks: Sequence[Observation], verdict: ProofVerdict
) -> Divergence | None:
    """The first difference between the reference and the ranks; None when nothing differs."""
    return next(_all(Comparison(program, reference, ranks, verdict)), None)


def _all(case: Comparison) -> Iterator[Divergence]:
    yield from initial_values(case)
    for step in range(STEPS):
        case = dataclasses.replace(case, step=step)
        yield from outputs(case, step, "forward", "")
        right = all(d.passed for d in case.verdict.of("loss") if d.step == step)
        yield from output_gradients(case, step, right)
        if not right:
            reference, run = case.reference.losses[step], case.ranks[0].losses[step]
            yield Divergence(
                "",
                "loss",
                None,
                None,
                f"the loss{at_step(step)} is {run:.9g}, the reference {reference:.9g}, and "
                + (
                    "modules' outputs cannot be compared, because the batch was dealt out as its own documents, masks or "
                    "padding say: `balance: head-tail` and a length that divides show more"
                    if case.by_batch
                    else "every module's output is right: the sums of losses and of tokens do not go over all data "
                    "ranks once"
                ),
            )
        yield from gradients(case, step)
        yield from _norm(case, step)
        yield from updates(case, step)
    case = dataclasses.replace(case, step=STEPS)
    yield from states(case)
    yield from outputs(case, STEPS, "evaluation", " in evaluation")
    yield from _logits(case)
    yield from buffers(case)
    yield from _scenes(case)


def _scenes(case: Comparison) -> Iterator[Divergence]:
    """Every step is right, and a scene is not."""
    for at, seen in enumerate(case.reference.scenes):
        wrong = [d for d in case.verdict.differences if d.step == STEPS + at and not d.passed]
        if wrong:
            worst = max(wrong, key=lambda d: d.share)
            name = f" of {worst.name}" if worst.name else ""
            text = f"with {seen.scene} the {worst.what}{name} differs: a rank decides otherwise by its own values"
            yield Divergence("", "forward", None, None, text, seen.scene.line)


def _logits(case: Comparison) -> Iterator[Divergence]:
    if any(not d.passed for d in case.verdict.of("logits")):
        text = "the logits in evaluation, put back in the original order, are not the reference's, and every"
        text += (
            " module's output is right: the order, or what the model does behind its last module, is wrong"
        )
        yield found(case, ".", "evaluation", None, text)


def _norm(case: Comparison, step: int) -> Iterator[Divergence]:
    if any(d.step == step and not d.passed for d in case.verdict.of("gradient norm")):
        run, reference = case.ranks[0].norms[step], case.reference.norms[step]
        side = "some are counted more than once" if run > reference else "some are left out"
        text = f"the gradient norm{at_step(step)} is {run:.9g}, the reference's {reference:.9g}"
        yield Divergence("", "clip", None, None, f"{text}, and every gradient is right: {side}")
