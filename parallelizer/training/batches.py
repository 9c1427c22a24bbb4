"""The batches of one rank: its rows of each global batch, and its tokens of each row."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.language.plan import Plan
from parallelizer.language.workload import Workload
from parallelizer.mesh import batch_rank
from parallelizer.styles.context_parallel.buffers import shard_tokens
from parallelizer.training.data.source import Source
from parallelizer.training.settings import Settings


class Batches:
    """This rank's part of each global batch, which depends on the seed and on the number of samples before
    it; `Job.batches` makes it. Tensors are on the rank's device, [rows, tokens of this rank, ...].
    """

    def __init__(
        self,
        data: Source,
        plan: Plan,
        workload: Workload,
        settings: Settings,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.data, self.plan, self.workload, self.settings = data, plan, workload, settings
        self.mesh, self.device = mesh, device
        self.index, self.ranks = batch_rank(mesh)

    def training(self, position: int) -> list[dict[str, torch.Tensor]]:
        """The global batch after `position` samples: its `train.accumulate` parts, each with this rank's
        rows and tokens, under the names of the model's batch.
        """
        work, parts = self.workload, []
        rows = work.batch_size // work.accumulate // self.ranks
        for part in range(work.accumulate):
            first = (part * self.ranks + self.index) * rows
            batch = self.data.training_batch(
                position,
                batch_size=work.batch_size,
                seq_len=work.seq_len,
                seed=self.settings.seed,
                rows=slice(first, first + rows),
            )
            parts.append(self._local(batch))
        return parts

    def validation(self) -> list[dict[str, torch.Tensor]]:
        """The `train.eval_batches` held-out batches, always the same ones."""
        work = self.workload
        rows = work.batch_size // self.ranks
        batches = self.data.heldout_batches(
            batch_size=work.batch_size,
            seq_len=work.seq_len,
            count=self.settings.eval_batches,
            rows=slice(self.index * rows, (self.index + 1) * rows),
        )
        return [self._local(batch) for batch in batches]

    def _local(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return shard_tokens(self.workload.renamed(batch), self.plan, self.mesh, device=self.device)


def local_device(kind: str) -> torch.device:
    """Where this rank's tensors lie."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
