"""Found presets on this machine: whether their real order is the predicted one. The machine has to be idle otherwise."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import step_seconds
from benchmarks.search.kept import Kept, uninterrupted
from benchmarks.search.tables import Table
from benchmarks.search.unpruned import every_price
from parallelizer.propose.search.estimate import Estimate
from parallelizer.propose.search.preset import run_overrides
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.task import SearchTask, read_task
from parallelizer.propose.search.truth import TracedWhole, trace_whole
from parallelizer.report.rows.time import duration

MODELS = {
    "Llama": ("model=llama_debug", "model.dim=512", "model.hidden_dim=1408", "train.seq_len=256"),
    "hf_gpt2": ("model=hf_gpt2", "++model.config.n_embd=512", "train.seq_len=256"),
    "hf_qwen3": ("model=hf_qwen3", "++model.config.hidden_size=512", "train.seq_len=256"),
}
RANKS = (4, 8)
WITHIN = ("mesh.tp=1..4", "mesh.cp=1..4", "mesh.pp=1..2", "checkpoint=none,full")
BEHIND = 1.05
"""How much longer than the best run the step of the best found preset may take."""

STEPS = 6

ROUNDS = 3
"""How often each preset is run, in turns: what else the machine does then meets all three."""


def measure(kept: Kept, only: str, steps: int = STEPS) -> Table:
    """The best that is found, and the median and the worst of all candidates that fit, on 4 and 8 gloo ranks."""
    rows, wrong = [], []
    for model, overrides in MODELS.items():
        for ranks in RANKS:
            name = f"{model}, {ranks} ranks"
            if only not in name:
                continue
            one = kept.of(f"here: {name}", lambda o=overrides, n=ranks: _measured([*o, f"gpus={n}"], steps))
            took = [each["took"] for each in one["runs"]]
            if took != sorted(took):
                wrong.append(f"{name}: the order is another")
            if took[0] > BEHIND * min(took):
                wrong.append(
                    f"{name}: the best found takes {took[0] / min(took) - 1:.0%} longer than the best run"
                )
            wrong += [f"{name}: {each['mesh']} is not proven" for each in one["runs"] if not each["proven"]]
            for at, each in enumerate(one["runs"]):
                rows.append([
                    name if not at else "", ("best", "median", "worst")[at], each["mesh"], duration(each["predicted"]),
                    duration(each["took"]), "yes" if each["proven"] else "no",
                ])  # fmt: skip
                print(*rows[-1], sep="  ", flush=True)
    head = ["search", "place", "mesh", "predicted", "took", "proven"]
    said = (
        "Searches with `hardware=this`: the best that is found, and the median and the worst of all candidates that fit, priced "
        f"without bounds, run on gloo ranks {ROUNDS} times in turns. `took` is the median, `proven` what `verify` says."
    )
    return Table("On this machine", said, head, rows, wrong)


def _measured(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = read_task([*overrides, "train.batch_size=16", "hardware=this", "device=cpu"], within=WITHIN)
    search = Search(task.base, lambda _: None)
    found = uninterrupted(search.run(task))
    best = found.results[0]
    behind = [
        price
        for price in every_price(search, task)
        if price.peak <= task.memory and price.candidate.without_layers() != best.candidate.without_layers()
    ]
    chosen = [best, _first(search, task, behind[len(behind) // 2 :]), _first(search, task, behind[::-1])]
    chosen.sort(key=lambda one: one.seconds)
    setups = [task.setup_of(search.preset(task, one.candidate), one.candidate) for one in chosen]
    took: list[list[float]] = [[] for _ in setups]
    for _ in range(ROUNDS):
        for setup, times in zip(setups, took, strict=True):
            times.append(step_seconds(setup, steps))
    runs = [
        {
            "mesh": f"{one.candidate.words()} ({one.candidate.options()})",
            "predicted": one.seconds,
            "took": statistics.median(times),
            "proven": _proven(search, task, one),
        }
        for one, times in zip(chosen, took, strict=True)
    ]
    return {"runs": runs}


def _first(search: Search, task: SearchTask, some: Sequence[Estimate]) -> TracedWhole:
    """The dry run of the first candidate that can be dry-run."""
    for price in some:
        one = trace_whole(task, search.model, price.candidate, search.preset(task, price.candidate))
        if isinstance(one, TracedWhole):
            return one
    raise SystemExit("no candidate can be dry-run")


def _proven(search: Search, task: SearchTask, one: TracedWhole) -> bool:
    """Whether `verify` proves a found preset."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parallel" / "found.yaml"
        file.parent.mkdir()
        file.write_text(search.preset(task, one.candidate))
        words = [*task.overrides, *run_overrides(one.candidate), "parallel=found"]
        command = [sys.executable, "-m", "parallelizer", "verify", "--config-dir", folder, *words]
        return not subprocess.run(command, capture_output=True, check=False).returncode
