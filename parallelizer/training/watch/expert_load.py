"""The load of experts in a step of a run: the busiest over the mean, and rows that were lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from parallelizer.runtime.fail_together import gathered_over_model, own_rank
from parallelizer.styles.application import Program
from parallelizer.styles.experts.recorded import RowCounts, counted_rows


class ExpertLoad:
    """Watches the experts that a program shares out. All ranks of the run make one, and enter `step` together."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.paths = [a.module for a in program.of_slot("experts")]
        self.ranks = program.mesh.world_size // program.mesh.sizes["pp"]
        self.device = device
        self.last: dict[str, float] = {}

    @contextmanager
    def step(self, model: nn.Module, file: Path | None = None) -> Iterator[None]:
        """Around a step. Its counts go into a file, if one is named: a preset's `routing` takes it."""
        if not self.paths:
            yield
            return
        with counted_rows() as counts:
            yield
        self.last = self._measured(counts)
        if file is not None:
            write_routing(model, counts, file)

    def _measured(self, counts: RowCounts) -> dict[str, float]:
        """Of the module where they are largest: the rows of the busiest expert and of the busiest rank, over the mean. And the
        rows that were sent and not received, of all modules. Collective over all ranks of the run.
        """
        width = max((len(call) for calls in counts.sent.values() for call in calls), default=0)
        most = torch.tensor([width, *(sum(counts.received.get(path, ())) for path in self.paths)])
        most = most.to(self.device)
        received = most[1:].clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        sent = torch.zeros(len(self.paths), int(most[0]) + 1, dtype=torch.int64, device=self.device)
        for at, path in enumerate(self.paths):
            for call in counts.sent.get(path, ()):
                sent[at, : len(call)] += call
        sent[:, -1] = received
        dist.all_reduce(sent)
        sent, received = sent[:, :-1], sent[:, -1]
        rows = sent.sum(1).clamp(min=1)
        return {
            "experts_busiest": (sent.amax(1) * sent.size(1) / rows).max().item(),
            "experts_busiest_rank": (most[1:] * self.ranks / rows).max().item(),
            "experts_dropped": float((sent.sum() - received.sum()).item()),
        }


def write_routing(model: nn.Module, counts: RowCounts, file: Path) -> None:
    """Write the counts of all ranks: by module, for each call, for every rank of the run, the rows to each expert. Collective
    over all ranks of the model.
    """
    every = dict(gathered_over_model(model, (own_rank(), counts.tables())))
    paths = sorted({path for tables in every.values() for path in tables})
    calls = {path: max(len(tables.get(path, ())) for tables in every.values()) for path in paths}
    table = {
        path: [
            [every[rank][path][call] if path in every[rank] else [] for rank in sorted(every)]
            for call in range(calls[path])
        ]
        for path in paths
    }
    if own_rank() == 0:
        file.write_text(json.dumps(table))
