"""What a search finds against the best of its space: the dry run of every candidate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.search.kept import Kept, uninterrupted
from benchmarks.search.seconds import CASES as CASES_OF_TIME
from benchmarks.search.seconds import search_words
from benchmarks.search.tables import Table
from benchmarks.search.unpruned import every_price
from parallelizer.diagnostics.units import size
from parallelizer.propose.search.bounds import memory_bound
from parallelizer.propose.search.estimate import SURE, Estimates
from parallelizer.propose.search.run import SLOWER, Search
from parallelizer.propose.search.space import CandidateCount, candidates
from parallelizer.propose.search.task import SearchTask, read_task
from parallelizer.propose.search.truth import TracedWhole, trace_whole
from parallelizer.report.rows.time import duration

WIDE = (
    "model.dim=1024", "model.hidden_dim=2816", "model.n_heads=8", "model.n_kv_heads=8", "model.n_layers=4",
    "model.max_seq_len=1024", "train.seq_len=1024", "train.batch_size=16", "hardware=h100",
)  # fmt: skip
"""Wide enough for products to take longer than the host."""

FAMILY = (
    "++model.config.hidden_size=1024", "++model.config.num_hidden_layers=4", "++model.config.intermediate_size=2816",
    "++model.config.num_attention_heads=8", "++model.config.num_key_value_heads=8", "++model.config.head_dim=128",
    "++model.config.max_position_embeddings=1024", "train.seq_len=1024", "train.batch_size=16", "hardware=h100",
)  # fmt: skip

EXPERTS = ("++model.config.moe_intermediate_size=1024",)

CASES = {
    "Llama, 4 GPUs, no stages": (
        (*WIDE, "gpus=4"), ("mesh.pp=1", "mesh.dp_replicate=1", "rows=2,4", "checkpoint=none,full"),
    ),
    "Llama, 4 GPUs, stages": (
        (*WIDE, "gpus=4"), ("mesh.pp=2..4", "mesh.cp=1", "mesh.dp_replicate=1", "mesh.tp=1..2", "checkpoint=none"),
    ),
    "Llama, 8 GPUs, replicas": (
        (*WIDE, "gpus=8"), ("mesh.pp=1..2", "mesh.cp=1", "mesh.tp=1..2", "rows=1,2", "checkpoint=none"),
    ),
    "hf_qwen3, 4 GPUs": (
        ("model=hf_qwen3", *FAMILY, "gpus=4"),
        ("mesh.pp=1..2", "mesh.cp=1..2", "mesh.dp_replicate=1", "mesh.tp=1..2", "rows=2", "checkpoint=none,selective"),
    ),
    "hf_gpt2, 4 GPUs": (
        ("model=hf_gpt2", "++model.config.n_embd=1024", "++model.config.n_layer=4", "++model.config.n_head=8",
         "++model.config.n_positions=1024", "train.seq_len=1024", "train.batch_size=16", "hardware=h100", "gpus=4"),
        ("mesh.cp=1", "mesh.tp=1..2", "rows=2,4", "mesh.dp_replicate=1..2", "checkpoint=none", "pipeline.schedule=1f1b"),
    ),
    "hf_qwen3_moe, 4 GPUs, experts": (
        ("model=hf_qwen3_moe", *FAMILY, *EXPERTS, "gpus=4"),
        ("mesh.pp=1", "mesh.cp=1", "mesh.dp_replicate=1", "mesh.tp=1..2", "rows=2,4", "checkpoint=none"),
    ),
    "hf_qwen3_moe, 4 GPUs, experts and stages": (
        ("model=hf_qwen3_moe", *FAMILY, *EXPERTS, "gpus=4"),
        ("mesh.pp=2", "mesh.cp=1", "mesh.dp_replicate=1", "mesh.tp=1", "rows=1,2", "checkpoint=none",
         "pipeline.schedule=1f1b"),
    ),
}  # fmt: skip
"""The overrides and the limits of each."""

LARGE = ("Llama 3 70B, 256 H100", "Llama 3.1 405B, 1,024 H100", "Qwen3-30B-A3B, 64 H200")
"""The searches of the part `time` whose whole spaces are priced."""

TRACED = 20
"""The best of a whole space that are dry-run."""

BEHIND = 1.03
"""How much longer than the best of all a search's best may take."""


def measure(kept: Kept, only: str) -> Table:
    """Each case without a limit of memory, and with one at the median of all peaks, where half of the candidates do not fit."""
    rows, wrong = [], []
    for name, (overrides, within) in CASES.items():
        if only not in name:
            continue
        one = kept.of(f"exhaustive: {name}", lambda o=overrides, w=within: _measured(o, w))
        wrong += _beyond(name, one["ratios"])
        for at, limit in enumerate(one["limits"]):
            ratio = limit["found"] / limit["best"]
            rows.append([
                name if not at else "", str(one["candidates"]), limit["memory"], str(limit["fit"]), str(limit["traced"]),
                duration(limit["best"]), duration(limit["found"]), f"{ratio - 1:+.1%}",
                *([_percent(one["ratios"][key]) for key in ("seconds", "peak")] if not at else ["", ""]),
            ])  # fmt: skip
            if ratio > BEHIND:
                wrong.append(f"{name}, {limit['memory']}: {limit['words']} is faster")
        print(*rows[-1], sep="  ", flush=True)
    head = [
        "space",
        "candidates",
        "memory",
        "fit",
        "dry runs of the search",
        "best of all",
        "found",
        "behind",
        "time, of its estimate",
        "peak, of its estimate",
    ]
    said = (
        "Every candidate of these spaces was dry-run whole, and then searched for. The second row of each has the median of all "
        "peaks as the limit of memory, so that half of the candidates do not fit. The last columns have the least and the "
        "most that a dry run takes of its estimate, over all candidates."
    )
    return Table("Exhaustive search", said, head, rows, wrong)


