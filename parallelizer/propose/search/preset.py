"""A candidate as a preset file, which a person can read, change and keep."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from parallelizer.compiler.observe.equal_layers import Run
from parallelizer.language.plan import Plan
from parallelizer.propose.search.candidate import WHOLE, Candidate
from parallelizer.propose.search.setups import STREAM, added_rules, style_options

WIDTH = 118
"""Columns of the comments."""

Given = Mapping[str, Any]
"""What the command line sets of `parallel`, beyond what the search sets, as a tree of plain values."""


def preset_text(
    candidate: Candidate,
    given: Given,
    plan: Plan,
    blocks: str | None,
    run: Run | None,
    said: Sequence[str] = (),
) -> str:
    """The file: `said` as comments, then the keys in which the candidate differs from the preset `base`. `plan` is the one that
    the preset is for.
    """
    keys = preset_keys(candidate, given, plan, blocks, run)
    lines = [
        line
        for one in said
        for line in textwrap.wrap(one, WIDTH, initial_indent="# ", subsequent_indent="#   ")
    ]
    lines += ["defaults: [base]", *(f"{key}: {_flow(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def preset_keys(
    candidate: Candidate, given: Given, plan: Plan, blocks: str | None, run: Run | None
) -> dict[str, Any]:
    """The keys of the preset in plain values."""
    keys: dict[str, Any] = {"mesh": {axis: size for axis, size in candidate.mesh.every.items() if size > 1}}
    if candidate.pp > 1:
        keys["pipeline"] = {
            "schedule": candidate.schedule,
            "microbatches": candidate.microbatches,
            "stages_per_rank": candidate.stages_per_rank,
        }
        if candidate.layers:
            keys["pipeline"]["balance"] = list(candidate.layers)
    if candidate.stream == WHOLE:
        keys["layouts"] = {STREAM: "replicate"}
    if options := style_options(candidate):
        keys["styles"] = options
    keys = _merged(dict(given), keys)
    if rules := added_rules(candidate, plan, blocks, run):
        keys["rules"] = [*keys.get("rules", ()), *rules]
    return keys


def run_overrides(candidate: Candidate) -> list[str]:
    """What a run sets in addition to the preset: `train.accumulate` is no key of a preset."""
    return [f"train.accumulate={candidate.accumulate}"] if candidate.accumulate > 1 else []


def differing(composed: Given, base: Given) -> dict[str, Any]:
    """The keys of `composed` whose values are others than in `base`, maps key by key."""
    found: dict[str, Any] = {}
    for key, value in composed.items():
        before = base.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := differing(value, before):
                found[key] = inner
        elif key not in base or value != before:
            found[key] = value
    return found


def _merged(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        before = one.get(key)
        one[key] = (
            _merged(dict(before), value) if isinstance(before, dict) and isinstance(value, Mapping) else value
        )
    return one


def _flow(value: Any) -> str:
    """A value in YAML's flow form; JSON's strings are YAML's."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(each) for each in value) + "]"
    if (
        isinstance(value, str)
        and value.replace("-", "").replace("_", "").isalnum()
        and not value[0].isdigit()
    ):
        return (
            value if value not in ("null", "true", "false", "yes", "no", "on", "off") else json.dumps(value)
        )
    return json.dumps(value)
