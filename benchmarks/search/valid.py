"""Whether what a search emits is valid: random models, numbers of GPUs and options, each found preset validated and planned."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.search.kept import Kept, uninterrupted
from benchmarks.search.tables import Table
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import PlanError, has_errors
from parallelizer.propose.search.preset import run_overrides
from parallelizer.propose.search.reasons import comments
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.task import SearchTask, read_task
from parallelizer.simulate.record.trace_classes import worst

CASES = 200

EMPTY = 0.25
"""The share of the searches that may find nothing: batches, limits and memory are drawn at random."""

PRESETS = 2
"""Presets of a search that are validated."""

LLAMA = ("model.dim=64", "model.hidden_dim=128", "model.max_seq_len=256")
MODELS = (
    "llama_debug", "llama_packed", "alibi_tiny", "vit_tiny", "encoder_decoder_tiny", "hf_bert", "hf_deepseek_v3",
    "hf_gemma2", "hf_gemma3_text", "hf_gpt2", "hf_gpt_neox", "hf_llama", "hf_llama_packed", "hf_mistral", "hf_mixtral",
    "hf_opt", "hf_phi3", "hf_qwen2", "hf_qwen3", "hf_qwen3_moe", "my_gpt",
)  # fmt: skip

LEAST_LAYERS = {"hf_deepseek_v3": 2}
"""The first layer has no experts, and a plan with a rule for them needs some."""

OWN = "my_gpt"
"""A user's own model, with the plan that `init` proposes: that of the page on a model of one's own."""

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your_own_model.md"


def measure(kept: Kept, only: str, cases: int = CASES) -> Table:
    """The cases by their numbers: a case is the same on every machine."""
    rows, wrong, errors = [], [], []
    presets = refused = 0
    by_model: dict[str, list[int]] = {}
    for number in range(cases):
        overrides, within = case(number)
        name = " ".join([*overrides, *(f"--within {limit}" for limit in within)])
        if only not in name:
            continue
        one = kept.of(f"valid: {number}", lambda o=overrides, w=within: _measured(o, w))
        of_model = by_model.setdefault(overrides[0].removeprefix("model="), [0, 0, 0, 0])
        of_model[0] += 1
        of_model[1] += not one["presets"]
        for preset in one["presets"]:
            presets += 1
            of_model[2] += 1
            of_model[3] += not preset["wrong"]
            if preset["wrong"]:
                wrong.append(f"{number}: {name}: {preset['mesh']}: {preset['wrong']}")
                print(wrong[-1], flush=True)
        refused += not one["presets"]
        if not one["presets"]:
            print(f"{number}: {name}: {one['reason']}", flush=True)
        if one["error"]:
            errors.append(f"{number}: {name}: {one['reason']}")
    searches = sum(counts[0] for counts in by_model.values())
    valid = presets - len(wrong)
    wrong += errors
    if refused > EMPTY * searches:
        wrong.append(f"{refused} of {searches} searches found nothing, more than {EMPTY:.0%}")
    rows = [[model, *map(str, counts)] for model, counts in sorted(by_model.items())]
    said = (
        f"{searches} searches with random models, numbers of GPUs, batches and limits: "
        f"{presets} presets, of which {valid} pass `validate` and have the memory of `plan`, to the byte. "
        f"{refused} searches found nothing: {len(errors)} because of an error or a dry run that failed, the others because the "
        "batch, the limits or the memory leave nothing."
    )
    head = ["model", "searches", "without a preset", "presets", "valid, with the memory of `plan`"]
    return Table("Found presets", said, head, rows, wrong)


def case(number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The overrides and the limits of a case."""
    draw = random.Random(f"search {number}")
    model = draw.choice(MODELS)
    gpus = draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64))
    words = [f"model={model}", f"gpus={gpus}", f"hardware={draw.choice(('a100', 'h100', 'h200', 'b200'))}"]
    words.append(
        f"train.batch_size={gpus * draw.choice((1, 2, 4)) if draw.random() < 0.8 else draw.choice((8, 24))}"
    )
    if model != "vit_tiny":
        words.append(f"train.seq_len={draw.choice((32, 64, 96, 128))}")
    if model.startswith("llama"):
        words += [*LLAMA, f"model.n_layers={draw.randint(1, 6)}"]
    elif model == OWN:
        words += ["model.width=64", f"model.layers={draw.randint(1, 6)}"]
    elif (
        model.startswith("hf") and model != "hf_gemma3_text"
    ):  # whose configuration lists the kinds of its layers
        layers = max(draw.randint(1, 5), LEAST_LAYERS.get(model, 1))
        words.append(f"++model.config.{'n_layer' if model == 'hf_gpt2' else 'num_hidden_layers'}={layers}")
    if draw.random() < 0.2:
        words.append("parallel.styles.fsdp.reduce_dtype=bfloat16")
    # Few classes, so that a case takes seconds; none that leaves no mesh by itself.
    tp = [limit for limit in ("1", "1..2", "2", "2..4", "4") if gpus % int(limit[0]) == 0]
    limits = [f"mesh.tp={draw.choice(tp)}", f"mesh.cp={draw.choice(('1', '1', '1..2'))}"]
    limits.append(f"checkpoint={draw.choice(('none', 'full', 'selective'))}")
    if draw.random() < 0.2:
        limits.append("stream=split,whole")
    if draw.random() < 0.3:
        limits.append("mesh.pp=1..4" if draw.random() < 0.5 or gpus % 2 else "mesh.pp=2..4")
    if draw.random() < 0.2:
        limits.append(f"cp.method={draw.choice(('ring', 'ulysses', 'all-gather'))}")
    if draw.random() < 0.2:
        limits.append("checkpoint.share=0..1")
    return tuple(words), tuple(limits)


