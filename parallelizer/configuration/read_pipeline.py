"""A preset's key `pipeline`: the schedule, and the numbers that it runs with on the mesh."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from parallelizer.configuration.reading import Reading, is_whole
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Related, quoted
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.order_file import read_order
from parallelizer.language.pipeline.settings import BALANCES, Pipeline
from parallelizer.language.plan import BATCH_AXES, Mesh
from parallelizer.language.schema.preset_keys import PIPELINE_KEYS
from parallelizer.language.workload import Workload
from parallelizer.language.yaml_nodes import shown_path

KEY = "parallel.pipeline"


def read_pipeline(reading: Reading, mesh: Mesh) -> Pipeline | None:
    """The settings, with all numbers filled in, if the mesh has the axis pp; mistakes are reported.

    None for a mesh without pp, and where a mistake leaves no schedule to run.
    """
    before = len(reading.findings.items)
    for entry, _ in reading.mapping(KEY, resolve=False):
        if entry.text not in PIPELINE_KEYS:
            message = f"`pipeline` has no key {quoted(entry.text)}"
            help_text = did_you_mean(entry.text, PIPELINE_KEYS, "it has")
            reading.unknown("unknown-key", message, f"{KEY}.{entry.text}", help_text)
    pipeline = Pipeline(
        schedule=_schedule(reading),
        microbatches=_number(reading, "microbatches"),
        stages_per_rank=_number(reading, "stages_per_rank"),
        balance=_balance(reading),
        csv=_csv(reading),
        spans={key: reading.span(f"{KEY}.{key}") for key in PIPELINE_KEYS},
    )
    if mesh.sizes["pp"] == 1 or len(reading.findings.items) > before:
        return None
    return _with_file(reading, pipeline, mesh) if pipeline.csv else _fitting(reading, pipeline, mesh)


def without_pp(reading: Reading, mesh: Mesh) -> tuple[Diagnostic, ...]:
    """A note if settings of the pipeline are not the default ones although the mesh has no axis pp."""
    default = Pipeline()
    changed = [
        key
        for key in PIPELINE_KEYS
        if reading.get(f"{KEY}.{key}", getattr(default, key), resolve=False) != getattr(default, key)
    ]
    if mesh.sizes["pp"] > 1 or not changed:
        return ()
    return (
        Diagnostic(
            "pipeline-without-pp",
            f"`pipeline` sets {' and '.join(changed)}, but the axis pp is 1, so there is no pipeline",
            reading.origins.key_span(f"{KEY}.{changed[0]}") or reading.span(f"{KEY}.{changed[0]}"),
            "set parallel.mesh.pp to the number of ranks of the pipeline, or remove the keys",
            "note",
        ),
    )


def check_rows(reading: Reading, pipeline: Pipeline, mesh: Mesh, workload: Workload) -> None:
    """Report microbatches that the rows of a data rank cannot be divided into."""
    shares = mesh.size(*BATCH_AXES) * workload.accumulate
    count, rows = pipeline.microbatches, workload.batch_size // shares
    if count is None or workload.batch_size % shares or rows < 1 or rows % count == 0:
        return  # rows that the data ranks cannot share are `batch-not-divisible`
    fits = [n for n in range(1, rows + 1) if rows % n == 0 and _runs(pipeline, mesh, n)]
    ways = (
        [f"set parallel.pipeline.microbatches to {' or '.join(map(str, _nearest(fits, count)))}"]
        if fits
        else []
    )
    below = rows // count * count
    batches = [n * shares for n in (below, below + count) if n]
    ways.append(f"{'or ' if ways else ''}set train.batch_size to {' or '.join(map(str, batches))}")
    own = reading.get(f"{KEY}.microbatches") is not None or pipeline.csv is not None
    of = f"of the {workload.batch_size} " if shares > 1 else ""
    key = "csv" if pipeline.csv else "microbatches"
    reading.findings.error(
        "microbatches-do-not-divide",
        f"the {rows} rows {of}that a data rank has at a time do not divide into {count} microbatches"
        + ("" if own else ", which is 2 x pp, the default"),
        reading.span(f"{KEY}.{key}") if own else reading.span("parallel.mesh.pp"),
        ", ".join(ways),
        [Related(workload.spans["batch_size"], f"{workload.batch_size} rows are set here")]
        if "batch_size" in workload.spans
        else [],
    )


def _runs(pipeline: Pipeline, mesh: Mesh, microbatches: int) -> bool:
    if pipeline.order is not None:
        return False
    return replace(pipeline, microbatches=microbatches).misfit(mesh.sizes["pp"]) is None


def _nearest(numbers: list[int], wanted: int) -> list[int]:
    """The nearest number on each side."""
    below, above = [n for n in numbers if n < wanted][-1:], [n for n in numbers if n > wanted][:1]
    return below + above


def _schedule(reading: Reading) -> str:
    name = reading.get(f"{KEY}.schedule", Pipeline.schedule)
    if not isinstance(name, str) or name not in SCHEDULES:
        help_text = did_you_mean(str(name), SCHEDULES, "there are")
        if str(name).endswith(".csv"):
            help_text = f"a file is set by parallel.pipeline.csv={name}; {help_text}"
        reading.error(
            "unknown-schedule", f"there is no schedule {quoted(str(name))}", f"{KEY}.schedule", help_text
        )
        return Pipeline.schedule
    return name


def _number(reading: Reading, name: str) -> int | None:
    key = f"{KEY}.{name}"
    return None if reading.get(key) is None else reading.whole_number(key, name)


def _balance(reading: Reading) -> str | tuple[int, ...]:
    key = f"{KEY}.balance"
    balance = reading.get(key, Pipeline.balance)
    if isinstance(balance, list):
        if balance and all(is_whole(size) and size >= 1 for size in balance):
            return tuple(balance)
        wrong = next((size for size in balance if not (is_whole(size) and size >= 1)), None)
        message = (
            "balance is an empty list"
            if not balance
            else f"balance gives a stage {quoted(str(wrong))} layers"
        )
        reading.error("wrong-type", message, key, "write the number of layers of each stage, at least 1")
    elif not isinstance(balance, str) or balance not in BALANCES:
        help_text = did_you_mean(str(balance), BALANCES, "there are") + ", or a list of numbers of layers"
        reading.error("unknown-value", f"there is no balance {quoted(str(balance))}", key, help_text)
    else:
        return balance
    return Pipeline.balance


def _csv(reading: Reading) -> str | None:
    """The file's name as written."""
    key = f"{KEY}.csv"
    name = reading.get(key)
    if name is None or (isinstance(name, str) and name):
        return name
    reading.error("wrong-type", f"csv is {quoted(str(name))}", key, "it is the path of a file, or null")
    return None