def _percent(ratios: Sequence[float]) -> str:
    return f"{ratios[0]:.0%} to {ratios[1]:.0%}"


def _beyond(name: str, ratios: dict[str, list[float]]) -> list[str]:
    """The constants of the search that a dry run of the space contradicts."""
    wrong = []
    if ratios["states"][0] < 1:
        wrong.append(f"{name}: a dry run holds {ratios['states'][0]:.0%} of its bound of memory")
    low, high = ratios["peak"]
    if low * SURE < 1 or high > SURE:
        wrong.append(f"{name}: peaks are {low:.0%} to {high:.0%} of their estimates, and SURE is {SURE}")
    if ratios["least"][0] * SLOWER < 1:
        wrong.append(f"{name}: a dry run takes {ratios['least'][0]:.0%} of `least`, and SLOWER is {SLOWER}")
    return wrong


def measure_large(kept: Kept, only: str) -> Table:
    """The large searches against their whole spaces. Their candidates are too many to dry-run each: all are priced."""
    rows, wrong = [], []
    for name in LARGE:
        if only not in name:
            continue
        one = kept.of(f"large: {name}", lambda given=CASES_OF_TIME[name]: _of_large(given))
        ratio = one["found"] / one["best"]
        rows.append([
            name, f"{one['candidates']:,}", f"{one['searched']:,}", str(one["fit"]), duration(one["best"]),
            duration(one["found"]), f"{ratio - 1:+.1%}",
        ])  # fmt: skip
        if ratio > BEHIND:
            wrong.append(f"{name}: {one['words']} is faster")
        print(*rows[-1], sep="  ", flush=True)
    head = ["space", "priced", "priced by the search", "dry runs that fit", "best of all", "found", "behind"]
    said = (
        f"Every candidate of these spaces was priced without bounds, by the estimates of the search, and the {TRACED} best that "
        "fit by estimate were dry-run. `behind` compares the fastest of those with what the search finds."
    )
    return Table("Large spaces", said, head, rows, wrong)


def _of_large(words: Sequence[str]) -> dict[str, Any]:
    with search_words(words) as (overrides, within, memory):
        task = read_task(overrides, within=within, memory=memory)
        search = Search(task.base, lambda _: None)
        found = uninterrupted(search.run(task))
        prices = every_price(search, task)
        near = [e.candidate for e in prices if e.peak <= SURE * task.memory][:TRACED]
        made = [trace_whole(task, search.model, one, search.preset(task, one)) for one in near]
    fit = [one for one in made if isinstance(one, TracedWhole) and one.peak <= task.memory]
    best = min([*fit, *found.results], key=lambda one: one.seconds)
    return {
        "candidates": len(prices),
        "searched": len(found.priced),
        "fit": len(fit),
        "best": best.seconds,
        "words": f"{best.candidate.words()} ({best.candidate.options()})",
        "found": found.results[0].seconds,
    }


def _ratios(search: Search, task: SearchTask, every: Sequence[TracedWhole]) -> dict[str, list[float]]:
    """By the constant that the search relies on, the least and the most that the dry run has of the estimate."""
    by_candidate = {e.candidate.without_layers(): e for e in every_price(search, task)}
    estimates = Estimates(task.machine, search.classes.traces)
    ratios: dict[str, list[float]] = {"peak": [], "seconds": [], "least": [], "states": []}
    for one in every:
        price = by_candidate[one.candidate.without_layers()]
        ratios["peak"].append(one.peak / price.peak)
        ratios["seconds"].append(one.seconds / price.seconds)
        ratios["least"].append(one.seconds / estimates.least(one.candidate.without_layers()))
        ratios["states"].append(one.peak / memory_bound(one.candidate, search.states))
    return {name: [min(found), max(found)] for name, found in ratios.items()}


def _measured(overrides: tuple[str, ...], within: tuple[str, ...]) -> dict[str, Any]:
    task = read_task(overrides, within=within, memory=10**15)
    search = Search(task.base, lambda _: None)
    every: list[TracedWhole] = []
    for at, one in enumerate(candidates(search.facts(task), task.within, CandidateCount())):
        traced = trace_whole(task, search.model, one, search.preset(task, one))
        print(f"  {at + 1}: {one.words()} ({one.options()}): "
              f"{duration(traced.seconds) if isinstance(traced, TracedWhole) else traced.reason}", flush=True)  # fmt: skip
        if isinstance(traced, TracedWhole):
            every.append(traced)
    limits = []
    for memory in (None, int(statistics.median(one.peak for one in every))):
        limited = read_task(overrides, within=within, memory=memory or 10**15)
        found = uninterrupted(Search(limited.base, lambda _: None).run(limited))
        fit = [one for one in every if memory is None or one.peak <= memory]
        best = min(fit, key=lambda one: one.seconds)
        limits.append({
            "memory": "any" if memory is None else size(memory),
            "fit": len(fit),
            "traced": len(found.results) + len(found.too_large),
            "best": best.seconds,
            "words": f"{best.candidate.words()} ({best.candidate.options()})",
            "found": found.results[0].seconds if found.results else float("inf"),
        })  # fmt: skip
    return {"candidates": len(every), "limits": limits, "ratios": _ratios(search, task, every)}
