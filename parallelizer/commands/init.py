"""`python -m parallelizer init`: exit status 0 when a plan was written and proven, 1 when it was not proven or the
configuration is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.configuration.setup import Setup
    from parallelizer.language.workload import Workload
    from parallelizer.propose.from_forward.facts import Facts
    from parallelizer.propose.from_forward.positions import Carriers
    from parallelizer.propose.from_forward.rules import Choice
    from parallelizer.propose.from_forward.trial import Deadline


NAME = "init"
DOC = "propose a plan for a model without one, from the operations of its forward"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options, where the plan goes, and whether it is proven."""
    add_setup_options(parser)
    parser.add_argument("--output", metavar="FILE", help="the file for the plan (stdout)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--unproven", action="store_true", help="do not run the plan on ranks; only validate it"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=60.0, metavar="N",
        help="seconds for the search (60); the output names what was not examined",
    )  # fmt: skip


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError("a number of seconds, above 0")
    return seconds


MORE = 4
"""So many times its limit is proposed where `init` did not get through."""


@dataclass(frozen=True)
class Proposed:
    """The text of a plan; `doubt` says why it is not proven, if it was to be."""

    text: str
    doubt: str | None


def run(arguments: argparse.Namespace) -> int:
    """Propose a plan for the configured model, and write it. Returns the exit status."""
    began = time.monotonic()
    import_torch()
    try:
        _check_target(arguments.output, arguments.force)
        # What a model prints must not stand in the plan.
        with contextlib.redirect_stdout(sys.stderr):
            proposed = propose(lambda more: read_setup(arguments, more), arguments, began)
        if arguments.output is None:
            sys.stdout.write(proposed.text)
        else:
            _write(arguments.output, proposed.text)
    except PlanError as error:
        show_diagnostics.write(error.diagnostics, sys.stderr)
        return 1
    return 1 if proposed.doubt else 0


def propose(
    setup_of: Callable[[list[str]], Setup], arguments: argparse.Namespace, began: float | None = None
) -> Proposed:
    """A plan; `setup_of` reads the configuration with some more overrides. The time to look and to try is counted from `began`,
    by the monotonic clock. Raises PlanError when the model cannot be built.
    """
    import tempfile

    from parallelizer.propose.from_forward.retreat import Retreat
    from parallelizer.propose.from_forward.rules import Choice, units
    from parallelizer.propose.from_forward.trial import Deadline, Trials
    from parallelizer.propose.from_forward.write_plan import WIDTH, write_plan

    deadline = Deadline(arguments.seconds, time.monotonic() if began is None else began)
    with tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text('rules: {"": fsdp}\n')
        # The plan that the model config names is what is to be written: it need not be there yet.
        setup = setup_of([f"plan={path}"])
    model = setup.build_model()
    _check_length(setup, model)
    _tell("watching a forward of the model")
    facts, found, failure = _look(setup, model, deadline)
    batch = {
        name: f"{{dim: {dim}, pad: {entry.ignore}}}" if entry.ignore is not None else str(dim)
        for name, entry in setup.workload.entries.items()
        if (dim := entry.sequence_dim()) is not None
    }
    if found.input:
        batch[found.input] = "positions"
    said: list[str] = []
    if failure:
        said.append(f"its forward could not be watched ({failure}): nothing but fsdp is proposed")
    context = bool(facts.attentions) and any(v != "positions" for v in batch.values())
    labels = {
        name: str(dim)
        for name, entry in setup.workload.entries.items()
        if entry.ignore is not None and (dim := entry.sequence_dim()) is not None
    }
    no_context = None if context or failure else _no_context(facts)
    full = Choice(
        units=frozenset(units(facts)),
        context=context,
        batch=batch if context or found.input else {},
        buffers=found.buffers if context else {},
    )
    title = _title(model, arguments.overrides, WIDTH)

    def text(choice: Choice) -> str:
        return write_plan(facts, choice, title)

    said += _lists_of_experts(facts)
    trials = Trials(setup, model, deadline, _tell)
    settled = Retreat(facts, trials, text, labels=labels, no_context=no_context).settle(
        full, prove=not arguments.unproven
    )
    said += settled.said
    said += _left(facts, settled.choice)
    if settled.doubt:
        said.append(f"not proven: {settled.doubt}")
    said = _together(said)
    for sentence in said:
        _tell(sentence)
    if deadline.reached:
        more = max(60, math.ceil(MORE * arguments.seconds))
        _tell(f"the limit of {arguments.seconds:g} s was reached: run again with --seconds {more}")
    return Proposed(write_plan(facts, settled.choice, title, said), settled.doubt)


