"""What each rank tells torch.distributed.checkpoint: its pieces, and where what it wants stands."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallelizer.runtime.checkpoint.contents import Held
from parallelizer.runtime.checkpoint.planning import Piece, PlannedRead, Writing
from parallelizer.runtime.held_indices import IndexRun, Share


def pieces(*starts: int, size: int = 2, whole: int = 6) -> Writing:
    """Of one vector."""
    return Writing(
        [Piece("model.a.b", (whole,), (start,), torch.arange(start, start + size) * 1.0) for start in starts]
    )


def index_of(*ranks: Writing) -> object:
    return ranks[0].create_global_plan([r.create_local_plan() for r in ranks])[1]


def test_the_pieces_of_all_ranks_make_the_tensor() -> None:
    metadata = index_of(pieces(0, 4), pieces(2))
    stored = metadata.state_dict_metadata["model.a.b"]  # type: ignore[attr-defined]
    assert isinstance(stored, TensorStorageMetadata)
    assert stored.size == torch.Size([6]) and sorted(c.offsets[0] for c in stored.chunks) == [0, 2, 4]
    assert metadata.planner_data == {"model.a.b": ("model", "a.b")}  # type: ignore[attr-defined]


def test_names_become_the_keys_of_torchs_tools() -> None:
    one = torch.zeros(1)
    names = ("model.layers.0.w", "optimizer.layers.0.w.exp_avg", "random.3.cpu")
    plan = Writing([Piece(n, (1,), (0,), one) for n in names]).create_local_plan()
    assert plan.planner_data == {
        "model.layers.0.w": ("model", "layers.0.w"),
        "optimizer.layers.0.w.exp_avg": ("optimizer", "layers.0.w", "exp_avg"),
        "random.3.cpu": ("random", "3", "cpu"),
    }


@pytest.mark.parametrize("ranks", [(pieces(0), pieces(2)), (pieces(0, 2, 4), pieces(2))])
def test_what_nobody_writes_or_two_do_is_refused(ranks: tuple[Writing, ...]) -> None:
    with pytest.raises(ValueError, match=r"the ranks would write (4|8) of the 6 numbers of model.a.b"):
        index_of(*ranks)


def held(name: str, runs: tuple[IndexRun, ...], local: torch.Tensor) -> Held:
    return Held(name, local, Share((runs,)), (6,), True)


def test_a_share_of_several_runs_reads_from_pieces_that_are_cut_elsewhere() -> None:
    metadata = index_of(pieces(0, 2, 4))
    local = torch.full((4,), -1.0)
    reading = PlannedRead({"model.a.b": held("model.a.b", (IndexRun(0, 3, 3), IndexRun(3, 0, 1)), local)})
    reading.set_up_planner({}, metadata)  # type: ignore[arg-type]
    stored = {2 * i: torch.arange(2 * i, 2 * i + 2) * 1.0 for i in range(3)}
    for item in reading.create_local_plan().items:
        [start], [length], [offset] = item.storage_offsets, item.lengths, item.storage_index.offset
        reading.resolve_tensor(item).copy_(stored[offset][start : start + length])
    assert local.tolist() == [3, 4, 5, 0]


def test_a_checkpoint_that_does_not_fill_a_share_is_refused() -> None:
    metadata = index_of(pieces(0, 2, 4))
    del metadata.state_dict_metadata["model.a.b"].chunks[1]  # type: ignore[attr-defined]
    reading = PlannedRead({"model.a.b": held("model.a.b", (IndexRun(0, 1, 3),), torch.zeros(3))})
    reading.set_up_planner({}, metadata)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the checkpoint has 1 of 3 numbers of model.a.b"):
        reading.create_local_plan()