def _measured(overrides: Sequence[str], within: Sequence[str]) -> dict[str, Any]:
    with own_model() as folder:
        config_dir = folder if f"model={OWN}" in overrides else None
        return _searched(overrides, within, config_dir)


@contextmanager
def own_model() -> Iterator[str]:
    """The configuration folder of the own model, whose class can be imported while the folder is there."""
    files = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE.read_text(), re.S)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files:
            file = Path(folder) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        sys.path.insert(0, folder)
        try:
            yield str(Path(folder) / "mine")
        finally:
            sys.path.remove(folder)


def _searched(overrides: Sequence[str], within: Sequence[str], config_dir: str | None) -> dict[str, Any]:
    try:
        task = read_task(overrides, within=within, config_dir=config_dir)
        task = dataclasses.replace(task, traced=PRESETS)
        search = Search(task.base, lambda _: None)
        found = uninterrupted(search.run(task))
    except PlanError as error:
        return {"presets": [], "reason": error.diagnostics[0].message, "error": True}
    presets = []
    for place, one in enumerate(found.results):
        text = search.preset(task, one.candidate, comments(found, task, place, "search"))
        wrong = _wrong(task, text, run_overrides(one.candidate), one.peak)
        presets.append({"mesh": f"{one.candidate.words()} ({one.candidate.options()})", "wrong": wrong})
    out = found.excluded.most_common(1)
    failed = found.failed[0].reason if found.failed else None
    reason = failed or (out[0][0] if out else "nothing fits")
    return {"presets": presets, "reason": reason, "error": failed is not None and not presets}


def _wrong(task: SearchTask, text: str, more: Sequence[str], peak: int) -> str:
    """Why a preset, saved as a file, is not valid or not what was printed; empty for one that is."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parallel" / "found.yaml"
        os.mkdir(file.parent)
        file.write_text(text)
        try:
            own = [folder, *([task.config_dir] if task.config_dir else [])]
            setup = from_config(*compose_config([*task.overrides, *more, "parallel=found"], own))
            model = setup.build_model()
            done = validated(setup, setup.compile(model), model, classes=True)
        except PlanError as error:
            return "; ".join(one.message for one in error.diagnostics)
    if has_errors(done.found):
        return "; ".join(f"{one.code}: {one.message}" for one in done.found if one.severity == "error")
    if done.trace is None:
        return "`plan` has no memory"
    planned = worst(done.trace)[0]
    return "" if planned == peak else f"`plan` says {planned:,} bytes, the search {peak:,}"
