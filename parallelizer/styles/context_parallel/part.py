"""Some ranks of a process group, at even distances, that communicate through the whole group.

They have no process group of their own. Torch names a new group after the number of groups that this rank has
made. If ranks have made different numbers of groups (a user's, a pipeline's), making a group hangs. And a
communicator costs memory on a device. A part needs no group: point-to-point calls name their ranks, and an
all-to-all may send nothing to most of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SequencePart:
    """Ranks of `group`, by their places in it; this rank is one of them."""

    group: dist.ProcessGroup
    places: range

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.places)

    @property
    def rank(self) -> int:
        """Which of them this rank is."""
        return self.places.index(dist.get_rank(self.group))

    def global_rank(self, rank: int) -> int:
        """One of them, as the whole world numbers it."""
        return dist.get_global_rank(self.group, self.places[rank])

    def all_to_all(self, sent: torch.Tensor) -> torch.Tensor:
        """Row r of `sent` [ranks, n] goes to rank r; what comes back are all ranks' rows for this one. Collective over
        the whole group, whose other ranks do the same in their parts.
        """
        received = torch.empty_like(sent)
        everyone = dist.get_world_size(self.group)
        if self.ranks == everyone:
            dist.all_to_all_single(received, sent, group=self.group)
        else:
            sizes = [sent.size(1) if place in self.places else 0 for place in range(everyone)]
            dist.all_to_all_single(
                received.view(-1),
                sent.view(-1),
                output_split_sizes=sizes,
                input_split_sizes=sizes,
                group=self.group,
            )
        return received


def whole(group: dist.ProcessGroup) -> SequencePart:
    """All ranks of a group."""
    return SequencePart(group, range(dist.get_world_size(group)))


def row_and_column(group: dist.ProcessGroup, degree: int) -> tuple[SequencePart, SequencePart]:
    """The ranks as a grid with `degree` to a row, which must divide them: rank r stands in row r // degree at place
    r % degree. Its row are ranks that follow each other, and so mostly are on one machine; its column every so-manieth.
    """
    row, column = places(dist.get_world_size(group), dist.get_rank(group), degree)
    return SequencePart(group, row), SequencePart(group, column)


def places(ranks: int, rank: int, degree: int) -> tuple[range, range]:
    """The row and the column of a rank."""
    first = rank - rank % degree
    return range(first, first + degree), range(rank % degree, ranks, degree)
