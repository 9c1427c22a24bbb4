"""The figures as a page."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence

import torch

from benchmarks.proofs.markdown import table
from tests.survival.damage import Count
from tests.survival.kills import Outcome
from tests.survival.reshard import Pair
from tests.survival.soak import CLOSE, Soaked

MARKER = "survival"


def of_kills(found: Sequence[Outcome]) -> str:
    """The kill sweep."""
    died, seconds = sum(o.died for o in found), [s for o in found for s in o.recoveries]
    rows = [
        (o.plan.name, str(o.died), f"{max(o.recoveries, default=0):.1f} s", str(o.redone), "; ".join(o.wrong) or "none")
        for o in found
    ]  # fmt: skip
    good = sum(not o.wrong for o in found)
    head = ["run", "SIGKILLs", "slowest recovery", "most steps done again", "what differs in the end"]
    text = (
        f"**Kills**: {died} ranks killed in {len(found)} runs of 26 steps with a checkpoint every 4; {good} of {len(found)} "
        "ended with the uninterrupted run's SHA-256 of parameters, moments and random states, losses and samples, no process and "
        "no half checkpoint left, and no step behind the newest whole checkpoint done again. From a kill to the end of the next "
        f"step: median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s."
    )
    return f"{text}\n\n{table(head, rows)}"


def of_pairs(found: Sequence[Pair]) -> str:
    """The matrix of presets."""
    parts = []
    for model in dict.fromkeys(pair.model for pair in found):
        own = [pair for pair in found if pair.model == model]
        equal, presets = sum(not pair.differing for pair in own), list(dict.fromkeys(p.source for p in own))
        close = sum(pair.holds for pair in own)
        parts.append(
            f"{model}: {equal} of {len(own)} equal in SHA-256 of every gathered tensor, {close} of {len(own)} with the next loss "
            f"to {max(pair.apart for pair in own):.0e} of the source's"
        )
    return f"**Another preset**: each of {', '.join(presets)} saved, and each went on from all. {'; '.join(parts)}."


def of_damage(found: Sequence[Count]) -> str:
    """Damaged files."""
    text = "; ".join(f"{c.kind}: {c.refused} of {c.tried}" for c in found)
    return f"**Damage** found before a number is read: {text}."


def of_soak(found: Sequence[Soaked]) -> str:
    """The long runs."""
    rows = [
        (s.name, f"{s.steps:,}", str(s.ranks), str(s.jobs), "yes" if s.same else "no", f"{s.apart:.1e}",
         "; ".join(s.wrong) or "none")
        for s in found
    ]  # fmt: skip
    head = ["resumed under", "steps", "ranks killed", "jobs killed", "same SHA-256", "largest difference of a parameter",
            "what else differs"]  # fmt: skip
    text = f"**Soak**: killed from outside at random times, beside an uninterrupted run (bound {CLOSE:.0e}, absolute)."
    return f"{text}\n\n{table(head, rows)}"


def page(parts: Sequence[str], command: str, seconds: float) -> str:
    """All of it, and what it was measured with."""
    where = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    return "\n\n".join([f"`{command}`, {seconds / 60:.0f} min on {where}:", *parts])
