"""The load of experts in a step of a run: rows by expert and by rank, the busiest over the mean, and rows that were lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from parallelizer.runtime.arriving import Arriving
from parallelizer.runtime.fail_together import gathered_over_model, own_rank
from parallelizer.styles.application import Program
from parallelizer.styles.experts.recorded import RowCounts, counted_rows


@dataclass(frozen=True)
class ModuleLoad:
    """The rows that each expert of a module got in a step from all ranks, and those that each rank of the run received for it.
    `holders` of the ranks have experts of the module.
    """

    experts: tuple[int, ...]
    ranks: tuple[int, ...]
    holders: int

    @property
    def busiest(self) -> float:
        """The rows of the busiest expert over the mean."""
        return max(self.experts) * len(self.experts) / max(1, sum(self.experts))

    @property
    def busiest_rank(self) -> float:
        """The rows of the busiest rank over the mean of those that have experts of the module."""
        return max(self.ranks) * self.holders / max(1, sum(self.ranks))


@dataclass(frozen=True)
class StepLoad:
    """The load of a step, by the path of each module of experts."""

    modules: Mapping[str, ModuleLoad] = field(default_factory=dict)

    def most(self) -> ModuleLoad | None:
        """The module where the busiest expert has the most rows over the mean."""
        return max(self.modules.values(), key=lambda module: module.busiest, default=None)

    def scalars(self) -> dict[str, float]:
        """Of the module where they are largest: the rows of the busiest expert and of the busiest rank, over the mean. And the
        rows that were sent and not received, of all modules.
        """
        if not self.modules:
            return {}
        every = self.modules.values()
        return {
            "experts_busiest": max(module.busiest for module in every),
            "experts_busiest_rank": max(module.busiest_rank for module in every),
            "experts_dropped": float(sum(sum(module.experts) - sum(module.ranks) for module in every)),
        }

    def table(self) -> dict[str, dict[str, list[int]]]:
        """What a line of `metrics.jsonl` has under `experts`: rows by expert and by rank, of every module."""
        return {
            path: {"rows": list(one.experts), "rows_of_ranks": list(one.ranks)}
            for path, one in self.modules.items()
        }

    def tracked(self) -> dict[str, float]:
        """What trackers draw: how busy the busiest expert of each module is, and the rows of all modules by the number of the
        expert and by rank.
        """
        every = list(self.modules.values())
        experts = _sums([module.experts for module in every])
        ranks = _sums([module.ranks for module in every])
        return {
            **{f"experts_busiest/{path}": one.busiest for path, one in self.modules.items()},
            **{f"experts_rows/expert_{number}": float(rows) for number, rows in enumerate(experts)},
            **{f"experts_rows/rank_{number}": float(rows) for number, rows in enumerate(ranks)},
        }


def _sums(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(numbers) for numbers in itertools.zip_longest(*lists, fillvalue=0)]


class ExpertLoad:
    """Watches the experts that a program shares out. All ranks of the run make one, and enter `step` together."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.paths = [a.module for a in program.of_slot("experts")]
        self.holders = program.mesh.world_size // program.mesh.sizes["pp"]
        self.device = device
        self.experts: dict[str, int] = {}
        self.summed: Arriving | None = None

    @contextmanager
    def step(self, model: nn.Module, file: Path | None = None) -> Iterator[None]:
        """Around a step. Its counts go into a file, if one is named: a preset's `routing` takes it. Behind the step ranks add
        up their counts, by one all-reduce, and `summed` is on its way to the host: `read` reads it.
        """
        if not self.paths:
            yield
            return
        with counted_rows() as counts:
            yield
        self._sum(model, counts)
        if file is not None:
            write_routing(model, counts, file)

    def _sum(self, model: nn.Module, counts: RowCounts) -> None:
        """Begin to add up over all ranks of the run: nothing is read, so that the host does not wait for the step."""
        if not self.experts:  # once: a rank of a pipeline has the modules of its stages alone
            mine = {path: len(counts.sent[path][0]) for path in self.paths if counts.sent.get(path)}
            known = {path: n for one in gathered_over_model(model, mine) for path, n in one.items()}
            self.experts = {path: known[path] for path in self.paths if path in known}
        ranks, at = dist.get_world_size(), 0
        summed = torch.zeros(
            sum(self.experts.values()) + len(self.experts) * ranks, dtype=torch.int64, device=self.device
        )
        for path, experts in self.experts.items():
            for sent, received in counts.once(path):
                summed[at : at + experts] += sent
                summed[at + experts + dist.get_rank()] += received
            at += experts + ranks
        dist.all_reduce(summed)
        self.summed = Arriving(summed)

    def read(self, summed: Arriving | None) -> StepLoad:
        """The load of a step, of what `summed` was behind it. Waits for the device."""
        if summed is None:
            return StepLoad()
        numbers, ranks = iter(summed.tolist()), dist.get_world_size()
        return StepLoad(
            {
                path: ModuleLoad(
                    tuple(itertools.islice(numbers, experts)),
                    tuple(itertools.islice(numbers, ranks)),
                    self.holders,
                )
                for path, experts in self.experts.items()
            }
        )


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
