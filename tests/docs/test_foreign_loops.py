"""The loops of docs/examples that are not ours train to the losses of the recipe: same rows, seed, optimizer and plan."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chosen import a_fifth
from tests.docs.task_source import EXAMPLES, task
from tests.ranks import run_ranks
from tests.recipes.runs import ROOT, metrics, typed

SAME = 1e-6
"""Relative; float32 sums in another order differ by 3e-7 at most here."""

LLAMA = [
    "model.dim=64",
    "model.n_heads=8",
    "model.n_kv_heads=4",
    "model.hidden_dim=96",
    "model.max_seq_len=64",
]
HF = [
    "model=hf_llama", "model.config.hidden_size=64", "model.config.intermediate_size=96",
    "model.config.num_attention_heads=8", "model.config.num_key_value_heads=4",
    "model.config.max_position_embeddings=64",
]  # fmt: skip
ALIKE = [
    f"train.steps={task.STEPS}", f"train.batch_size={task.ROWS}", f"train.seq_len={task.TOKENS}",
    f"train.seed={task.SEED}", f"train.clip={task.CLIP}", f"optim.lr={task.RATE}", "optim.betas=[0.9,0.999]",
    "optim.weight_decay=0", "optim.warmup=0", "optim.final_ratio=1.0", "device=cpu",
    "data=text", "data._target_=tests.docs.task_source.load",
]  # fmt: skip
MODELS = {"bare_loop": LLAMA, "fabric_loop": LLAMA, "hf_trainer": HF}
LOOPS = ("bare_loop", "hf_trainer", "fabric_loop")
MESHES = [
    ("bare_loop", {"cp": 2, "tp": 2}),
    ("hf_trainer", {"dp_shard": 2, "tp": 2}),
    ("fabric_loop", {"dp_shard": 2, "tp": 2}),
]
MORE_MESHES = [
    ("bare_loop", {"dp_shard": 2, "tp": 2}),
    ("hf_trainer", {"cp": 2, "tp": 2}),
    ("bare_loop", {"dp_replicate": 2, "cp": 2}),
    ("hf_trainer", {"dp_replicate": 2, "dp_shard": 2}),
    ("fabric_loop", {"tp": 4}),
]

_recipe: dict[str, list[float]] = {}


def of_the_recipe(loop: str, folder: Path) -> list[float]:
    """The losses of `python -m recipes.train` on four ranks, from its metrics.jsonl; run once for each model."""
    rows = "transformers" if loop == "hf_trainer" else "plain"
    if rows not in _recipe:
        more = ["parallel=fsdp2_tp2", f"data.path={rows}", f"hydra.run.dir={folder}"]
        done = typed(*MODELS[loop], *ALIKE, *more, cwd=folder, timeout=120)
        assert done.status == 0, done.err
        _recipe[rows] = [entry["loss"] for entry in metrics(folder)]
        assert len(_recipe[rows]) == task.STEPS and _recipe[rows][-1] < _recipe[rows][0] - 0.4
    return _recipe[rows]


def losses(loop: str, axes: Mapping[str, int], **more: Any) -> list[float]:
    """What the example says, the same on each of as many forked ranks as it needs."""
    ranks = 1
    for size in axes.values():
        ranks *= size
    train = importlib.import_module(loop).train
    first, *others = run_ranks(lambda: train(axes, **more), ranks, timeout=120)
    assert all(other == first for other in others)
    return first


def worst(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("loop, axes", MESHES)
def test_the_loop_trains_to_the_losses_of_the_recipe(loop: str, axes: dict[str, int], tmp_path: Path) -> None:
    found = losses(loop, axes)
    assert worst(found, of_the_recipe(loop, tmp_path)) < SAME
    assert worst(losses(loop, {}), found) < SAME  # unsharded


@pytest.mark.ranks
@pytest.mark.parametrize("case", a_fifth(MORE_MESHES))
def test_the_loop_trains_alike_on_other_meshes(case: tuple[str, dict[str, int]], tmp_path: Path) -> None:
    assert worst(losses(*case), of_the_recipe(case[0], tmp_path)) < SAME


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", a_fifth([{"tp": 2}, {"dp_shard": 2}, {"cp": 2}]))
def test_the_trainer_accumulates_saves_and_goes_on_under_another_mesh(
    mesh: dict[str, int], tmp_path: Path
) -> None:
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 2}  # another learning rate in each step
    whole = losses("hf_trainer", {"dp_shard": 2, "tp": 2}, **schedule)
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    first = losses("hf_trainer", {"dp_shard": 2, "tp": 2}, **halves, **saving, **schedule)
    assert worst(first, whole) < SAME
    folder = tmp_path / "checkpoint-2"
    assert {"config.json", "model.safetensors", "trainer_state.json"} <= {p.name for p in folder.iterdir()}
    resumed = {"output_dir": str(tmp_path), "resume_from_checkpoint": str(folder)}
    went_on = losses("hf_trainer", mesh, **resumed, **schedule)
    assert worst(went_on, whole) < SAME  # the first two are what trainer_state.json tells


@pytest.mark.ranks
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"bf16": True}, "param_dtype: bfloat16"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ],
)
def test_the_trainer_refuses_what_a_plan_says_otherwise(wrong: dict[str, Any], message: str) -> None:
    def worker() -> None:
        with pytest.raises(ValueError, match=message):
            importlib.import_module("hf_trainer").train({}, **wrong)

    run_ranks(worker, 1, timeout=120)


@pytest.mark.ranks
def test_evaluation_of_the_trainer_is_the_mean_over_rows_of_all_ranks() -> None:
    def worker(axes: Mapping[str, int]) -> list[float]:
        import torch
        from torch.utils.data import Subset

        import parallelizer as pz
        from parallelizer.hugging_face.trainer import ParallelTrainer

        loop = importlib.import_module("hf_trainer")
        mesh = pz.build_mesh(pz.Mesh(axes), "cpu")
        with torch.device("meta"):
            model = loop.AutoModelForCausalLM.from_config(loop.LlamaConfig(**loop.CONFIG))
        pz.materialize(pz.parallelize(model, "hf_llama", mesh), device="cpu", seed=task.SEED)
        args = loop.TrainingArguments(
            use_cpu=True, report_to="none", per_device_eval_batch_size=8 // pz.batch_rank(mesh)[1]
        )
        trainer = ParallelTrainer(model, args)
        rows = loop.Rows()
        parts = ([*range(40)], [*range(8)], [8, 9, 10, 11, 0, 1, 2, 3], [*range(12)])
        found = [trainer.evaluate(Subset(rows, part))["eval_loss"] for part in parts]
        return found

    (alone,) = run_ranks(worker, 1, {}, timeout=120)
    for found in run_ranks(worker, 4, {"dp_shard": 2, "tp": 2}, timeout=120):
        assert found[:3] == pytest.approx(alone[:3], rel=SAME)
        # The last batch is filled up with the first rows, and weighs what it really has.
        assert found[3] == pytest.approx((8 * found[1] + 4 * found[2]) / 12, rel=SAME)


def test_a_model_without_a_plan_is_no_model_for_the_trainer() -> None:
    from torch import nn

    from parallelizer.hugging_face.trainer import ParallelTrainer

    with pytest.raises(ValueError, match=r"call parallelizer\.parallelize"):
        ParallelTrainer(nn.Linear(1, 1))


@pytest.mark.ranks
@pytest.mark.parametrize("loop", a_fifth(LOOPS))
def test_the_script_runs_as_its_docstring_says(loop: str) -> None:
    text = (EXAMPLES / f"{loop}.py").read_text()
    commands = re.findall(r"^ *((?:python|torchrun) .*?)(?:  +#.*)?$", text.split('"""')[1], re.M)[:2]
    assert [command.split()[0] for command in commands] == ["python", "torchrun"]
    printed = []
    for command in commands:
        python, *words = command.split()
        launcher = ["-m", "torch.distributed.run", "--standalone"] if python == "torchrun" else []
        done = subprocess.run(
            [sys.executable, *launcher, *words], capture_output=True, text=True, timeout=120, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert loop != "bare_loop" or "Warning" not in done.stderr, done.stderr  # torch's, which are no news
        printed.append([float(loss) for loss in re.findall(r"^step \d  loss (\S+)$", done.stdout, re.M)])
    assert [len(each) for each in printed] == [task.STEPS] * 2
    assert all(each == pytest.approx(printed[0], abs=2e-5) for each in printed)


def test_what_makes_a_process_group_ends_it() -> None:
    page = (ROOT / "docs/loops.md").read_text()
    texts = [(EXAMPLES / f"{loop}.py").read_text() for loop in LOOPS]
    texts += [page.partition("## A bare loop")[2].partition("\n## ")[0], (ROOT / "README.md").read_text()]
    assert all("destroy_process_group()" in text for text in texts)


def test_the_page_shows_lines_of_the_scripts() -> None:
    page = (ROOT / "docs/loops.md").read_text()
    scripts = {line.strip() for loop in LOOPS for line in (EXAMPLES / f"{loop}.py").read_text().splitlines()}
    checked_first, of_loops = page.partition("## transformers' Trainer")[::2]
    assert "pz.validate(" in checked_first
    blocks = re.findall(r"```python\n(.*?)```", of_loops, re.S)
    shown = [line.strip() for block in blocks for line in block.splitlines()]
    assert [line for line in shown if line not in scripts] == [] and len(shown) > 15
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page):
        assert (ROOT / "docs" / target).exists(), target
    for command in re.findall(r"^\$ (.*)$", page, re.M):
        assert any(command in (EXAMPLES / f"{loop}.py").read_text() for loop in LOOPS)
