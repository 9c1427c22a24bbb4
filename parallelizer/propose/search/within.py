"""`--within KEY=VALUES`: which values of a key are tried. `1..8`, `1f1b,zbv`, one value, or `*` for all that there are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.propose.search.candidate import NO_FLOAT8
from parallelizer.styles.float8.recipes import TORCHAO_NAMES

METHODS = ("all-gather", "ring", "ulysses", "ulysses-ring")

WORDS: Mapping[str, tuple[str, ...]] = {
    "pipeline.schedule": tuple(SCHEDULES),
    "checkpoint": ("none", "selective", "full"),
    "stream": ("split", "whole"),
    "cp.method": METHODS,
    "reshard_after_forward": ("true", "false"),
    "precision": (NO_FLOAT8, *TORCHAO_NAMES),
}
"""The keys whose values are words."""

NUMBERS = (
    "mesh.pp", "mesh.dp_replicate", "mesh.dp_shard", "mesh.cp", "mesh.ep", "mesh.tp", "rows", "accumulate",
    "pipeline.microbatches", "pipeline.stages_per_rank", "checkpoint.share",
)  # fmt: skip

USUAL: Mapping[str, tuple[str, ...]] = {
    "pipeline.schedule": ("1f1b", "interleaved-1f1b", "zbv"),
    "stream": ("split",),
    "cp.method": ("",),
    "precision": ("",),
}
"""What is tried of a key's words without `--within`; of the others all."""

SHARE = "checkpoint.share"

QUARTERS = (1.0, 0.75, 0.5, 0.25)
"""The shares that a range holds."""

FIXED = {
    **{
        f"parallel.mesh.{axis}": f"mesh.{axis}"
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
    },
    "parallel.pipeline.schedule": "pipeline.schedule",
    "parallel.pipeline.microbatches": "pipeline.microbatches",
    "parallel.pipeline.stages_per_rank": "pipeline.stages_per_rank",
    "parallel.styles.fsdp.reshard_after_forward": "reshard_after_forward",
    "train.accumulate": "accumulate",
}
"""The keys of the configuration that fix a key of the search."""


@dataclass(frozen=True)
class Within:
    """The limits by key: a range of numbers, or a set of words or numbers. A key without a limit takes any value."""

    limits: Mapping[str, tuple[float, float] | frozenset[str]]

    def number(self, key: str, value: float) -> bool:
        """Whether a number may be tried."""
        limit = self.limits.get(key)
        if limit is None:
            return True
        if isinstance(limit, frozenset):
            return f"{value:g}" in limit
        return limit[0] <= value <= limit[1]

    def words(self, key: str) -> tuple[str, ...]:
        """The words that are tried, in their usual order."""
        limit = self.limits.get(key)
        if limit is None:
            return USUAL.get(key, WORDS[key])
        return tuple(word for word in WORDS[key] if word in limit)

    def text(self) -> str:
        """The limits as they are written, `mesh.tp=1..8, checkpoint=full,none`; empty without one."""
        said = []
        for key, limit in self.limits.items():
            if isinstance(limit, frozenset):
                said.append(f"{key}={','.join(sorted(limit))}")
            else:
                low, high = (f"{end:g}" for end in limit)
                said.append(f"{key}={low}..{'' if high == 'inf' else high}")
        return ", ".join(said)

    def sets(self, key: str) -> bool:
        """Whether the key has a limit, be it `*`."""
        return key in self.limits

    def shares(self) -> tuple[float, ...]:
        """The shares of layers that `full` checkpoints: those that are named, or the ends of a range and the quarters inside; all
        layers without a limit.
        """
        limit = self.limits.get(SHARE)
        if limit is None:
            return (1.0,)
        if isinstance(limit, frozenset):
            return tuple(sorted(map(float, limit), reverse=True))
        low, high = max(limit[0], 0.0), min(limit[1], 1.0)
        inside = {share for share in (*QUARTERS, low, high) if low <= share <= high and share > 0}
        return tuple(sorted(inside, reverse=True))


def read_within(texts: Iterable[str], overrides: Iterable[str] = ()) -> tuple[Within, list[str]]:
    """The limits of `--within` and of overrides that fix a key, and the other overrides. Raises PlanError."""
    limits: dict[str, tuple[float, float] | frozenset[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise _wrong(f"--within {text} has no values", "write KEY=VALUES, as in mesh.tp=1..8")
        limits |= _limit(key.strip(), values.strip())
    rest: list[str] = []
    fixed: dict[str, tuple[float, float] | frozenset[str]] = {}
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in FIXED and ".." not in value:
            if FIXED[key] in limits:
                raise _wrong(
                    f"{override} fixes {FIXED[key]}, which --within limits too", "leave out one of the two"
                )
            fixed |= _limit(FIXED[key], value.strip("'\""))
        else:
            rest.append(override)
    return Within({**limits, **fixed}), rest


def _limit(key: str, values: str) -> dict[str, Any]:
    known = (*NUMBERS, *WORDS)
    if key not in known:
        raise _wrong(f"the search has no key {key!r}", did_you_mean(key, known, "it has"))
    if key in WORDS:
        words = WORDS[key] if values == "*" else tuple(w.strip().lower() for w in values.split(","))
        unknown = next((w for w in words if w not in WORDS[key]), None)
        if unknown is not None:
            raise _wrong(f"{key} cannot be {unknown!r}", did_you_mean(unknown, WORDS[key], "it can be"))
        return {key: frozenset(words)}
    try:
        limit = _numbers(values)
    except ValueError:
        raise _wrong(f"{key}={values} has no numbers", "write 4, 1,2,4 or 1..8, or * for all") from None
    if isinstance(limit, tuple) and limit[0] > limit[1]:
        turned = f"{key}={limit[1]:g}..{limit[0]:g}"
        raise _wrong(f"{key}={values} has no number: the range ends below its start", f"write {turned}")
    if key == SHARE:
        ends = (
            map(float, limit)
            if isinstance(limit, frozenset)
            else [limit[0] or 1.0, limit[1] if limit[1] < math.inf else 1.0]
        )
        if values != "*" and not all(0 < share <= 1 for share in ends):
            raise _wrong(
                f"{key}={values} is no share of the layers",
                "write shares above 0 and up to 1, as in 0.25,0.5",
            )
    elif not _has_whole(limit):
        raise _wrong(f"{key}={values} has no number that {key} can be", "write whole numbers from 1")
    return {key: limit}


def _has_whole(limit: tuple[float, float] | frozenset[str]) -> bool:
    """Whether a range from 0 or more has a whole number from 1, and whether each number of a set is one."""
    if isinstance(limit, tuple):
        return limit[0] >= 0 and limit[1] >= max(1.0, math.ceil(limit[0]))
    return all(float(number) >= 1 and float(number).is_integer() for number in limit)


def _numbers(values: str) -> tuple[float, float] | frozenset[str]:
    """A range, of which `*` is the widest, or a set. Raises ValueError."""
    if values == "*":
        return 0.0, float("inf")
    low, dots, high = values.partition("..")
    if dots:
        return float(low or 0), float(high or "inf")
    return frozenset(f"{float(v):g}" for v in values.split(","))


def _wrong(message: str, help_text: str) -> PlanError:
    return PlanError([Diagnostic("search-within", message, None, help_text)])