def _check_length(setup: Setup, model: nn.Module) -> None:
    """No plan helps a model whose tables are shorter than the batch's sequence."""
    try:
        setup.compile(model)
    except PlanError as error:
        if too_long := [d for d in error.diagnostics if d.code == "sequence-too-long"]:
            raise PlanError(too_long) from None


def _tell(sentence: str) -> None:
    sys.stderr.write(f"init: {sentence}\n")
    sys.stderr.flush()


def _title(model: nn.Module, overrides: Sequence[str], width: int) -> str:
    command = ["python", "-m", "parallelizer", "init"]
    for words in ([*command, *overrides], command):
        title = f"{type(model).__name__}, as `{shlex.join(words)}` proposes it: by what its forward does, not by names."
        if len(title) <= width:
            break
    return title


def _no_context(facts: Facts) -> str:
    if facts.attentions:
        return "no entry of the batch has a sequence"
    if facts.written_out:
        return (
            f"attention is written out, at {facts.written_out}; write `scaled_dot_product_attention(q, k, v, is_causal=True)`, "
            "or a call of flex_attention, in place of the products and the softmax"
        )
    return "the forward has no attention"


def _lists_of_experts(facts: Facts) -> list[str]:
    """Sentences on the loops over experts, for which no `experts` rule is proposed."""
    from parallelizer.propose.globs import pattern

    loops = dict.fromkeys(r.within for r in facts.regions if r.within and r.within not in facts.experts)
    named = ", ".join(dict.fromkeys(pattern(path) for path in loops))
    if not named:
        return []
    return [
        f"the experts in {named} are not shared out over ep: `init` proposes no rule for a loop over experts; if the forward "
        f"of {named} takes the tokens, the numbers of their experts and the weights, write `{named}: experts`, else move the "
        "loop into such a module, or make the list a `parallelizer.ExpertList` (docs/experts.md)"
    ]


def _together(sentences: Sequence[str]) -> list[str]:
    """Sentences of one reason as one: each is `what: why`."""
    by_reason: dict[str, list[str]] = {}
    for sentence in sentences:
        what, _, why = sentence.partition(": ")
        by_reason.setdefault(why or what, []).append(what)
    return [f"{'; '.join(what)}: {why}" if what != [why] else why for why, what in by_reason.items()]


def _left(facts: Facts, choice: Choice) -> list[str]:
    """Sentences on modules that stay whole because of what the forward does with them."""
    from parallelizer.propose.from_forward.rules import unsplit

    whole: dict[str, list[str]] = {}
    if not choice.units:
        return []
    for path, why in unsplit(facts).items():
        whole.setdefault(why, []).append(path)
    return [
        f"{', '.join(path or 'the root' for path in paths)} {'is' if len(paths) == 1 else 'are'} not split over tp: {why}"
        for why, paths in whole.items()
    ]


def _look(setup: Setup, model: nn.Module, deadline: Deadline) -> tuple[Facts, Carriers, str | None]:
    """What the model does, and what of it carries the sequence, from children; why nothing is known, if nothing is."""
    from parallelizer.child.in_time import Failed, NotInTime
    from parallelizer.proof.tiny import shrink
    from parallelizer.propose.from_forward.facts import Facts
    from parallelizer.propose.from_forward.positions import Carriers, carriers
    from parallelizer.propose.from_forward.roles import blocks

    small: nn.Module | None
    try:
        shrunk = shrink(setup)[0]
        small = shrunk.build_model()
        whole = shrunk.whole_model(small)
    except PlanError:
        small = whole = None
    found = Carriers()
    try:
        with contextlib.suppress(NotInTime, Failed):
            found = deadline.within(lambda: carriers(model, setup.workload, small, whole), 0.3)
        facts = deadline.within(lambda: _facts(model, setup.workload, found.input), 0.6)
    except (Failed, NotInTime) as error:
        names = tuple(path for path, _ in model.named_modules())
        return Facts(modules=names, blocks=tuple(blocks(model, names))), Carriers(), str(error)
    return facts, found, None


def _facts(model: nn.Module, workload: Workload, positions: str | None) -> Facts:
    from parallelizer.propose.from_forward.observe import watch
    from parallelizer.propose.from_forward.roles import roles

    return roles(model, watch(model, workload, positions))


def _check_target(path: str | None, force: bool) -> None:
    from parallelizer.report.targets import refuse_existing

    if path is None:
        return
    refuse_existing(path, force=force)
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        message = f"{path} cannot be written: there is no folder {folder}"
        raise PlanError(
            [Diagnostic("file-unwritable", message, None, "make the folder, or name another file")]
        )


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise PlanError([Diagnostic("file-unwritable", message, None, "name another file")]) from None
    sys.stderr.write(f"{path}: written\n")
