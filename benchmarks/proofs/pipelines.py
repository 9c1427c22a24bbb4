"""Every shipped model, cut into the stages of every schedule, alone and with each other axis: one proof a cell."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.proofs.families import DESIGNED_WITH, families
from benchmarks.proofs.markdown import replace_between, table
from benchmarks.proofs.matrix import check_page, computation_of, name_of
from parallelizer.child.children import WorldError
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import BATCH_AXES
from parallelizer.proof.prove import prove_subject
from parallelizer.proof.runs import References, references_of
from parallelizer.proof.tiny import shrink, subject_of
from parallelizer.proof.tiny_layers import merged, with_stages
from parallelizer.runtime.launch.failures import LaunchError

MARKER = "pipelines"
"""The place of a page that the table is written to."""

PRESETS = ("pp2", "pp4", "pp2_tp2", "pp2_fsdp2", "pp2_cp2", "pp2_fsdp2_tp2")
"""The columns. Each runs on the mesh of the preset."""


WHOLE_STREAM = {
    "encoder_decoder_tiny": "encoder_decoder_tp",
    "llama_debug": "llama_tp",
    "vit_tiny": "vit_tp",
}
"""The shipped plans beside the models' own. They differ from these under tp alone, where the stream is whole on every rank."""


@dataclass(frozen=True)
class PipelineCell:
    """The outcome of one proof; `model` is a row of the table. `share` is the worst error as a share of its bound, None where
    nothing ran. `refused` says whether the compiler refused the plan.
    """

    model: str
    preset: str
    schedule: str
    share: float | None
    passed: bool = False
    refused: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        """As on the command line of `--only`."""
        return name_of(f"{self.model} {self.schedule}", self.preset)


@dataclass
class Shared:
    """What cells share: the outcome of each computation, and the unsharded runs of the last model and batch."""

    cells: dict[str, PipelineCell] = field(default_factory=dict)
    references: tuple[str, References] | None = None


def models() -> list[str]:
    """Every shipped model."""
    return sorted([*families(), *DESIGNED_WITH])


def rows() -> list[str]:
    """The rows of the table: the models, and those with another plan than their own, `MODEL, PLAN`."""
    return sorted([*models(), *(f"{model}, {plan}" for model, plan in WHOLE_STREAM.items())])


def grid() -> list[tuple[str, str, str]]:
    """Row, preset and schedule of every cell, column by column."""
    return [
        (row, preset, schedule)
        for preset in PRESETS
        for row in rows()
        if ", " not in row or "_tp" in preset
        for schedule in SCHEDULES
    ]


def prove(model: str, preset: str, schedule: str, shared: Shared | None = None) -> PipelineCell:
    """One proof. A model with fewer layers than the largest number of stages in its row of the table is given more."""
    shared = shared or Shared()
    cell = PipelineCell(model, preset, schedule, None)
    try:
        setup = _setup(model, preset, schedule)
        small, _ = shrink(setup, full_mesh=True)
        setup.compile(setup.build_model())
    except PlanError as error:
        return dataclasses.replace(cell, refused=True, reason=_told(error))
    try:
        key = f"{computation_of(small)} {schedule}"
        if key not in shared.cells:
            shared.cells[key] = _proven(cell, small, shared)
        return dataclasses.replace(shared.cells[key], model=model, preset=preset)
    except PlanError as error:  # the compiler took the plan, so a rank failed
        return dataclasses.replace(cell, reason=_told(error))
    except (LaunchError, WorldError) as error:
        return dataclasses.replace(cell, reason=str(error).strip().splitlines()[0])


def _told(error: PlanError) -> str:
    """The first finding, in a line."""
    first = error.diagnostics[0]
    where = f" ({Path(first.span.file).name}:{first.span.line})" if first.span is not None else ""
    return f"{first.code}: {first.message}{where}"


def _proven(cell: PipelineCell, small: Setup, shared: Shared) -> PipelineCell:
    work = small.workload
    alike = repr((small.model, work.batch_size, work.seq_len))
    subject = subject_of(small)
    if shared.references is None or shared.references[0] != alike:
        shared.references = alike, references_of(subject)
    proof = prove_subject(subject, references=shared.references[1])
    reason = proof.divergence.description if proof.divergence else ""
    worst = max(d.share for d in proof.verdict.differences)
    return dataclasses.replace(cell, share=worst, passed=proof.passed, reason=reason)


