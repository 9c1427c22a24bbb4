"""Norms whose statistics each rank would keep for itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from tests.findings import findings, mesh_of
from tests.styles.models import WIDTH, around

PLAN = 'rules: {"": fsdp}'


class Normed(nn.Sequential):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), norm())


def test_a_batch_norm_would_differ_from_rank_to_rank() -> None:
    [found] = findings(PLAN, around(Normed, lambda: nn.BatchNorm1d(WIDTH)), mesh_of(dp_shard=2))
    assert found.code == "rank-local-buffers"
    assert (
        found.message
        == "the running statistics of inner.1 (BatchNorm1d) would differ between the ranks of dp_shard=2"
    )
    assert found.help is not None and "SyncBatchNorm" in found.help
    assert [r.label for r in found.related] == ["dp_shard=2 is set here"]


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.SyncBatchNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
        lambda: nn.InstanceNorm1d(WIDTH),
        lambda: nn.BatchNorm1d(WIDTH).eval(),
    ],
)
def test_norms_without_statistics_of_their_own_rank_are_fine(norm: Callable[[], nn.Module]) -> None:
    assert findings(PLAN, around(Normed, norm), mesh_of(dp_shard=2)) == ()


def test_ranks_that_see_the_same_tokens_agree() -> None:
    build = around(Normed, lambda: nn.BatchNorm1d(WIDTH))
    assert findings('rules: {after: colwise, "": fsdp}', build, mesh_of(tp=2)) == ()
