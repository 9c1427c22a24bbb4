"""What ParallelTrainer loads: the best of its checkpoints, with and without an optimizer in it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

ROWS = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]


def trainer_of(axes: Mapping[str, int], folder: Path, plan: str = "hf_llama", **more: Any) -> Any:
    """A ParallelTrainer of a small Llama, with the same values on every mesh."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    import parallelizer as pz
    from parallelizer.hugging_face.trainer import ParallelTrainer

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) / 4)
    mesh = pz.build_mesh(pz.Mesh(axes), "cpu")
    pz.parallelize(model, plan, mesh)
    settings: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 4,
        "logging_steps": 1, "per_device_train_batch_size": 4 // pz.batch_rank(mesh)[1], "learning_rate": 0.1,
        "save_steps": 2, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    args = TrainingArguments(**{**settings, **more})
    return ParallelTrainer(model, args, train_dataset=ROWS, eval_dataset=ROWS)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.ranks
@pytest.mark.parametrize("alone", [False, True])
def test_the_best_model_is_loaded_at_the_end(alone: bool, tmp_path: Path) -> None:
    def worker() -> tuple[float, float, str]:
        trainer = trainer_of(
            {"dp_shard": 2}, tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
            metric_for_best_model="eval_loss", greater_is_better=True, save_only_model=alone,
        )  # fmt: skip
        trainer.train()
        return trainer.state.best_metric, trainer.evaluate()["eval_loss"], trainer.state.best_model_checkpoint

    for best, found, folder in run_ranks(worker, 2, timeout=120):
        assert Path(folder).name == "checkpoint-2"  # and not the last
        assert found == pytest.approx(best, rel=1e-6)


@pytest.mark.ranks
def test_a_checkpoint_of_the_model_alone_is_gone_on_from_with_a_new_optimizer(tmp_path: Path) -> None:
    def worker(**more: Any) -> list[float]:
        trainer = trainer_of({"tp": 2}, tmp_path, save_only_model=True, lr_scheduler_type="constant", **more)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if more else None)
        return losses(trainer)

    whole = run_ranks(worker, 2, timeout=120)[0]
    went_on = run_ranks(lambda: worker(save_strategy="no"), 2, timeout=120)[0]
    assert went_on[2] == pytest.approx(whole[2], rel=1e-6) and len(went_on) == 4


@pytest.mark.ranks
def test_an_optimizer_of_a_trainer_without_a_plan_is_refused(tmp_path: Path) -> None:
    def worker() -> None:
        trainer = trainer_of({}, tmp_path)
        folder = tmp_path / "plain"
        trainer.save_model(str(folder))
        torch.save({}, folder / "optimizer.pt")
        with pytest.raises(ValueError, match=r"optimizer\.pt, which ParallelTrainer cannot read"):
            trainer.train(resume_from_checkpoint=str(folder))

    run_ranks(worker, 1, timeout=120)


@pytest.mark.ranks
@pytest.mark.parametrize("named", [False, True])
def test_columns_that_the_model_does_not_take_are_told_once(named: bool, tmp_path: Path) -> None:
    def worker() -> list[str]:
        trainer = trainer_of({}, tmp_path, save_strategy="no")
        rows: Any = [{**row, "attention_maskk": torch.ones(8)} for row in ROWS]
        if named:
            from datasets import Dataset

            rows = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in rows])
        trainer.train_dataset = rows
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        return [str(one.message) for one in caught if "are dropped" in str(one.message)]

    [told] = run_ranks(worker, 1, timeout=120)
    assert told == [
        "the columns attention_maskk of the training data are dropped, because the forward of LlamaForCausalLM does not take "
        "them; did you mean attention_mask with attention_maskk?"
    ]
