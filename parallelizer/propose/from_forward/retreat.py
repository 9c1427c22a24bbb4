"""From everything that looks possible to what passes: what the checks refuse is taken back, and why is said."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from parallelizer.child.in_time import NotInTime
from parallelizer.propose.from_forward import counted
from parallelizer.propose.from_forward.facts import Facts
from parallelizer.propose.from_forward.gathered import FORMS, gathered
from parallelizer.propose.from_forward.rules import Choice, ends, key, may_shard_logits, units
from parallelizer.propose.from_forward.trial import Trials, meshed
from parallelizer.propose.globs import pattern

TP, CP, BOTH, DATA = {"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}, {"dp_shard": 2}
SHARED = {"ep": 2}

Text = Callable[[Choice], str]


@dataclass(frozen=True)
class Settled:
    """What stands, and sentences on what does not, each with its reason. `doubt` says why it is not proven, if it was to be."""

    choice: Choice
    said: tuple[str, ...]
    doubt: str | None = None


class Retreat:
    """Finds the most of a proposal that passes on small meshes."""

    def __init__(
        self,
        facts: Facts,
        trials: Trials,
        text: Text,
        *,
        labels: Mapping[str, str] | None = None,
        no_context: str | None = None,
    ) -> None:
        """`labels` are the entries of the batch that only the loss takes, with their buffers; `no_context` says why the
        batch cannot be split over cp.
        """
        self.facts, self.trials, self.text = facts, trials, text
        self.labels, self.no_context = labels or {}, no_context
        self.no_inside, self.prove = "", False
        self.compared: dict[tuple[str, int, bool], str | None] = {}
        self.before: Choice | None = None  # what stood before the sequence was split inside the model
        self.full_batch: Mapping[str, str] = {}
        self.all = units(facts)
        self.best: Choice | None = None  # the most that has validated so far

    def settle(self, full: Choice, *, prove: bool) -> Settled:
        """Try the whole, then less: first whether it validates, then, if `prove`, whether it is proven equal."""
        said: list[str] = []
        self.full_batch, self.prove = full.batch, prove
        try:
            choice = self._passing(full, said, proven=False)
        except NotInTime:
            choice = self.best or dataclasses.replace(
                full, units=frozenset(), context=False, batch={}, buffers={}
            )
            said.append(f"the time limit was reached; not tried: {self._untried(full, choice)}")
        choice = self._drawing_apart(choice, said)
        choice = self._sharing_out(choice, said)
        doubt = None
        if prove:
            try:
                before = choice
                choice = self._passing(choice, said, proven=True)
                if choice.gathered != before.gathered and not choice.random:
                    choice = self._drawing_apart(choice, said)
                doubt = self._doubt(choice)
                if doubt and ends(self.facts) and not self.trials.unproven:
                    inside = dataclasses.replace(choice, apart=False)
                    if (without := self._doubt(inside)) is None:
                        said.append(f"embedding and head are in the root's fsdp unit: {doubt}")
                        choice, doubt = inside, without
                if doubt and choice.experts and self.facts.experts and not self.trials.unproven:
                    whole = dataclasses.replace(choice, experts=False)
                    if (without := self._doubt(whole)) is None:
                        said.append(f"experts are not shared out over ep: {doubt}")
                        choice, doubt = whole, without
            except NotInTime:
                doubt = "the time limit was reached before the proof: `verify` proves it, and `--seconds` gives more time"
        self._say_context(choice, said)
        return Settled(choice, tuple(dict.fromkeys(said)), doubt)

    def _drawing_apart(self, choice: Choice, said: list[str]) -> Choice:
        """With random numbers of each rank's own where dropout would repeat from part to part."""
        if not choice.units:
            return choice
        if not (
            choice.context or choice.gathered
        ):  # what context parallelism was taken out of has not been followed as it is now
            with contextlib.suppress(NotInTime):
                self.trials.refusal(self.text(choice), TP)
        modules = frozenset(self.trials.drawn(self.text(choice)))
        if not modules:
            return choice
        more = dataclasses.replace(choice, random=modules)
        try:
            reason = self.trials.refusal(self.text(more), BOTH if choice.context or choice.gathered else TP)
        except NotInTime:
            reason = "the time limit was reached"
        if reason is None:
            return more
        where = ", ".join(dict.fromkeys(map(pattern, sorted(modules))))
        said.append(
            f"dropout in {where} is the same on every rank of tp, for other parts [equal-random]: {reason}"
        )
        return choice

    def _sharing_out(self, choice: Choice, said: list[str]) -> Choice:
        """With experts that are shared out over ep, if the checks allow it."""
        if not self.facts.experts:
            return choice
        try:
            reason = self.trials.refusal(self.text(choice), {**DATA, **SHARED})
        except NotInTime:
            reason = "the time limit was reached"
        if reason is None:
            return choice
        said.append(f"experts are not shared out over ep: {reason}")
        return dataclasses.replace(choice, experts=False)

    def _doubt(self, choice: Choice) -> str | None:
        if self.trials.unproven:
            return (
                f"it was only validated, because the model itself cannot be compared: {self.trials.unproven}"
            )
        mesh: Mapping[str, int] = {**DATA, "tp": 2} if choice.units else DATA
        if self.facts.experts and choice.experts:
            mesh = {**mesh, **SHARED}
        reason = self.trials.refusal(self.text(choice), mesh, proven=True)
        if reason:
            return f"on {meshed(mesh)} it does not hold: {reason}"
        if self.trials.unproven:
            return (
                f"it was only validated, because the model itself cannot be compared: {self.trials.unproven}"
            )
        return None

    def _untried(self, full: Choice, choice: Choice) -> str:
        """What of the whole proposal is not in a choice."""
        missing = [self._called(unit) for unit in self.all if unit in full.units - choice.units]
        missing += ["a split stream"] * (full.is_sharded and not choice.is_sharded and bool(choice.units))
        missing += ["context parallelism"] * (full.context and not (choice.context or choice.gathered))
        return ", ".join(missing) or "a part of it"

    def _validated(self, choice: Choice, mesh: Mapping[str, int], proven: bool) -> str | None:
        """As the trials say. What does validate over tp is remembered, without the axes that it was not tried on."""
        reason = self.trials.refusal(self.text(choice), mesh, proven=proven)
        if reason is None and not proven and "tp" in mesh:
            alone = dataclasses.replace(choice, context=False, buffers={})
            self.best = choice if "cp" in mesh else alone
        return reason

    def _passing(self, full: Choice, said: list[str], *, proven: bool) -> Choice:
        """The most that passes; where everything does on both axes at once, each alone is not asked for."""
        if full.units and (full.context or full.gathered) and self._compared(full, BOTH, proven) is None:
            return full
        choice = self._tensor(full, said, proven=proven)
        return self._context(choice, said, proven=proven)

    def _tensor(self, full: Choice, said: list[str], *, proven: bool) -> Choice:
        if not full.units:
            return full
        first = self._tp(full, proven)
        if first is None:
            return full
        gathered = _of_logits(first)
        for choice in self._forms(full, gathered):
            reason = self._tp(choice, proven)
            if gathered and reason is not None:  # why the stream stays whole, then
                first, gathered = reason, False
            if reason is None:
                self._say_form(full, choice, first, said)
                break
        else:
            choice = self._one_by_one(full, said, proven)
        return self._with_sharded_logits(full, choice, said, proven)

    def _with_sharded_logits(self, full: Choice, choice: Choice, said: list[str], proven: bool) -> Choice:
        """The choice with logits that stay as they lie, if it passes so."""
        if not full.sharded_logits or not may_shard_logits(self.facts, choice):
            return choice
        sharded = dataclasses.replace(choice, sharded_logits=True)
        reason = self._tp(sharded, proven)
        if reason is None:
            return sharded
        said.append(f"every rank of tp holds all logits: {reason}")
        return choice

    def _one_by_one(self, full: Choice, said: list[str], proven: bool) -> Choice:
        """What passes when units are added one after the other to a stream that is whole."""
        kept = dataclasses.replace(
            full, units=frozenset(), stream="replicate", sharded_logits=False, random=frozenset()
        )
        for unit in self.all:
            if unit not in full.units:
                continue
            reasons: list[str] = []
            for divided in dict.fromkeys((full.divided, False)):
                more = dataclasses.replace(kept, units=kept.units | {unit}, divided=divided)
                reason = self._tp(more, proven)
                if reason is None:
                    kept = more
                    break
                reasons.append(reason)
            else:
                said.append(f"{self._called(unit)} is not split over tp: {self._why(unit, reasons[0])}")
        if not kept.units or not full.is_sharded:
            return kept
        sharded = dataclasses.replace(kept, stream="shard(1)")
        reason = self._tp(sharded, proven)
        if reason is None:
            return sharded
        said.append(f"the stream is not split over tp (no sequence parallelism): {reason}")
        return kept

    def _forms(self, full: Choice, gathered: bool) -> Iterator[Choice]:
        """Variants of the whole proposal, with `gathered` logits first where these are to blame, else last."""
        counts = any(region.divide for region in self.facts.regions) and full.divided
        forms: list[Choice] = []
        for stream in ("shard(1)", "replicate") if full.is_sharded else ("replicate",):
            random = full.random if stream == full.stream else frozenset()
            form = dataclasses.replace(full, stream=stream, random=random)
            forms += [form, *([dataclasses.replace(form, divided=False)] if counts else [])]
        with_whole = [dataclasses.replace(form, sharded_logits=False) for form in forms]
        if not full.sharded_logits or not may_shard_logits(self.facts, full):
            yield from with_whole
        elif gathered:
            yield from (*with_whole, *forms)
        else:
            yield from (*(form for form in forms if form != full), with_whole[0])

    def _say_form(self, full: Choice, choice: Choice, first: str, said: list[str]) -> None:
        if full.is_sharded and not choice.is_sharded:
            said.append(f"the stream is not split over tp (no sequence parallelism): {first}")

    def _context(self, choice: Choice, said: list[str], *, proven: bool) -> Choice:
        """With the sequence split over cp: in the batch, or else inside the model, if that passes."""
        if choice.context or choice.gathered:
            reason = self._over_cp(choice, proven)
            if reason is None:
                return choice
            if choice.context:
                self.no_context = reason
        elif proven:  # it was tried before
            return choice
        for form in self._inside(choice):
            refused = self._over_cp(form, proven)
            self.no_inside = refused or ""
            if refused is None:
                return form
        if choice.gathered and self.before is not None and self.before.is_sharded:
            choice = self._tensor(self.before, said, proven=proven)
        # Positions that the batch brings are of use to a stream that is split over tp too.
        batch = self.full_batch if "positions" in self.full_batch.values() else {}
        return dataclasses.replace(choice, context=False, gathered="", batch=batch, buffers={})

    def _over_cp(self, choice: Choice, proven: bool) -> str | None:
        reason = self._compared(choice, CP, proven)
        if reason is None and choice.units:
            reason = self._compared(choice, BOTH, proven)
        return reason

    def _compared(self, choice: Choice, mesh: Mapping[str, int], proven: bool) -> str | None:
        """As `_validated`; a split inside the model with which the model itself cannot be compared, and without which it can, is
        refused: what else there is stays proven.
        """
        key = (self.text(choice), len(mesh), proven)
        if key not in self.compared:
            before = self.trials.unproven
            reason = self._validated(choice, mesh, proven)
            if choice.gathered and reason is None and before is None and self.trials.unproven:
                reason, self.trials.unproven = self.trials.unproven, None
            self.compared[key] = reason
        return self.compared[key]

    def _inside(self, choice: Choice) -> Iterator[Choice]:
        """The choice with a sequence that is split inside the model; those that give less modules the whole of it come first."""
        if self.no_context is None:
            return
        if not choice.gathered:
            self.before = choice
        for what in FORMS:
            found = gathered(self.facts, what)
            # Validation does not see positions that attention itself counts: calls of attention need a proof.
            if found is None or what == choice.gathered or (found.exact and not self.prove):
                continue
            batch = self.labels if found.heads else {}
            yield dataclasses.replace(
                choice,
                context=False,
                gathered=what,
                stream="replicate",
                batch=batch,
                buffers={},
                random=frozenset() if choice.is_sharded else choice.random,
            )

    def _say_context(self, choice: Choice, said: list[str]) -> None:
        """How the sequence is split over cp, if not by the batch."""
        if choice.context or self.no_context is None:
            return
        found = gathered(self.facts, choice.gathered) if choice.gathered else None
        if found is not None and choice.units and self.before is not None and self.before.is_sharded:
            said.append(
                "the stream is not split over tp (no sequence parallelism): over cp it is split inside the model"
            )
        if found is None:
            inside = f"; nor split inside the model: {self.no_inside}" if self.no_inside else ""
            said.append(f"there is no context parallelism: {self.no_context}{inside}")
            return
        logits = "" if found.heads or not any(self.facts.heads.values()) else ", and all logits"
        if not found.mixers:
            said.append(
                f"over cp every rank has the whole batch{logits}, and only the blocks compute a part of the sequence: "
                f"{self.no_context}"
            )
            return
        where = ", ".join(dict.fromkeys(map(pattern, found.mixers)))
        said.append(
            f"over cp every rank computes {where} with the whole sequence, which is gathered there{logits}, and splits the "
            f"rest of the blocks: {self.no_context}"
        )

    def _tp(self, choice: Choice, proven: bool) -> str | None:
        return self._validated(choice, TP, proven)

    def _why(self, unit: str, refusal: str) -> str:
        """The line of the model that is in the way and what would help, or else the refusal."""
        views = [view for region in self.facts.regions if key(region) == unit for view in region.views]
        return counted.reason(views, refusal) or refusal

    def _called(self, unit: str) -> str:
        modules = dict.fromkeys(
            pattern(path)
            for region in self.facts.regions
            if key(region) == unit
            for path in (*region.sources, *region.consumers)
        )
        listed = f" ({', '.join(modules)})" if modules else ""
        return self.all[unit] + listed


def _of_logits(refusal: str) -> bool:
    """Whether a refusal speaks of what the loss is given."""
    return any(word in refusal for word in ("logits", "loss", "DTensor"))
