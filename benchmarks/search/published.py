"""What a search finds against the meshes of published runs, by the same clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.published.compose import compose, left_out
from benchmarks.published.rows import Row, read
from benchmarks.search.kept import Kept, uninterrupted
from benchmarks.search.tables import Table
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.step_time import step_time
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.diagnostics.units import size
from parallelizer.propose.search.reasons import loses
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.task import read_task
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.report.rows.time import duration
from parallelizer.simulate.record.trace_classes import trace_classes, worst

SLOWER = 1.1
"""A published mesh that takes so many times as long as the found one is listed with the reason."""

ROUNDING = 1.0005


def measure(kept: Kept, only: str) -> Table:
    """Each run of runs.yaml without experts; runs of one model on the same GPUs with the same batch are one search."""
    rows, wrong, known = [], [], set()
    for row in read():
        if left_out(row) is not None or only not in row.id:
            continue
        name = json.dumps(_search_of(row))
        if (name, json.dumps(row.mesh)) in known:
            continue  # the same but for its precision, which is none of the search's
        known.add((name, json.dumps(row.mesh)))
        one = kept.of(f"published: {row.id}", lambda given=row: _measured(given))
        if "reason" in one:
            wrong.append(f"{row.id}: {one['reason']}")
            continue
        ratio = one["published"] / one["found"]
        if ratio * ROUNDING < 1:
            wrong.append(f"{row.id}: the published mesh is faster than {one['mesh']}")
        rows.append([
            row.id, str(row.run["gpus"]), _mesh(row), duration(one["published"]), one["published_peak"],
            one["mesh"], duration(one["found"]), one["peak"], f"{ratio:.2f}",
            one["loses"] if ratio > SLOWER else "",
        ])  # fmt: skip
        print(*rows[-1], sep="  ", flush=True)
    head = ["run", "GPUs", "published", "step", "peak", "found", "step", "peak", "ratio", "why"]
    said = (
        "The steps of published meshes and of found ones, both by the clock of `plan` in bfloat16, with the model, sequences, "
        "batch and the compiled modules of the run. The search may use as much memory as the published mesh needs, or nine "
        "tenths of the device. Runs that differ in precision alone are one row. `why` says what the published mesh has more of."
    )
    return Table("Published meshes", said, head, rows, wrong)


def _mesh(row: Row) -> str:
    axes = " x ".join(f"{axis}={count}" for axis, count in row.mesh.items() if count > 1)
    return f"{axes or 'one'}, checkpoint {row.run['ac']}"


def _search_of(row: Row) -> list[str]:
    """The command line of the search for a run."""
    composed = compose(row)
    data = row.mesh.get("dp_replicate", 1) * row.mesh.get("dp_shard", 1)
    batch = int(row.run.get("global_batch") or data * int(row.run.get("micro_batch") or 1))
    kept = [
        word
        for word in composed.overrides
        if not word.startswith(("parallel.mesh.", "parallel.pipeline.", "train.batch_size", "train.accumulate", "rules="))
        and "reshard_after_forward" not in word
        and "layouts.stream" not in word
    ]  # fmt: skip
    return [*kept, f"train.batch_size={batch}", f"gpus={row.run['gpus']}", *_hardware(row), *_rules(row)]


def _hardware(row: Row) -> list[str]:
    composed = compose(row)
    values = [f"++hardware.{key}={value}" for key, value in composed.hardware_values.items()]
    return [f"hardware={composed.hardware}", *values]


def _rules(row: Row) -> list[str]:
    """What the run compiles; checkpoints are the search's."""
    words = [w for w in compose(row).overrides if w.startswith("rules=")]
    rules = [r for w in words for r in w[len("rules=[") : -1].strip('"').split('","') if "compile" in r]
    return [f'rules=["{rule}"]' for rule in rules]


def _published(row: Row) -> list[str]:
    """The command line of `plan` for a run, of its whole batch."""
    composed, searched = compose(row), _search_of(row)
    batch = next(word for word in searched if word.startswith("train.batch_size="))
    kept = [w for w in composed.overrides if not w.startswith(("train.batch_size", "train.accumulate"))]
    return [*kept, batch, f"train.accumulate={composed.parts}", *_hardware(row)]


def _measured(row: Row) -> dict[str, Any]:
    try:
        setup = from_config(*compose_config(_published(row)))
        model = setup.build_model()
        step = trace_classes(setup.compile(model), model, setup.recipe())
        time = step_time(setup, step)
        peak = worst(step)[0]
        task = read_task(_search_of(row))
        if peak > task.memory:
            task = read_task(_search_of(row), memory=peak)
        found = uninterrupted(Search(task.base, lambda _: None).run(task))
    except PlanError as error:
        return {"reason": _words(error)}
    if time is None or not found.results:
        return {"reason": "nothing fits" if time is not None else "its time is not known"}
    best = found.results[0]
    theirs = TracedWhole(best.candidate, peak, {}, time)
    return {
        "published": time.seconds,
        "published_peak": size(peak),
        "mesh": f"{best.candidate.words()} ({best.candidate.options()})",
        "found": best.seconds,
        "peak": size(best.peak),
        "loses": loses(best, theirs),
    }


def _words(error: PlanError) -> str:
    messages: Sequence[str] = [one.message for one in error.diagnostics if one.severity == "error"]
    return messages[0] if messages else "it cannot be traced"
