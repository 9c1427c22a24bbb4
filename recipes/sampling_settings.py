"""What sampling reads of the configuration, looked at before a rank starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from parallelizer.diagnostics import PlanError
from parallelizer.origins import Origins
from parallelizer.reading import Reading, is_whole
from recipes import settings


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and how many: see `configs/generate.yaml`."""

    max_new_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    samples: int = 1
    seed: int = 0


def read_sampling(config: DictConfig, origins: Origins) -> Sampling:
    """Sampling of a composed configuration. Raises PlanError with every value that is of no use."""
    reading = Reading(config, origins)
    found = _numbers(reading)
    if reading.findings.items:
        raise PlanError(reading.findings.items)
    return Sampling(**found)


def check(reading: Reading) -> None:
    """Report every value of sampling that is of no use, and what the recipe reports: the configuration's `checks` names it."""
    _numbers(reading)
    settings.check(reading, more_keys=KEYS)


def _numbers(reading: Reading) -> dict[str, Any]:
    found = {}
    for key, (useful, wanted) in _WANTED.items():
        found[key] = value = reading.get(key, getattr(Sampling, key))
        if not useful(value):
            reading.error("wrong-type", f"{key} is {value!r}", key, f"it is {wanted}")
    return found


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: is_whole(value) and least <= value < 2**63


def _or_none(useful: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or useful(value)


def _number(value: Any) -> bool:
    return (is_whole(value) or isinstance(value, float)) and math.isfinite(value) and value >= 0


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (_whole(1), "a whole number from 1"),
    "temperature": (_number, "a number from 0, which takes the likeliest token"),
    "top_k": (_or_none(_whole(1)), "a whole number from 1, or null for all tokens"),
    "top_p": (
        _or_none(lambda p: _number(p) and 0 < p <= 1),
        "a number above 0 and up to 1, or null for all tokens",
    ),
    "samples": (_whole(1), "a whole number from 1"),
    "seed": (_whole(0), "a whole number from 0"),
}

KEYS = ("checkpoint", "prompt", *_WANTED)
"""What the root configuration says beside a training's."""
