"""The Trainer of transformers, for a model that a plan made parallel.

    args = TrainingArguments(...)                       # torchrun has started the ranks
    mesh = pz.build_mesh(pz.Mesh({"dp_shard": 2, "tp": 2}), args.device.type)
    model = pz.parallelize(AutoModelForCausalLM.from_config(config), "hf_llama", mesh)
    ParallelTrainer(model, args, train_dataset=...).train()

Trainer takes ranks for as many data ranks, wraps models in DDP, and has accelerate clip gradients. It leaves a model alone
that transformers itself has sharded (`from_pretrained(distributed_config=...)`), and that is what is used here: what such
a model owns, a plan's owns too. All else is in five places that Trainer means to be overridden: who reads which rows, what
a batch is, the loss, clipping, saving.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.hugging_face.extra import not_installed
from parallelizer.hugging_face.saving import save_pretrained
from parallelizer.hugging_face.schedule import load_schedule, save_schedule
from parallelizer.hugging_face.unused_columns import TellingCollator, tell_unused
from parallelizer.hugging_face.weights import read_pretrained
from parallelizer.losses import IGNORED, cross_entropy
from parallelizer.mesh import batch_rank
from parallelizer.runtime.checkpoint import folder as names
from parallelizer.runtime.checkpoint.loading import load_checkpoint
from parallelizer.runtime.checkpoint.saving import save_checkpoint
from parallelizer.runtime.gradients import clip_grad_norm_
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.mean_loss import mean_loss
from parallelizer.runtime.state import ParallelState, state_of
from parallelizer.runtime.step import outcome_for_loss
from parallelizer.styles.context_parallel.buffers import shard_tokens

try:
    from accelerate.data_loader import prepare_data_loader
    from transformers import Trainer as TransformersTrainer
    from transformers.trainer import OPTIMIZER_NAME
except ModuleNotFoundError as missing:
    if missing.name not in ("accelerate", "transformers"):
        raise
    raise ImportError(not_installed(missing.name)) from None

FOLDER = "parallelizer"
"""Where in a checkpoint of Trainer's the model and the optimizer lie, in this package's own format."""


Trainer: Any = TransformersTrainer  # whose annotations are of what it wraps itself


class ParallelTrainer(Trainer):
    """Trainer for a model that `parallelize` returned. Arguments are Trainer's; `model` comes first.

    `per_device_train_batch_size` is the rows of one data rank: ranks of tp and cp read the same ones. The loss is the cross
    entropy over all labels of the global batch, accumulated parts included, and labels are shifted here, before a sequence
    is split, where Trainer would have the model shift them. Evaluation gives the loss alone; rows that do not fill the last
    batch of all data ranks are filled up with the first ones, as accelerate does. Checkpoints load under any other mesh.

    Raises ValueError for a model without a plan, and for what does not go together with one: mixed precision by autocast
    (a plan's fsdp has `param_dtype`), label smoothing, a loss function of one's own, metrics over logits. Tested with
    transformers 5.23, whose Trainer knows of models that are sharded already; older ones are refused.
    """

    def __init__(self, model: nn.Module, args: Any = None, **kwargs: Any) -> None:
        state = state_of(model)
        if state is None:
            raise ValueError(
                "this model was not made parallel: call parallelizer.parallelize(model, plan, mesh) first"
            )
        self.parallel: ParallelState = state
        super().__init__(model, args, **kwargs)
        if not hasattr(self, "is_distributed_loading_by_transformers"):
            raise ValueError("this Trainer would wrap a parallel model once more: transformers 5.23 does not")
        for wrong, instead in (
            (
                self.args.fp16 or self.args.bf16,
                "fp16/bf16: the plan says {style: fsdp, param_dtype: bfloat16}",
            ),
            (self.args.label_smoothing_factor, "label_smoothing_factor"),
            (self.compute_loss_func is not None, "compute_loss_func: override compute_loss"),
            (self.compute_metrics is not None, "compute_metrics: logits lie sharded, and are not gathered"),
        ):
            if wrong:
                raise ValueError(f"a parallel model does not go together with {instead}")
        self.is_distributed_loading_by_transformers = True
        self.model_accepts_loss_kwargs = False  # nothing counts labels but what is here
        self.loss_is_scaled_for_ga = True
        self.args.prediction_loss_only = True

    # Whose rows

    def create_accelerator_and_postprocess(self) -> None:
        """An accelerator that deals rows out to the data ranks of the mesh."""
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        index, ranks = batch_rank(self.parallel.mesh)

        def prepare(loader: Any, device_placement: bool | None = None, **_: Any) -> Any:
            dealt = prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=ranks,
                process_index=index,
                put_on_device=accelerator.device_placement if device_placement is None else device_placement,
                split_batches=accelerator.split_batches,
                rng_types=accelerator.rng_types.copy(),
                dispatch_batches=False,  # which reads rows on rank 0, and deals them out to all ranks
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
            accelerator._dataloaders.append(dealt)
            return dealt

        def of_every_row(losses: Tensor, use_gather_object: bool = False) -> Tensor:
            # One value for each row of this data rank, and the same on all ranks: gathering would count tp's and cp's.
            rest = accelerator.gradient_state.remainder
            last = accelerator.gradient_state.end_of_dataloader and rest > 0
            return losses.repeat(ranks)[: rest if last else None]

        accelerator.prepare_data_loader = prepare
        accelerator.gather_for_metrics = self.gather_function = of_every_row

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Trainer's, of a dataset with named columns, with a warning."""
        if self.args.remove_unused_columns and self.args.process_index == 0:
            self._set_signature_columns_if_needed()
            tell_unused(dataset.column_names, *self._taken(description))
        return super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Trainer's, for any other dataset, with a warning."""
        collate = super()._get_collator_with_removed_columns(data_collator, description)
        if not self.args.remove_unused_columns or self.args.process_index > 0:
            return collate
        return TellingCollator(collate, *self._taken(description))

    def _taken(self, description: str | None) -> tuple[list[str], str, str]:
        """The columns that the model takes, its class, and what the data is for, as the warning says it."""
        return self._signature_columns, type(self.model).__name__, (description or "given").lower()

    def get_tp_size(self) -> int:
        """How many ranks read the same rows for other reasons than cp."""
        return dist.get_world_size() // batch_rank(self.parallel.mesh)[1] // self.get_cp_size()

    def get_cp_size(self) -> int:
        """The size of cp."""
        return self.parallel.program.mesh.sizes["cp"]

    # A batch and its loss

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of one optimizer step, and how many labels they have over all ranks."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counted = sum((self._shifted(s)["labels"] != IGNORED).sum() for s in samples if "labels" in s)
        count = torch.as_tensor(counted, dtype=torch.float32, device=device)
        for group in self.parallel.data_groups:
            dist.all_reduce(count, group=group)
        return samples, count / self.get_cp_size()  # whose ranks have counted the same rows

    def _shifted(self, inputs: dict[str, Any]) -> dict[str, Any]:
        labels = inputs.get("labels")
        if labels is None or not self._loss_shifts_labels:
            return inputs
        return {**inputs, "labels": F.pad(labels[:, 1:], (0, 1), value=IGNORED)}

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """This rank's tokens, where the model computes."""
        whole = self._shifted(super()._prepare_inputs(inputs))
        return shard_tokens(whole, self.parallel.program.plan, self.parallel.mesh)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The mean over the labels of all ranks, of `num_items_in_batch` ones where that is given."""
        total, weight = loss_sums(cross_entropy, outcome_for_loss(model, inputs), inputs)
        if num_items_in_batch is not None:
            ranks = 1
            for group in self.parallel.data_groups:
                ranks *= group.size()
            weight = num_items_in_batch / ranks  # this rank's share of what all weigh
        loss = mean_loss(total, weight, model)
        return (loss, {"loss": loss}) if return_outputs else loss

    # Gradients: summed by the model itself, in every backward

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return clip_grad_norm_(model.parameters(), float("inf")) if grad_norm is None else grad_norm

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """What FSDP leaves whole has been given its sum already."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It lies where its mesh is."""

    # Saving: collective, as everything about a sharded model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as `from_pretrained` loads it. The folder's other files stay."""
        folder = Path(output_dir or self.args.output_dir)
        beside = folder.with_name(folder.name + ".model")
        save_pretrained(self.model, beside)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            for file in beside.iterdir():
                os.replace(file, folder / file.name)
            beside.rmdir()
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        dist.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir) / FOLDER
        save_checkpoint(folder, self.state.global_step, self.model, self._optimizer())
        if self.args.should_save:
            save_schedule(folder, self.lr_scheduler, self.model, self._optimizer())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """With the optimizer, once there is one; without one, of a checkpoint of the model alone."""
        if not _states_in(resume_from_checkpoint):
            read_pretrained(self.model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        for saved in _states_in(checkpoint) if checkpoint is not None else ():
            load_checkpoint(saved, self.model, self._optimizer())
            load_schedule(saved.parent, self.lr_scheduler, self.model, self._optimizer())

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        states = () if self.args.save_only_model else _states_in(best)
        for saved in states:
            load_checkpoint(saved, self.model)
        if not states:
            read_pretrained(self.model, best)

    def _optimizer(self) -> torch.optim.Optimizer:
        """Torch's own, out of accelerate's wrapper."""
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))


def _states_in(checkpoint: str) -> list[Path]:
    """The model with its optimizer in a checkpoint of Trainer's; none in one with `save_only_model`.

    Raises ValueError for a checkpoint of a Trainer without a plan, whose optimizer cannot be read.
    """
    folder = Path(checkpoint) / FOLDER
    if folder.is_dir():
        return [folder / names.name(step) for step in names.steps_in(folder)]
    if (Path(checkpoint) / OPTIMIZER_NAME).exists():
        raise ValueError(
            f"{checkpoint} has the optimizer of a Trainer without a plan, {OPTIMIZER_NAME}, which ParallelTrainer cannot read: "
            "remove that file to go on with a new optimizer"
        )
    return []
