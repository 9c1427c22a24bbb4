"""What the recipe itself reads of the configuration, looked at before a rank starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from parallelizer.diagnostics import PlanError
from parallelizer.origins import Origins
from parallelizer.reading import Reading, is_whole


@dataclass(frozen=True)
class Settings:
    """A run in numbers: `lr` to `final_ratio` are those of `learning_rate`, timeouts are in seconds."""

    steps: int
    seed: int
    eval_every: int
    eval_batches: int
    log_every: int
    lr: float
    warmup: int
    final_ratio: float
    start_timeout: float
    collective_timeout: float
    max_cpu_ranks: int


def read_settings(config: DictConfig, origins: Origins) -> Settings:
    """Settings of a composed configuration. Raises PlanError with every value that is of no use."""
    reading = Reading(config, origins)
    found: dict[str, Any] = {}
    for key, (useful, wanted) in _WANTED.items():
        before = len(reading.findings.items)
        value = reading.get(key)
        if not useful(value) and len(reading.findings.items) == before:
            shown = "missing" if value is None else repr(value)
            reading.error("wrong-type", f"{key} is {shown}", key, f"it is {wanted}")
        found[key.partition(".")[2]] = value
    if reading.findings.items:
        raise PlanError(reading.findings.items)
    return Settings(**found)


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: is_whole(value) and value >= least


def _number(value: Any) -> bool:
    return (is_whole(value) or isinstance(value, float)) and math.isfinite(value) and value >= 0


def _seconds(value: Any) -> bool:
    return _number(value) and value > 0


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "train.steps": (_whole(1), "a whole number from 1"),
    "train.seed": (_whole(0), "a whole number from 0"),
    "train.eval_every": (_whole(0), "a whole number of steps between evaluations, 0 for one at the end"),
    "train.eval_batches": (_whole(1), "a whole number from 1"),
    "train.log_every": (_whole(0), "a whole number of steps between lines, 0 for none"),
    "optim.lr": (_number, "a number from 0"),
    "optim.warmup": (_whole(0), "a whole number of steps"),
    "optim.final_ratio": (_number, "a number from 0"),
    "launch.start_timeout": (_seconds, "a number of seconds"),
    "launch.collective_timeout": (_seconds, "a number of seconds"),
    "launch.max_cpu_ranks": (_whole(1), "a whole number from 1"),
}
"""By key: whether a value is of use, and what would be."""
