"""From everything that looks possible to what passes: what the checks refuse is taken back, and why is said."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from parallelizer.propose.from_forward.facts import Facts
from parallelizer.propose.from_forward.rules import Choice, key, units
from parallelizer.propose.from_forward.trial import Trials
from parallelizer.propose.globs import pattern

TP, CP, BOTH, DATA = {"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}, {"dp_shard": 2}

Text = Callable[[Choice], str]


@dataclass(frozen=True)
class Settled:
    """What stands, and sentences on what does not, each with its reason."""

    choice: Choice
    said: tuple[str, ...]


class Retreat:
    """Finds the most of a proposal that passes on small meshes."""

    def __init__(self, facts: Facts, trials: Trials, text: Text, tell: Callable[[str], None]) -> None:
        self.facts, self.trials, self.text, self.tell = facts, trials, text, tell
        self.all = units(facts)

    def settle(self, full: Choice, *, prove: bool) -> Settled:
        """Try the whole, then less: first whether it validates, then, if `prove`, whether it is proven equal."""
        said: list[str] = []
        choice = self._passing(full, said, proven=False)
        if prove:
            choice = self._passing(choice, said, proven=True)
            mesh: Mapping[str, int] = {**DATA, "tp": 2} if choice.units else DATA
            reason = self.trials.refusal(self.text(choice), mesh, proven=True)
            if reason:
                said.append(
                    f"on {' x '.join(f'{a}={n}' for a, n in mesh.items())} it does not hold: {reason}"
                )
            if self.trials.unproven:
                reason = self.trials.unproven
                said.append(
                    f"it is validated and not proven: the model itself cannot be compared with: {reason}"
                )

        return Settled(choice, tuple(said))

    def _passing(self, full: Choice, said: list[str], *, proven: bool) -> Choice:
        """The most that passes; where everything does on both axes at once, each alone is not asked for."""
        if full.units and full.context and self.trials.refusal(self.text(full), BOTH, proven=proven) is None:
            return full
        choice = self._tensor(full, said, proven=proven)
        return self._context(choice, said, proven=proven)

    def _tensor(self, full: Choice, said: list[str], *, proven: bool) -> Choice:
        if not full.units:
            return full
        first = ""
        for choice in self._forms(full):
            reason = self._tp(choice, proven)
            if reason is None:
                self._say_form(full, choice, first, said)
                return choice
            first = first or reason
            self.tell(f"{self._form(choice)}: {reason}")
        return self._one_by_one(full, first, said, proven)

    def _one_by_one(self, full: Choice, first: str, said: list[str], proven: bool) -> Choice:
        """What passes when units are added one after the other to a stream that is whole."""
        kept = dataclasses.replace(full, units=frozenset(), stream="replicate")
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
                said.append(f"{self._called(unit)} is left whole over tp: {reasons[0]}")
                self.tell(said[-1])
        if not kept.units or not full.is_sharded:
            return kept
        sharded = dataclasses.replace(kept, stream="shard(1)")
        reason = self._tp(sharded, proven)
        if reason is None:
            return sharded
        said.append(f"the stream stays whole over tp (no sequence parallelism): {reason}")
        return kept

    def _forms(self, full: Choice) -> Iterator[Choice]:
        streams = ("shard(1)", "replicate") if full.is_sharded else ("replicate",)
        counts = any(region.divide for region in self.facts.regions) and full.divided
        for stream in streams:
            yield dataclasses.replace(full, stream=stream)
            if counts:
                yield dataclasses.replace(full, stream=stream, divided=False)

    def _say_form(self, full: Choice, choice: Choice, first: str, said: list[str]) -> None:
        if full.is_sharded and not choice.is_sharded:
            said.append(f"the stream stays whole over tp (no sequence parallelism): {first}")

    def _context(self, choice: Choice, said: list[str], *, proven: bool) -> Choice:
        if not choice.context:
            return choice
        reason = self.trials.refusal(self.text(choice), CP, proven=proven)
        if reason is None and choice.units:
            reason = self.trials.refusal(self.text(choice), BOTH, proven=proven)
        if reason is None:
            return choice
        said.append(f"there is no context parallelism: {reason}")
        self.tell(said[-1])
        # Positions that the batch brings are of use to a stream that is split over tp too.
        batch = choice.batch if "positions" in choice.batch.values() else {}
        return dataclasses.replace(choice, context=False, batch=batch, buffers={})

    def _tp(self, choice: Choice, proven: bool) -> str | None:
        return self.trials.refusal(self.text(choice), TP, proven=proven)

    def _form(self, choice: Choice) -> str:
        return f"with the stream as {choice.stream}" + ("" if choice.divided else ", heads not divided")

    def _called(self, unit: str) -> str:
        modules = dict.fromkeys(
            pattern(path)
            for region in self.facts.regions
            if key(region) == unit
            for path in (*region.sources, *region.consumers)
        )
        listed = f" ({', '.join(modules)})" if modules else ""
        return self.all[unit] + listed


def to_stderr(sentence: str) -> None:
    """Say what is being tried and why it is not taken."""
    sys.stderr.write(f"init: {sentence}\n")
