"""The Trainer of transformers on a model that a plan splits: `pip install 'path/to/parallelizer[hf]'`.

    python docs/examples/hf_trainer.py                                          # one process
    torchrun --nproc-per-node 4 docs/examples/hf_trainer.py dp_shard=2 tp=2     # the same losses
    torchrun --nproc-per-node 4 docs/examples/hf_trainer.py cp=2 tp=2           # and again

What it trains, rows, seed and sizes of steps, is in task.py beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import task
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

import parallelizer as pz
from parallelizer.hugging_face.trainer import ParallelTrainer

CONFIG = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


class Rows(Dataset):
    """What Trainer expects of text: labels are the tokens themselves."""

    def __len__(self) -> int:
        return task.STEPS * task.ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = task.row(index)["input_ids"]
        return {"input_ids": tokens, "labels": tokens}


def train(axes: Mapping[str, int], **more: Any) -> list[float]:
    """The losses of a run on a mesh of these axes, in an initialised world. `more` are arguments of Trainer's."""
    resume = more.pop("resume_from_checkpoint", None)
    mesh = pz.build_mesh(pz.Mesh(axes), "cpu")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    pz.parallelize(model, "hf_llama", mesh)
    pz.materialize(model, device="cpu", seed=task.SEED)  # or pz.load_pretrained(model, folder, device="cpu")

    settings: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "max_steps": task.STEPS, "per_device_train_batch_size": task.ROWS // pz.batch_rank(mesh)[1],
        "learning_rate": task.RATE, "lr_scheduler_type": "constant", "max_grad_norm": task.CLIP,
        "train_sampling_strategy": "sequential", "logging_steps": 1, "logging_strategy": "steps", "save_strategy": "no",
    }  # fmt: skip
    trainer = ParallelTrainer(model, TrainingArguments(**{**settings, **more}), train_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """One rank of a run."""
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    for step, loss in enumerate(train(task.axes_asked_for()), 1):
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
