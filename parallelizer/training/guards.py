"""A run's reaction to values that are not finite, to ranks that drift apart, and to ranks that lose each
other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.runtime.guards.agreement import Agreement, out_of_step
from parallelizer.runtime.guards.drift import find_drift, ranks_drifted
from parallelizer.runtime.guards.nonfinite import find_nonfinite, nonfinite
from parallelizer.runtime.state import device_of
from parallelizer.runtime.step import Loss
from parallelizer.runtime.taken_step import Step
from parallelizer.training.settings import Settings

MOST_SKIPPED = 10
"""So many steps in a row that are not finite end the run, also one that skips them: it learns nothing any more."""


class Guards:
    """Checks each step: for values that are not finite, and for ranks that hold different values or are at
    different steps. All ranks create and call it together; `Job.guards` makes it.

    Call `train_step` with `skip_nonfinite=True`: otherwise a step that is not finite is applied before it
    is found.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        leads: bool,
    ) -> None:
        self.settings, self.model, self.optimizer, self.loss = settings, model, optimizer, loss
        self.leads = leads
        self.agreement = Agreement(settings.collective_timeout)
        self.in_a_row = 0
        self.told: tuple[object, ...] = ()
        self.begun = 0

    def words(self, step: int, samples: int, *, stop: int = 0) -> torch.Tensor:
        """What this rank tells the others in the step of this number, for `train_step`: the position of the run in
        the data before it, and the signal that asked this rank to `stop`, or 0.
        """
        self.begun = step
        return self.agreement.words(step, stop=stop, position=samples)

    def at_once(self, step: int) -> bool:
        """Whether `after` is to be called before the next step begins, the same on every rank. Otherwise it may be called
        when the next one was launched with `train_step(after=)`, so that the device does not wait for the host.

        It is where ranks are compared behind the step, and where steps that are not finite are skipped: the next step would
        be left out too, and the source be looked for with the parameters of a later one.
        """
        every = self.settings.check_every
        return self.settings.on_nonfinite == "skip" or bool(every and step % every == 0)

    def after(
        self,
        step: int,
        done: Step,
        parts: Sequence[Mapping[str, torch.Tensor]],
        *,
        samples: int | None = None,
        stop: int = 0,
    ) -> int:
        """Check the step of this number, from 1, and its parts of the batch. `samples` is the position of
        the run in the data. If `train_step` was given `words`, ranks have told each other these already, and
        `samples` and `stop` are not read. The step may be the one before the last that was launched: see `at_once`.

        Returns the signal that asked some rank to `stop`, or 0: the same on every rank. Raises PlanError on
        all ranks: `out-of-step`, `nonfinite` and `ranks-drifted`, as the settings say. Parameters and
        optimizer are then those of the last applied step. Collective.
        """
        if done.words is None:
            self.agreement.tell(step, stop=stop, position=samples)
            verdict = self.agreement.heard()
        else:
            verdict = self.agreement.read(done.words)
        # First of all: what follows is collective, and would meet another step's.
        apart = out_of_step(verdict)
        if apart is not None:
            raise PlanError([apart])
        self._nonfinite(step, done, parts)
        every = self.settings.check_every
        if every and step % every == 0:
            self.compare(step)
        return verdict.stop

    def before_saving(self, step: int) -> None:
        """Compare the ranks as `compare` does, because a checkpoint keeps one rank's copy of values that
        all ranks hold. Does nothing if this step was checked already, or if checks are off. Collective.
        """
        every = self.settings.check_every
        if every and step % every:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare what ranks hold alike, now. Raises PlanError `ranks-drifted`, or warns of it. Collective."""
        drifts = find_drift(self.model, self.optimizer)
        on_drift = self.settings.on_drift
        # On GPUs kernels without a fixed order of summation give ranks other last bits, which the steps amplify.
        warns = on_drift == "warn" or (on_drift == "auto" and device_of(self.model).type != "cpu")
        if drifts and not warns:
            raise PlanError([ranks_drifted(step, drifts)])
        which = tuple((one.name, one.state, one.ranks) for one in drifts)
        if drifts and which != self.told:  # the same again is no news
            self._warn(ranks_drifted(step, drifts, "warning"))
        self.told = which

    def _nonfinite(self, step: int, done: Step, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        if done.skipped is None:
            self.in_a_row = 0
            return
        if done.skipped.follows:  # nothing is wrong with this one
            return
        self.in_a_row += 1
        found = find_nonfinite(self.model, parts, self.loss, done.skipped, later=self.begun > step)
        finding = nonfinite(step, done, found)
        if self.settings.on_nonfinite == "skip" and self.in_a_row < MOST_SKIPPED:
            self._warn(replace(finding, severity="warning", help="the step is skipped; the run continues"))
            return
        if self.settings.on_nonfinite == "skip":
            message = f"{finding.message}; it is the {MOST_SKIPPED}th step in a row that is skipped"
            help_text = "resume from an earlier checkpoint, with a lower optim.lr"
            finding = replace(finding, message=message, help=help_text)
        raise PlanError([finding])

    def _warn(self, finding: Diagnostic) -> None:
        if self.leads:
            show_diagnostics.write([finding], sys.stderr, summary=False)
