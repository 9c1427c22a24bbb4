"""The pipeline of a published run: its microbatches, stages and schedule."""

from __future__ import annotations

from benchmarks.published.mixtures import layers_of
from benchmarks.published.rows import Row
from parallelizer.language.pipeline.all_schedules import SCHEDULES

NAMES = (
    ("zero bubble", "interleaved-zero-bubble"), ("zerobubble", "interleaved-zero-bubble"), ("zbv", "zbv"),
    ("dualpipev", "dualpipev"), ("interleaved", "interleaved-1f1b"), ("looped", "interleaved-1f1b"), ("gpipe", "gpipe"),
)  # fmt: skip
"""Words of a row's schedule, and what they are called here; `zbv` comes before what its long name contains. Others are 1F1B."""


def rows_of_microbatch(row: Row, rows: int) -> int:
    """The rows of a microbatch, of those of a data rank: the published number, or the next below it that divides them. Where none
    is said, torchtitan has a microbatch for each stage of a pipeline, and others have one row.
    """
    said = row.run.get("micro_batch")
    if said is None and row.mesh.get("pp", 1) > 1 and row.source == "torchtitan":
        return max(1, rows // row.mesh["pp"])
    wanted = max(1, min(rows, int(said or 1)))
    return next(n for n in range(wanted, 0, -1) if rows % n == 0)


def pipeline_of(row: Row, microbatches: int) -> list[str]:
    """Overrides for the schedule: 1F1B unless the row says another, interleaved where a rank has several stages."""
    ranks, layers = row.mesh["pp"], layers_of(row)
    word = str(row.run.get("schedule") or "").lower()
    named = "zbv" if "zbv" in word else next((name for part, name in NAMES if part in word), "1f1b")
    stages = int(row.run.get("virtual_stages_per_rank") or (1 if named in ("1f1b", "gpipe") else 2))
    if "PP communication" in row.techniques:  # Megatron overlaps it between the stages of a rank alone
        stages = layers // ranks
    # Megatron counts the embedding and the head as layers, and so divides 126 layers by 128: the nearest that divides them.
    possible = [n for n in range(1, stages + 1) if ranks * n <= layers] or [1]
    stages = min(reversed(possible), key=lambda n: -(-layers // (ranks * n)) * n)
    schedule = "interleaved-1f1b" if named == "1f1b" and stages > 1 else named
    if SCHEDULES[schedule].misfit(ranks, stages, microbatches) is not None:
        schedule, stages = "1f1b", 1
    return [
        f"parallel.pipeline.schedule={schedule}",
        f"parallel.pipeline.stages_per_rank={stages}",
        f"parallel.pipeline.microbatches={microbatches}",
    ]
