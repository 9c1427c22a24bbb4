"""How many rows travel where: counted and exchanged, and read by the host once. In a fake world they are assumed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelizer import torch_private
from parallelizer.language.routing import Routing
from parallelizer.styles.experts.recorded import count

Tensor = torch.Tensor


@dataclass(frozen=True)
class Counts:
    """Rows that this rank of the group sends to each rank and receives from each; `experts` has the numbers of the own experts
    of the received rows, [sum(receive)], in the order in which they arrive.
    """

    send: list[int]
    receive: list[int]
    experts: Tensor


def exchanged_counts(
    ids: Tensor, experts: int, group: dist.ProcessGroup, routing: Routing, path: str, call: int
) -> Counts:
    """The counts for rows whose experts are `ids` [R], of so many experts in all. One all-to-all of a number for each
    expert, and one host read. With a process group that is fake, what travels is what `routing` assumes of this `call` of
    the module at `path`.
    """
    ranks = group.size()
    own = experts // ranks
    counted = rows_of_experts(ids, experts)
    arriving = torch_private.exchanged(counted, [own] * ranks, [own] * ranks, group) if ranks > 1 else counted
    both = torch.stack([counted.view(ranks, own).sum(1), arriving.view(ranks, own).sum(1)])
    if _is_fake(group):
        members = dist.get_process_group_ranks(group)
        sent, received = routing.rows(ids.numel(), experts, members, dist.get_rank(group), path, call)
        send = [sum(sent[r * own : (r + 1) * own]) for r in range(ranks)]
        receive = [sum(row) for row in received]
        arriving = torch.tensor(received, dtype=counted.dtype, device=counted.device).flatten()
    else:
        send, receive = both.tolist()
        count(path, counted, sum(receive))
    mine = torch.arange(own, device=ids.device, dtype=ids.dtype).repeat(ranks)
    return Counts(send, receive, mine.repeat_interleave(arriving, output_size=sum(receive)))


def gathered_counts(
    ids: Tensor, experts: int, group: dist.ProcessGroup, routing: Routing, path: str, call: int
) -> tuple[int, int]:
    """The largest number of rows that a rank has, and how many rows of all ranks are for this rank's experts. One all-gather of a
    number for each expert, and one host read; with a process group that is fake, all ranks have as many rows as this one,
    and `routing` says for whom.
    """
    ranks, index = group.size(), dist.get_rank(group)
    own = experts // ranks
    counted = rows_of_experts(ids, experts) if not _is_fake(group) else ids.new_zeros(experts)
    every = counted.new_empty(ranks * experts)
    dist.all_gather_into_tensor(every, counted, group=group)
    if _is_fake(group):
        members = dist.get_process_group_ranks(group)
        _, received = routing.rows(ids.numel(), experts, members, index, path, call)
        return ids.numel(), sum(map(sum, received))
    table = every.view(ranks, experts)
    mine = table[:, index * own : (index + 1) * own].sum().view(1)
    *rows, total = torch.cat([table.sum(1), mine]).tolist()
    count(path, counted, total)
    return max(rows), total


def rows_of_experts(ids: Tensor, experts: int) -> Tensor:
    """How many of the rows, whose experts are `ids` [R], each expert has: [experts]. Whole numbers, so the order in which they
    are added does not matter. `torch.bincount` reads the largest id on the host, on a GPU.
    """
    ids = ids.long()
    return ids.new_zeros(experts).scatter_add_(0, ids, torch.ones_like(ids))


def _is_fake(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "fake"
