"""The differences between a resumed run and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from parallelizer.training.keys import keys_of
from parallelizer.training.settings import Settings

SECTIONS = ("model", "parallel", "optim", "train", "plan", "rules")
"""What makes a run what it is, of its configuration. (What differs in the data is looked at elsewhere.)"""

LEFT_OUT = frozenset(one.name for one in keys_of(Settings) if one.section == "train") - {
    "train.seed",
    "train.steps",
}
"""Keys that change no number of a step. (Over `train.steps` the learning rate is scheduled.)"""

MOST = 6
"""Differences that are named."""

Record = Mapping[str, Any]
"""As `checkpoint.record_of` makes it."""


def told(then: Record, now: Record) -> str | None:
    """The differences in a line; None where there are none."""
    found = [*_values(then.get("config"), now.get("config")), *_texts(then, now)]
    if not found:
        return None
    more = f", and {len(found) - MOST} more" if len(found) > MOST else ""
    return f"changed since the checkpoint: {', '.join(found[:MOST])}{more}"


def _values(then: Any, now: Any) -> Iterator[str]:
    # What follows from another value is written as it was: only that one is told.
    written = [_flat(config, resolve=False) for config in (then, now)]
    before, after = _flat(then), _flat(now)
    for key in dict.fromkeys((*before, *after)):
        if written[0].get(key) != written[1].get(key) and before.get(key) != after.get(key):
            scheduled = " (over which the learning rate is scheduled)" if key == "train.steps" else ""
            yield f"{key} {before.get(key, '-')} -> {after.get(key, '-')}{scheduled}"


def _texts(then: Record, now: Record) -> Iterator[str]:
    """Files of plans that read otherwise: of another plan its name has been told."""
    before, after = (
        {Path(f).name: t for f, t in r.get("plan", {}).get("files", {}).items()} for r in (then, now)
    )
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            yield f"the text of {name}"


def _flat(config: Any, *, resolve: bool = True) -> dict[str, str]:
    """The values of a composed configuration, a YAML text, by dotted key."""
    try:
        whole = OmegaConf.to_container(OmegaConf.create(config or ""), resolve=resolve)
    except Exception:  # written by another version: nothing is known of it
        return {}
    flat: dict[str, str] = {}
    for section in SECTIONS:
        _fill(flat, section, whole.get(section) if isinstance(whole, dict) else None)
    return {k: v for k, v in flat.items() if k not in LEFT_OUT}


def _fill(flat: dict[str, str], key: str, value: Any) -> None:
    if key == "parallel.mesh" and isinstance(value, dict):
        sizes = " x ".join(f"{axis}={size}" for axis, size in value.items() if size != 1)
        flat["mesh"] = sizes or "1 rank"
    elif isinstance(value, dict):
        for name, below in value.items():
            _fill(flat, f"{key}.{name}", below)
    elif value is not None:
        flat[key] = str(value)
