"""One answer to what is wrong with a setup: every command, the recipe's dry run and Python find the same."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.training.job.prepare import prepare
from tests.chosen import marks_at
from tests.recipes.runs import ROOT, typed
from tests.simulate.setups import FAILING, LLAMA

NORM = 'rules=["layers.*.ffn_norm: none"]'
SUM_SPLIT_AGAIN = (
    'rules=["layers.*.feed_forward.w2: {style: rowwise, output: replicate}",'
    '"layers.*.feed_forward: {style: prepare-io, input: {x: stream -> replicate}, output: replicate -> shard(1)}"]'
)
SHAPED = (
    "parallel=single",
    "parallel.mesh.tp=16",
    "hardware=h100",
    "device=cpu",  # else `plan` takes the hardware's
    "model.n_heads=16",
    "model.n_kv_heads=16",
    "model.dim=128",
)

SETUPS: dict[str, tuple[tuple[str, ...], set[tuple[str, str]]]] = {
    "nothing": ((*LLAMA, "parallel=cp2_tp2"), set()),
    "rules that do nothing": ((*LLAMA, "parallel=fsdp2"), {("note", "idle-rule")}),
    "a layout that the plan has not": (
        (*LLAMA, "parallel=tp2", "+parallel.layouts.steam=replicate"),
        {("warning", "unknown-layout")},
    ),
    "a configuration that cannot be read": (
        (*LLAMA, "parallel=tp2", "train.clip=-1"),
        {("error", "wrong-type")},
    ),
    "a plan that cannot be compiled": (
        (*LLAMA, "parallel=tp2", "train.seq_len=31"),
        {("error", "sequence-not-divisible")},
    ),
    "a gradient that nothing sums": ((*LLAMA, "parallel=tp2", NORM), {("error", "varying-gradient")}),
    "a step that fails under the plan": (
        (*LLAMA, "parallel=tp2", 'rules=["layers.*.attention.wo: rowwise"]'),
        {("error", "does-not-run")},
    ),
    "a sum that is split again": (
        (*LLAMA, "parallel=tp2", SUM_SPLIT_AGAIN),
        {("warning", "redundant-redistribution")},
    ),
    "a step that cannot be traced": (
        (*FAILING, "model.kind=kernel", "parallel=fsdp2"),
        {("warning", "trace-failed")},
    ),
    "ranks of tp on several nodes": (
        (*LLAMA, *SHAPED),
        {("warning", "tp-crosses-nodes")},
    ),
    "no such loss": ((*LLAMA, "parallel=tp2", "model.loss=nowhere.loss"), {("error", "model-build")}),
    "an optimizer that cannot be had": (
        (*LLAMA, "parallel=tp2", "optim._target_=nowhere.adam"),
        {("error", "optim-invalid")},
    ),
}
DEFAULT = ("nothing", "a gradient that nothing sums")


def kinds(found: Sequence[Diagnostic]) -> list[tuple[str, str]]:
    return [(d.severity, d.code) for d in found]


def told(command: str, *overrides: str) -> list[Any]:
    """The findings in the document that a command prints."""
    ran = typed(command, *overrides, "--json", cwd=ROOT, module="parallelizer", timeout=180)
    found: list[Any] = json.loads(ran.out)["diagnostics"]
    return found


def found_in(overrides: Sequence[str]) -> tuple[Diagnostic, ...]:
    try:
        return pz.validate(pz.from_overrides(list(overrides)), prove=False)
    except PlanError as error:
        return error.diagnostics


def looked_ahead(overrides: Sequence[str]) -> tuple[Diagnostic, ...]:
    """What the recipe finds before it starts ranks."""
    try:
        job = prepare(*compose_config([*overrides, "device=cpu", "dry_run=true"]), None)
        return validated(job.setup, job.program, job.setup.build_model()).found
    except PlanError as error:
        return error.diagnostics


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DEFAULT else marks_at(i)) for i, n in enumerate(SETUPS)]
)
def test_whoever_validates_finds_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides, expected = SETUPS[name]
    found = found_in(overrides)
    assert set(kinds(found)) == expected
    planned = [d for d in told("plan", *overrides) if d["code"] != "time-assumed"]  # it alone predicts a time
    assert told("validate", "--no-proof", *overrides) == planned == [d.as_json() for d in found]
    dry_run = typed(*overrides, "device=cpu", "dry_run=true", cwd=ROOT, timeout=180)
    shown = re.findall(r"^(error|warning|note)\[([\w-]+)\]: ", dry_run.err, re.MULTILINE)
    assert shown == kinds(found)
    assert bool(dry_run.status) == any(severity == "error" for severity, _ in expected)
    assert set(kinds(looked_ahead(overrides))) == expected


@pytest.mark.ranks
def test_a_proof_comes_with_the_same_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides, _ = SETUPS["a gradient that nothing sums"]
    found = [d.as_json() for d in found_in(overrides)]
    assert [d for d in told("verify", *overrides) if d["code"] != "not-equal"] == found
