"""A candidate as a setup, as the traces take it, and what of a setup the search varies."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from parallelizer.compiler.observe.equal_layers import Run
from parallelizer.configuration.origins import NOWHERE
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Findings
from parallelizer.language.fold import fold_paths
from parallelizer.language.parse_rule import parse_rule_item
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import EXPERT, REPLICATE, Option, Plan, Rule, StyleDefaults, full_name
from parallelizer.language.yaml_nodes import Scalar
from parallelizer.propose.search.candidate import FULL, NO_CHECKPOINT, NO_FLOAT8, SELECTIVE, WHOLE, Candidate
from parallelizer.styles.application import Program

STREAM = "stream"
"""The layout that a plan splits over tp, or not."""


def blocks_of(program: Program) -> str | None:
    """The glob of the modules that are checkpointed: that of most of FSDP's units, or of the modules before which cuts may
    fall; None for a plan without both, or with checkpoints of its own.
    """
    if program.of_slot("checkpoint"):
        return None
    applications = program.of_slot("fsdp") or program.of_slot("stage")
    keys = Counter(a.rule.key for a in applications if a.module)
    return keys.most_common(1)[0][0] if keys else None


def added_rules(candidate: Candidate, plan: Plan, blocks: str | None, run: Run | None) -> list[str]:
    """The rules that the preset of a candidate adds to those of the plan."""
    checkpoint = checkpoint_rule(candidate, blocks, run)
    return [*precision_rules(candidate, plan), *([] if checkpoint is None else [checkpoint])]


def checkpoint_rule(candidate: Candidate, blocks: str | None, run: Run | None) -> str | None:
    """The rule of a preset that checkpoints what the candidate does; None where that is nothing."""
    if candidate.checkpoint == NO_CHECKPOINT or blocks is None:
        return None
    glob = blocks
    if candidate.share < 1 and run is not None:
        count = round(candidate.share * run.count)
        [glob] = fold_paths(
            [run.join(f"{run.container}.*" if run.container else "*", i) for i in range(count)]
        )
    style = "checkpoint" if candidate.checkpoint == FULL else "{style: checkpoint, mode: selective}"
    return f"{_quoted(glob)}: {style}"


def precision_rules(candidate: Candidate, plan: Plan) -> list[str]:
    """The rules of a preset that give the modules that the plan has in float8 the candidate's recipe, or their own dtype."""
    if not candidate.precision:
        return []
    style = (
        "{none: precision}"
        if candidate.precision == NO_FLOAT8
        else f"{{style: float8, recipe: {candidate.precision}}}"
    )
    return [f"{_quoted(key)}: {style}" for key in dict.fromkeys(rule.key for rule in float8_rules(plan))]


def float8_rules(plan: Plan) -> list[Rule]:
    """The rules of a plan with the style `float8`."""
    return [rule for rule in plan.rules if any(use.style == "float8" for use in rule.uses)]


def _quoted(glob: str) -> str:
    return glob if glob[0].isalnum() else json.dumps(glob)  # a star begins an alias of YAML's


def style_options(candidate: Candidate) -> dict[str, dict[str, Any]]:
    """The defaults of styles that a candidate sets."""
    found: dict[str, dict[str, Any]] = {}
    if not candidate.reshard_after_forward:
        found["fsdp"] = {"reshard_after_forward": False}
    if candidate.method:
        found["context-parallel"] = {"method": candidate.method}
    return found


def setup_of(base: Setup, candidate: Candidate, blocks: str | None, run: Run | None) -> Setup:
    """The base with the candidate's mesh and options."""
    plan = base.plan
    for rule in added_rules(candidate, base.plan, blocks, run):
        plan = plan.with_rules(parse_rule_item(Scalar(rule, False, NOWHERE), Findings()))
    if candidate.stream == WHOLE:
        plan = plan.with_layouts({STREAM: REPLICATE})
    pipeline = None
    if candidate.pp > 1:
        pipeline = Pipeline(
            candidate.schedule,
            candidate.microbatches,
            candidate.stages_per_rank,
            candidate.layers or Pipeline.balance,
        )
    return dataclasses.replace(
        base,
        plan=plan,
        mesh=candidate.mesh,
        defaults=_with_options(base.defaults, style_options(candidate)),
        workload=dataclasses.replace(base.workload, accumulate=candidate.accumulate),
        pipeline=pipeline,
    )


def class_setup(base: Setup, candidate: Candidate, rows: int, blocks: str | None) -> Setup:
    """The setup that is traced for all candidates of a class, with `rows` on each data rank."""
    key = candidate.trace_class
    setup = setup_of(base, key, blocks, None)
    return dataclasses.replace(
        setup, workload=dataclasses.replace(setup.workload, batch_size=rows * key.dp_shard, accumulate=1)
    )


def expert_modules(program: Program) -> frozenset[str]:
    """The modules whose experts the plan shares out, by a program with `ep` above 1."""
    return frozenset(application.module for application in program.of_slot("experts"))


def shared_experts(program: Program, model: nn.Module) -> int:
    """The number by which the experts of all those modules divide; 0 without any."""
    return math.gcd(
        *(
            model.get_parameter(full_name(application.module, name)).shape[by_axis[EXPERT].dim or 0]
            for application in program.of_slot("experts")
            for name, by_axis in application.params.items()
        )
    )


def _with_options(
    defaults: Mapping[str, StyleDefaults], given: Mapping[str, Mapping[str, Any]]
) -> dict[str, StyleDefaults]:
    found = dict(defaults)
    for style, options in given.items():
        before = found.get(style, StyleDefaults())
        more = {name: Option(value, NOWHERE) for name, value in options.items()}
        found[style] = dataclasses.replace(before, options={**before.options, **more})
    return found


def checkpoint_modes(program: Program, model: nn.Module) -> tuple[str, ...]:
    """The modes of checkpointing that a search tries."""
    return (NO_CHECKPOINT,) if blocks_of(program) is None else (NO_CHECKPOINT, SELECTIVE, FULL)
