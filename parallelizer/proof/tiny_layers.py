"""The arguments of a tiny model, with as many layers as it takes to have one of every kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.layer_kinds import First, LayerKinds, layer_kinds

MOST_LAYERS = 12
"""Layers that the small model is given at most, so that one of every kind is among them."""


def with_every_kind(setup: Setup, tiny: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The `tiny` arguments with as many layers as it takes to have one of every kind, and the layers of kinds that are lost."""
    numbers = _numbers(setup.model, tiny)
    if not numbers:
        return tiny, []
    model = setup.build_model()
    lengths = {len(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    if not any(before in lengths for before, _ in numbers.values()):
        return tiny, []
    large = layer_kinds(model, setup.workload)
    small = _small_kinds(setup, tiny)
    if large is None or small is None:
        return tiny, []
    lost = _lost(large, small)
    for path, (before, after) in numbers.items():
        counted = [name for name in lost if (large[name].count, small[name].count) == (before, after)]
        wanted = [f.needed for name in counted for f in lost[name] if f.needed <= MOST_LAYERS]
        if wanted:
            tiny = _replaced(tiny, path, max(wanted))
    if any(lost.values()) and (small := _small_kinds(setup, tiny)):
        lost = _lost(large, small)
    left = dict.fromkeys(f"{name}.{first.layer}" for name, firsts in lost.items() for first in firsts)
    return tiny, list(left)


def _lost(large: Mapping[str, LayerKinds], small: Mapping[str, LayerKinds]) -> dict[str, list[First]]:
    return {name: kinds.missing_in(small[name]) for name, kinds in large.items() if name in small}


def _small_kinds(setup: Setup, tiny: Mapping[str, Any]) -> dict[str, LayerKinds] | None:
    small = dataclasses.replace(setup, model=merged(setup.model, tiny)[0])
    try:
        return layer_kinds(small.build_model(), setup.workload)
    except PlanError:  # so few or so many layers it cannot be built with
        return None


def _numbers(
    written: Mapping[str, Any], tiny: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> dict[tuple[str, ...], tuple[int, int]]:
    """The whole numbers that `tiny` makes smaller, by their keys: before and after."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for key, after in tiny.items():
        before = written.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found |= _numbers(before, after, (*prefix, key))
        elif type(before) is int and type(after) is int and before > after:
            found[*prefix, key] = (before, after)
    return found


def _replaced(tiny: Mapping[str, Any], path: tuple[str, ...], value: int) -> dict[str, Any]:
    head, *rest = path
    return {**tiny, head: _replaced(tiny[head], tuple(rest), value) if rest else value}


def merged(
    written: Mapping[str, Any], tiny: Mapping[str, Any], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The arguments with the tiny ones in their place, maps inside of them key by key, and what that changes."""
    result, changes = dict(written), []
    for key, value in tiny.items():
        before = written.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[key], inside = merged(before, value, f"{prefix}{key}.")
            changes += inside
        else:
            result[key] = value
            if before != value:
                changes.append(f"{prefix}{key} {before} -> {value}")
    return result, changes
