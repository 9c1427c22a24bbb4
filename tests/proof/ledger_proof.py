"""The ledger of real ranks against the planned one: it finds faults that leave every value as it was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
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


def ledger_proof(setup: Setup, fault: Callable[[], AbstractContextManager[object]]) -> LedgerProof:
    """Plan a step, run two on real ranks inside `fault`, and compare the second one. The dry run has ranks too, so it comes
    before the fault.
    """
    ends = (0, setup.mesh.world_size - 1)
    planned = [traced(setup, rank).ledger for rank in ends]
    with fault():
        [real] = real_ledgers([setup])
    found = (_first(setup, one, real[rank]) for rank, one in zip(ends, planned, strict=True))
    return LedgerProof(next((one for one in found if one is not None), None))


def _first(setup: Setup, planned: tuple[Collective, ...], real: tuple[Collective, ...]) -> Divergence | None:
    """The first kind of collective of a module, in the order of the plan, that runs another number of times. Reductions of
    gradients come before the gathers that go with them.
    """
    counts = Counter(map(_key, planned)), Counter(map(_key, real))
    keys = list(dict.fromkeys(map(_key, (*planned, *real))))
    for key in sorted(keys, key=lambda key: key[2] not in ("reduce_scatter", "all_reduce")):
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
