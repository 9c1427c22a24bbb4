"""`does-not-run`: the step fails under the plan, and without it does not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from parallelizer.compiler.match import taken_away
from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.plan import TENSOR_AXES
from parallelizer.simulate.checks.followed_step import MIXED, Followed
from parallelizer.simulate.follow.flow import StepFailure
from parallelizer.simulate.follow.varying import Operand
from parallelizer.simulate.whole_numbers import IN_PLACE, QUOTED_ROOT, advised
from parallelizer.styles.context_parallel.buffers import WHOLE
from parallelizer.styles.target import forward_names

FAILS_HERE = "it fails here"

OWN_WORDS = ("ContextParallelError", "ExpertsError")
"""The runtime's own refusals."""


def does_not_run(followed: Followed) -> Iterator[Diagnostic]:
    """A step that raises under the plan: where, at which operator, and what that was given. Sizes that the forward reads
    of the whole model are named, since they are the likeliest cause.
    """
    failure = followed.failure
    if failure is None:
        return
    where = followed.folded([failure.module]) if failure.module else "the root"
    where = "the loss" if failure.phase == "loss" else where
    stage = f"{failure.phase} of " if failure.phase in ("forward", "backward") else ""
    axes = [a for a in TENSOR_AXES if followed.program.mesh.sizes[a] > 1]
    operands = ""
    if any(o.maker for o in failure.operands) and axes:
        operands = "; its inputs are " + " and ".join(_operand(followed, o, axes) for o in failure.operands)
    span, related = followed.blamed(failure)
    numbers = failure.numbers
    if numbers is not None:
        numbers = dataclasses.replace(numbers, module=followed.one(numbers.module))
    advice = (
        _whole_entries(followed, failure)
        or _whole_parameters(followed, failure)
        or _advice(failure, followed.one(failure.module))
    )
    help_text, near = advised(followed.program, numbers, advice)
    if near is not None:
        span = near.rule.span
        related = tuple(r for r in related if r.span != span)
    if failure.span is not None:
        related = (Related(failure.span, FAILS_HERE), *related)
    # A refusal of the runtime's own says what it is about; the operator before it has nothing to do with it.
    own_words = failure.error in OWN_WORDS
    at = "" if own_words or not failure.computes else f" at {failure.operator}"
    yield Diagnostic(
        "does-not-run",
        f"the plan does not run: {stage}{where} fails{at}: {_said(failure.text) or failure.error}{operands}",
        span,
        help_text,
        related=related + _taken_near(followed, failure.module),
    )


def _taken_near(followed: Followed, module: str) -> tuple[Related, ...]:
    """Rules that take a style away from a module, from what is right inside it, its parameters too, or from what is around it."""
    path = followed.one(module)
    around = [p for p, _ in followed.model.named_modules() if path == p or path.startswith(f"{p}.")]
    module_at = followed.model.get_submodule(path)
    children = [*module_at.named_children(), *module_at.named_parameters(recurse=False)]
    inside = [f"{path}.{name}".lstrip(".") for name, _ in children]
    return taken_away(followed.program.plan.rules, [*around, *inside])


def _operand(followed: Followed, operand: Operand, axes: list[str]) -> str:
    shape = f"[{', '.join(map(str, operand.shape))}]"
    if operand.maker is None:
        return f"{shape}, a parameter or buffer"
    lies = ", ".join(f"{'a part' if a in operand.axes else 'the same on every rank'} over {a}" for a in axes)
    return f"{shape} from {followed.folded([operand.maker])} ({lies})"


_BROADCAST = re.compile(
    r"Attempting to broadcast a dimension of length \d+ at (-?\d+)! Mismatching argument at index \d+ had "
    r"torch\.Size\((\[[\d, ]*\])\); but expected shape should be broadcastable to (\[[\d, ]*\])"
)


def _said(text: str) -> str:
    """What torch says, where its words are about its own code in those of the tensors."""
    found = _BROADCAST.match(text)
    if found is None:
        return text
    dim, one, other = found.groups()
    return f"tensors of sizes {other} and {one} are combined, and dimension {dim} differs"


def _of_sizes(failure: StepFailure) -> bool:
    return any(word in failure.text for word in ("broadcast", "reduction dim", "must match", "shape", "size"))


def _whole_entries(followed: Followed, failure: StepFailure) -> str | None:
    """What to do about entries of the batch that stay whole, where the forward may read them token by token."""
    program = followed.program
    taken = forward_names(followed.model) or ()
    whole = [name for name in sorted(WHOLE) if name in taken and name not in program.plan.batch]
    if program.mesh.sizes["cp"] == 1 or not whole or not _of_sizes(failure):
        return None
    entries = ", ".join(f"`{name}: 1`" for name in whole)
    return (
        f"{', '.join(whole)} stays whole over cp, as attention needs it: if the forward reads it token by token, add {entries} "
        f"to buffers.batch of {program.plan.file}; otherwise check `input` and `output` in the rules of the modules around it"
    )


def _whole_parameters(followed: Followed, failure: StepFailure) -> str | None:
    """What to do about parameters of the module that are whole, where one of the two sizes that do not fit is that of a
    dimension of them, and the other one a rank's share of it.
    """
    ranks = followed.program.mesh.sizes["tp"]
    if ranks == 1 or not _of_sizes(failure):
        return None
    path, sizes = followed.one(failure.module), set(map(int, re.findall(r"\d+", _said(failure.text))))
    split = {n for a in followed.program.of_slot("params") if a.module == path for n in a.params}
    for name, parameter in followed.model.get_submodule(path).named_parameters(recurse=False):
        for dim, size in enumerate(parameter.shape):
            if name not in split and size % ranks == 0 and {size, size // ranks} <= sizes:
                rule = re.sub(r"(?<![^.])\d+(?![^.])", "*", f"{path}.{name}".lstrip("."))
                return (
                    f"{rule} is whole on every rank, and what it meets has {size // ranks} of its {size}: split it by the rule "
                    f"`{rule}: {{style: shard-params, params: shard({dim})}}`"
                )
    return None


def _advice(failure: StepFailure, path: str) -> str:
    if MIXED in failure.text:
        meets = f"{path or 'the root'} mixes a DTensor with a plain tensor"
        return f"{meets}: give it a style, or let the module before it return plain tensors"
    if IN_PLACE in failure.text:
        return "write `own: true` in the `rowwise` rule whose output this is, or `out = out + ...` in the forward"
    if _of_sizes(failure):
        return "the tensors have different placements there: check `input` and `output` in the rules of the modules around it"
    return f"`python -m parallelizer explain {path or QUOTED_ROOT}` shows the rules there"