def _setup(model: str, preset: str, schedule: str) -> Setup:
    """The configuration of a cell, with layers for the schedule that has most stages: all schedules have the same model then,
    and the same unsharded runs.
    """
    name, _, plan = model.partition(", ")
    words = [f"model={name}", f"parallel={preset}", f"++parallel.pipeline.schedule={schedule}"]
    setup = from_config(*compose_config([*words, *([f"plan={plan}"] if plan else [])]))
    ranks = setup.mesh.sizes["pp"]
    wanted = ranks * max(kind.stages_per_rank for kind in SCHEDULES.values())
    large = with_stages(setup, {}, wanted)
    small = with_stages(setup, setup.model.get("tiny") or {}, wanted)
    grown = {**merged(setup.model, large)[0], "tiny": small}
    pipeline = setup.pipeline or Pipeline()
    rows = (pipeline.settled(ranks).microbatches or 1) * setup.mesh.size(*BATCH_AXES)
    workload = dataclasses.replace(setup.workload, batch_size=rows)
    return dataclasses.replace(setup, model=grown, workload=workload)


def run(
    *,
    only: str = "",
    as_json: bool = False,
    page: str | None = None,
    cells: str | None = None,
    run_missing: bool = True,
) -> int:
    """Prove every cell, or those with `only` in their names, print the table, and write it into a page where one is named.
    `cells` is a file in which outcomes are kept: cells that it has do not run again, and without `run_missing` no other runs.
    0 when every cell is proven or refused.
    """
    if page is not None:
        check_page(page, MARKER)
    known = _read(cells)
    every = [PipelineCell(*place, None) for place in grid()]
    every = [cell for cell in every if only in cell.name]
    shared, done = Shared(), list[PipelineCell]()
    for number, asked in enumerate(every, start=1):
        if asked.name not in known and run_missing:
            known[asked.name] = found = prove(asked.model, asked.preset, asked.schedule, shared)
            line = f"[{number}/{len(every)}] {found.name}: {in_a_word(found)} {found.reason}"
            print(line, file=sys.stderr, flush=True)
            _keep(found, cells)
        if asked.name in known:
            done.append(known[asked.name])
    text = f"{summary(done)}\n\n{markdown(done)}"
    if page is not None:
        replace_between(page, MARKER, text)
    if as_json:
        json.dump(document(done), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print(text)
    return 0 if all(cell.passed or cell.refused for cell in done) else 1


def _keep(cell: PipelineCell, path: str | None) -> None:
    if path is not None:
        with Path(path).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(cell)) + "\n")


def _read(path: str | None) -> dict[str, PipelineCell]:
    """The cells in a file, by name; none where there is no file yet."""
    if path is None or not Path(path).exists():
        return {}
    found = [PipelineCell(**json.loads(line)) for line in Path(path).read_text().splitlines()]
    return {cell.name: cell for cell in found}


def in_a_word(cell: PipelineCell) -> str:
    """What became of a cell."""
    if cell.passed:
        return "proven"
    return "refused" if cell.refused else "not equal" if cell.share is not None else "failed"


def summary(cells: Sequence[PipelineCell]) -> str:
    """How many cells are proven, refused and neither, and the worst error."""
    proven = [c.share for c in cells if c.passed and c.share is not None]
    refused = sum(c.refused for c in cells)
    worst = f"; the worst error is {max(proven):.2f} of its bound" if proven else ""
    return (
        f"{len(proven)} of {len(cells)} cells are proven, {refused} are refused with a finding, "
        f"{len(cells) - len(proven) - refused} fail{worst}."
    )


def markdown(cells: Sequence[PipelineCell]) -> str:
    """The table: a row a model, a column a preset, in each cell the schedules that are proven. The others, with the reason,
    are below.
    """
    across = list(dict.fromkeys(cell.preset for cell in cells))
    lines = []
    for model in dict.fromkeys(cell.model for cell in cells):
        line = [model]
        for preset in across:
            line.append(_schedules([c for c in cells if (c.model, c.preset) == (model, preset)]))
        lines.append(line)
    return "\n\n".join([table(["model", *across], lines), *_others(cells)])


def _schedules(cells: Sequence[PipelineCell]) -> str:
    """The proven schedules of a model on a preset; an empty text where nothing ran."""
    proven = [cell.schedule for cell in cells if cell.passed]
    shares = [cell.share for cell in cells if cell.passed and cell.share is not None]
    if not proven:
        return in_a_word(cells[0]) if cells else ""
    which = "all" if len(proven) == len(SCHEDULES) else ", ".join(proven)
    return f"{which} ({max(shares):.2f})"


def _others(cells: Sequence[PipelineCell]) -> list[str]:
    """What is not proven, those with the same reason together."""
    together: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if not cell.passed:
            together.setdefault((cell.model, in_a_word(cell), cell.reason), []).append(
                f"{cell.schedule} on {cell.preset}"
            )
    return [f"- {model}, {', '.join(where)}: {word}. {why}" for (model, word, why), where in together.items()]


def document(cells: Sequence[PipelineCell]) -> Mapping[str, Any]:
    """What `--json` prints."""
    return {
        "passed": all(cell.passed or cell.refused for cell in cells),
        "cells": [
            {
                **dataclasses.asdict(cell),
                "share": cell.share if cell.share != float("inf") else sys.float_info.max,
            }
            for cell in cells
        ],
    }
