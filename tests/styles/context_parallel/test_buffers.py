"""Batches split by rank, and a model's positional buffers seen as this rank's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.styles.context_parallel.buffers import LocalBuffers
from tests.findings import on_meta
from tests.parity import plan, token_batch
from tests.ranks import run_ranks
from tests.runtime.test_step import llama

BUFFERS = """
rules: {"": fsdp}
buffers:
  batch: {input_ids: 1, mask: 2, positions: positions}
  model: {"table*": 0, other.across: 1}
"""


class Model(nn.Module):
    """Returns the buffers that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(20))
        self.register_buffer("table_2", torch.arange(40).reshape(20, 2), persistent=False)
        self.register_buffer("scale", torch.arange(20))
        self.other = nn.Module()
        self.other.register_buffer("across", torch.arange(40).reshape(2, 20))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        return [self.table, self.table_2, self.other.across, self.scale]


ORDER = {0: [0, 1, 6, 7], 1: [2, 3, 4, 5]}
"""The positions that each of two ranks holds of eight."""


@pytest.mark.ranks
def test_batches_and_buffers_on_two_ranks() -> None:
    def worker() -> list[str]:
        done = []
        mesh, rules = pz.build_mesh(Mesh({"cp": 2}), "cpu"), plan(BUFFERS)
        order = ORDER[mesh.get_local_rank("cp")]
        ids, mask = torch.arange(16).reshape(2, 8), torch.arange(16).reshape(1, 2, 8)
        batch = {"input_ids": ids, "mask": mask, "weight": torch.ones(2)}
        local = pz.shard_batch(batch, rules, mesh)
        assert torch.equal(local["input_ids"], ids[:, order])
        assert torch.equal(local["mask"], mask[..., order])
        assert local["weight"] is batch["weight"]
        assert local["positions"].tolist() == [order, order]
        assert list(batch) == ["input_ids", "mask", "weight"]
        with pytest.raises(ValueError, match="cannot be cut into 4 equal chunks"):
            pz.shard_batch({"input_ids": ids[:, :6]}, rules, mesh)
        assert torch.equal(pz.unshard(local["input_ids"], mesh), ids)
        assert torch.equal(pz.unshard(local["mask"], mesh, dim=2), mask)
        done.append("batches")

        model = Model()
        whole = {n: b.clone() for n, b in model.named_buffers()}
        LocalBuffers(model, rules, mesh)
        for kwargs in ({"input_ids": local["input_ids"]}, {"input_ids": None, "mask": local["mask"]}):
            table, table_2, across, scale = model(**kwargs)
            assert table.tolist() == order
            assert table_2.tolist() == whole["table_2"][order].tolist()
            assert across.tolist() == whole["other.across"][:, order].tolist()
            assert torch.equal(scale, whole["scale"])
        once, again = model(local["input_ids"])[0], model(local["input_ids"])[0]
        assert once is again  # as the microbatches of a step have it
        once[0] = 77
        assert model(local["input_ids"])[0].tolist() == order  # what a forward wrote into it ends with it
        with torch.inference_mode():
            model(local["input_ids"])
        assert not model(local["input_ids"])[0].is_inference()
        assert (
            model(local["input_ids"][:, :2])[0].tolist() == [[0, 3], [1, 2]][mesh.get_local_rank("cp")]
        )  # another length
        done.append("buffers")

        assert torch.equal(model.state_dict()["table"], whole["table"])  # and not this rank's rows
        assert torch.equal(model.table, whole["table"])
        with pytest.raises(
            RuntimeError, match="none of the batch entries input_ids, mask, positions reached"
        ):
            model(None)
        with pytest.raises(ValueError, match="a sequence of 24 tokens: the buffer table has 20 positions"):
            model(torch.zeros(1, 12))
        assert torch.equal(model.state_dict()["table"], whole["table"])
        done.append("whole again")

        # A parallel model, and one without buffers to split.
        model = pz.parallelize(on_meta(llama()), "llama", mesh)
        pz.materialize(model, device="cpu", seed=0)
        cos = model.rope.cos
        with torch.no_grad():
            model(pz.shard_batch(token_batch(), pz.load_plan("llama"), mesh)["input_ids"])
        assert torch.equal(
            model.rope.cos,
            cos[[*range(4), *range(12, 16)] if mesh.get_local_rank("cp") == 0 else range(4, 12)],
        )
        pz.restore_buffers(model)
        assert model.rope.cos is cos
        pz.restore_buffers(model)
        assert model.rope.cos is cos
        done.append("a parallel model")
        return done

    assert run_ranks(worker, 2) == [["batches", "buffers", "whole again", "a parallel model"]] * 2


class Attends(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.embed, self.is_causal = nn.Embedding(8, 4), is_causal

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=self.is_causal)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("entry", "is_causal", "refused"),
    [
        ("{dim: 1, pad: 0}", True, None),
        ("{dim: 1, pad: 0}", False, "its padding would be seen"),
        ("{dim: 1, documents: true}", True, "order of its sequence is not known"),
        ("1", False, None),
    ],
)
def test_a_copy_of_what_was_dealt_out_is_refused_where_it_would_matter(
    entry: str, is_causal: bool, refused: str | None
) -> None:
    written = f'version: 1\nrules: {{"": [context-parallel, fsdp]}}\nbuffers: {{batch: {{ids: {entry}}}}}'

    def worker() -> None:
        mesh, rules = pz.build_mesh(Mesh({"cp": 2}), "cpu"), plan(written)
        model = pz.parallelize(Attends(is_causal), rules, mesh)
        local = pz.shard_batch({"ids": torch.arange(8).unsqueeze(0)}, rules, mesh)["ids"]
        model(local)
        if refused is None:
            model(local.clone())
            return
        with pytest.raises((ValueError, RuntimeError), match=refused):
            model(local.clone())

    run_ranks(worker, 2)


@pytest.mark.ranks
def test_without_cp_everything_stays() -> None:
    def worker() -> None:
        mesh, rules = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), plan(BUFFERS)
        ids = torch.arange(14).reshape(2, 7)
        local = pz.shard_batch({"input_ids": ids}, rules, mesh)
        assert local["input_ids"] is ids
        assert local["positions"].tolist() == [[*range(7)]] * 2
        assert pz.unshard(ids, mesh) is ids
        model = Model()
        LocalBuffers(model, rules, mesh)
        assert model(ids)[0] is model.table
        assert not model._forward_pre_hooks
        pz.restore_buffers(model)  # no parallel model: nothing happens

        rows = plan('rules: {"": fsdp}\nbuffers: {batch: {tokens: 0, positions: positions}}')
        packed: dict[str, Any] = pz.shard_batch({"tokens": torch.zeros(5, 3)}, rows, mesh)
        assert packed["positions"].tolist() == [*range(5)]
        with pytest.raises(ValueError, match="positions cannot be made: none of the entries tokens"):
            pz.shard_batch({"other": ids}, rows, mesh)
        assert dist.get_world_size() == 1

    run_ranks(worker, 1)
