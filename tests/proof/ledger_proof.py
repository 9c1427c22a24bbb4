"""The ledger of real ranks against the planned one: it finds faults that leave every value as it was."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from parallelizer.configuration.setup import Setup
from parallelizer.proof.divergence import Divergence, governing_rule
from parallelizer.simulate.record.ledger import Collective
from tests.simulate.real_ledger import real_ledgers
from tests.simulate.setups import traced


@dataclass(frozen=True)
class LedgerProof:
    """Whether the ranks sent what was planned, and the first place where they did not."""

    divergence: Divergence | None

    @property
    def passed(self) -> bool:
        return self.divergence is None


def ledger_proof(setup: Setup) -> LedgerProof:
    """Plan a step, run two on real ranks, and compare the second one."""
    planned = [traced(setup, rank).ledger for rank in (0, setup.mesh.world_size - 1)]
    [real] = real_ledgers([setup])
    for one, other in zip(planned, (real[0], real[-1]), strict=True):
        found = _first(setup, one, other)
        if found is not None:
            return LedgerProof(found)
    return LedgerProof(None)


def _first(setup: Setup, planned: tuple[Collective, ...], real: tuple[Collective, ...]) -> Divergence | None:
    """The first kind of collective of a module, in the order of the plan, that runs another number of times."""
    counts = Counter(map(_key, planned)), Counter(map(_key, real))
    for key in dict.fromkeys(map(_key, (*planned, *real))):
        once, found = counts[0][key], counts[1][key]
        if once != found:
            phase, module, kind, axis = key
            several = math.gcd(found, once) == once and found > once
            text = f"{kind} of {module or 'the root'} over {axis} runs {found} times, and {once} are planned"
            microbatches = setup.pipeline and setup.pipeline.settled(setup.mesh.sizes["pp"]).microbatches
            if several and found == once * (microbatches or 0):
                text += ": it runs once a microbatch and not once a step"
            program = setup.compile(setup.build_model())
            return Divergence(module, phase, axis, governing_rule(program, module, axis), text)
    return None


def _key(entry: Collective) -> tuple[str, str, str, str]:
    return entry.phase, entry.module, entry.kind, entry.axis