def _fitting(reading: Reading, pipeline: Pipeline, mesh: Mesh) -> Pipeline | None:
    """The settings of a schedule of the table, if it can run them."""
    ranks = mesh.sizes["pp"]
    wrong = pipeline.misfit(ranks)
    if wrong is None:
        return _balanced(reading, pipeline.settled(ranks), ranks)
    related = [Related(pipeline.spans["schedule"], "the schedule is set here")]
    if "pp" in mesh.spans:
        related.append(Related(mesh.spans["pp"], f"pp={ranks} is set here"))
    span = reading.span(f"{KEY}.{wrong.key}")
    reading.findings.error("pipeline-numbers", wrong.message, span, wrong.help, related)
    return None


def _with_file(reading: Reading, pipeline: Pipeline, mesh: Mesh) -> Pipeline | None:
    """The settings with the order of the file, if it is an order for this mesh."""
    before, ranks, name = len(reading.findings.items), mesh.sizes["pp"], pipeline.csv or ""
    if pipeline.schedule != Pipeline.schedule:
        message = f"csv={name} and schedule={pipeline.schedule} both set the schedule"
        related = [Related(reading.span(f"{KEY}.csv"), "the other is set here")]
        reading.findings.error(
            "two-schedules", message, reading.span(f"{KEY}.schedule"), "remove one", related
        )
        return None
    folders = [Path(), *reading.origins.folders]
    path = next((path for folder in folders if (path := folder / name).is_file()), None)
    if path is None:
        looked_in = ", ".join([os.getcwd(), *map(shown_path, reading.origins.folders)])
        is_folder = any((folder / name).is_dir() for folder in folders)
        message = f"{quoted(name)} is a folder" if is_folder else f"there is no schedule file {quoted(name)}"
        reading.error("schedule-file", message, f"{KEY}.csv", f"name a CSV file; looked in {looked_in}")
        return None
    try:
        order = read_order(str(path), shown_path(path))
    except PlanError as error:
        reading.findings.items.extend(error.diagnostics)
        return None
    settled = replace(pipeline, order=order).settled(ranks)
    if len(order) != ranks:
        message = f"{name} has {len(order)} rows, one for each rank, but pp is {ranks}"
        related = [Related(mesh.spans["pp"], f"pp={ranks} is set here")] if "pp" in mesh.spans else []
        help_text = f"set parallel.mesh.pp to {len(order)}, or name another file"
        reading.findings.error("pipeline-numbers", message, reading.span(f"{KEY}.csv"), help_text, related)
    for key in ("microbatches", "stages_per_rank"):
        said, has = getattr(pipeline, key), getattr(settled, key)
        if said not in (None, has):
            message = f"{key} is {said}, but {name} has {has}"
            reading.error("pipeline-numbers", message, f"{KEY}.{key}", f"set {key} to {has} or to null")
    return _balanced(reading, settled, ranks) if len(reading.findings.items) == before else None


def _balanced(reading: Reading, pipeline: Pipeline, ranks: int) -> Pipeline | None:
    """The settings, if a list of numbers of layers has one for each stage."""
    sizes, stages = pipeline.balance, ranks * (pipeline.stages_per_rank or 1)
    if isinstance(sizes, str) or len(sizes) == stages:
        return pipeline
    message = f"balance has {len(sizes)} numbers of layers, but there are {stages} stages"
    help_text = f"write {stages} numbers: {ranks} ranks have {pipeline.stages_per_rank} each"
    reading.error("pipeline-numbers", message, f"{KEY}.balance", help_text)
    return None
