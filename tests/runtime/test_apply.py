"""A program applied to a live model: what changes, what stays, and what is refused before anything
changes.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.child.children import in_children
from parallelizer.language.plan import Mesh
from parallelizer.runtime.state import state_of
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.styles.sharded_logits import plain
from parallelizer.styles.tied_parameters import tied_names
from tests.findings import on_meta
from tests.parity import SEED, plan, token_batch, token_loss
from tests.ranks import run_ranks
from tests.runtime.test_step import llama
from tests.simulate.setups import stack
from tests.snapshot import snapshot
from tests.styles.models import Mlp, around

LLAMA = plan("extends: llama")


@pytest.mark.ranks
def test_what_is_refused_leaves_the_model_untouched() -> None:
    def worker() -> list[str]:
        done = []
        mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
        model = on_meta(llama())
        before = snapshot(model)

        program = pz.compile(LLAMA, model, Mesh({"tp": 2}))
        with pytest.raises(ValueError, match="compiled for tp=2, but the DeviceMesh is dp_shard=2"):
            pz.apply(program, model, mesh)
        done.append("another mesh")

        with pytest.raises(pz.PlanError, match="unmatched-glob"):
            pz.parallelize(model, plan("extends: llama\nrules: {layer.*: fsdp}"), mesh)
        with pytest.raises(pz.PlanError, match="plan-not-found"):
            pz.parallelize(model, "lama", mesh)
        foreign = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        with pytest.raises(ValueError, match=r"perhaps axes=\{'data': 'dp_shard'\}"):
            pz.parallelize(model, "llama", foreign)
        with pytest.raises(ValueError, match="no axis 'date'"):
            pz.parallelize(model, "llama", foreign, axes={"date": "dp_shard"})
        done.append("a wrong plan, name or axis")

        assert snapshot(model) == before and state_of(model) is None
        return done

    assert run_ranks(worker, 2) == [["another mesh", "a wrong plan, name or axis"]] * 2


@pytest.mark.ranks
def test_what_applying_does() -> None:
    torch.manual_seed(0)
    live = llama(tie_embeddings=True)().double()
    expected = {n: p.detach().clone() for n, p in live.named_parameters()}
    ids = token_batch()["input_ids"]
    with torch.no_grad():
        logits = live(ids)

    def worker() -> list[str]:
        done = []
        # A model that has values keeps them: those of rank 0, where others have been made.
        for sizes in ({"tp": 2}, {"dp_shard": 2}):
            model = copy.deepcopy(live)
            if dist.get_rank() == 1 and "tp" in sizes:
                with torch.no_grad():
                    for layer in model.layers:
                        layer.attention.wq.weight.add_(1)
            names = [n for n, _ in model.named_parameters()]
            signature = inspect.signature(model.forward)
            mesh = pz.build_mesh(Mesh(sizes), "cpu")
            assert pz.parallelize(model, "llama", mesh, check_values="tp" not in sizes) is model
            assert [n for n, _ in model.named_parameters()] == names
            assert inspect.signature(model.forward) == signature
            assert tied_names(model) == [("tok_embeddings.weight", "output.weight")]
            for name, param in model.named_parameters():
                assert isinstance(param, DTensor)
                assert torch.equal(param.full_tensor(), expected[name]), name
            with torch.no_grad():
                torch.testing.assert_close(plain(model(ids)), logits, rtol=0, atol=1e-6)
        done.append("values stay")

        # Only tp: no FSDP, no data group, and no axis for it.
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = pz.parallelize(on_meta(llama()), LLAMA, mesh)
        state = state_of(model)
        assert state is not None and state.mesh is mesh and state.data_groups == ()
        assert not any(isinstance(m, FSDPModule) for m in model.modules())
        done.append("nothing on axes that are not there")

        # A deep copy of what needs no FSDP is a model of its own.
        pz.materialize(model, device="cpu", seed=SEED)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            before = model(ids)
            for param in twin.parameters():
                param.zero_()
            assert twin(ids).abs().max() == 0
            assert torch.equal(model(ids), before)
        done.append("a deep copy is on its own")

        # FSDP on a mesh that has no axis to shard over, for the dtype.
        model = pz.parallelize(
            on_meta(llama()), plan('rules: {"": {style: fsdp, param_dtype: bfloat16}, output: colwise}'), mesh
        )
        pz.materialize(model, device="cpu", seed=SEED)
        assert model(ids).dtype == torch.bfloat16
        done.append("precision alone")
        return done

    results = run_ranks(worker, 2)
    assert (
        results
        == [
            [
                "values stay",
                "nothing on axes that are not there",
                "a deep copy is on its own",
                "precision alone",
            ]
        ]
        * 2
    )


# Checkpointing, in one process: a mesh of one rank


class Counts(nn.Module):
    """Counts its forwards, and the products in them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        self.calls += 1
        y = torch.tanh(self.linear(x))
        return y * 2 if twice else y


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["full", "selective", "alternate"])
def test_a_checkpoint_recomputes_in_backward_and_nowhere_else(mode: str) -> None:
    def worker() -> tuple[list[int], list[int]]:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        rules = plan(f'rules: {{"0": {{style: checkpoint, mode: {mode}}}}}')
        model = nn.Sequential(Counts(), nn.Linear(4, 1))
        reference = copy.deepcopy(model)
        signature = inspect.signature(model[0].forward)
        pz.parallelize(model, rules, mesh)
        assert inspect.signature(model[0].forward) == signature
        products = Products()
        x = torch.randn(2, 4)
        with products:
            out = model[1](model[0](x, twice=True)).sum()
        with products.backward():
            out.backward()
        with torch.no_grad():
            model(x)
        reference[1](reference[0](x, twice=True)).sum().backward()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)
        return [model[0].calls], [products.forward_count, products.backward_count]

    ((calls, (forward, backward)),) = run_ranks(worker, 1)
    assert calls == [3]  # forward, recomputation, and the one without gradients
    assert forward == 2
    # Each linear has two products in backward, but for the input that needs no gradient; the recomputed one
    # is kept if selective.
    assert backward == 3 + (1 if mode == "full" else 0)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_count = self.backward_count = 0
        self.in_backward = False

    def backward(self) -> Products:
        self.in_backward = True
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            if self.in_backward:
                self.backward_count += 1
            else:
                self.forward_count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks
def test_programs_can_be_applied_to_several_models() -> None:
    def worker() -> list[float]:
        mesh = pz.build_mesh(Mesh({"tp": 2}), "cpu")
        program = pz.compile(
            plan("rules: {inner.up: colwise, inner.down: rowwise}"), on_meta(around(Mlp)), mesh
        )
        losses = []
        for _ in range(2):
            model = pz.materialize(pz.apply(program, on_meta(around(Mlp)), mesh), device="cpu", seed=SEED)
            losses.append(
                pz.train_step(
                    model, token_batch(), token_loss, torch.optim.SGD(model.parameters(), lr=0.1)
                ).loss.item()
            )
        return losses

    for first, second in run_ranks(worker, 2):
        assert first == second


VIEW = "FSDP2-wrapped module Stack returned a view tensor from its forward"


def _warned(preset: str) -> list[str]:
    setup = stack(f"parallel={preset}")
    model = setup.build_model()
    program = setup.compile(model)
    enter_fake_world(program.mesh.world_size, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pz.apply(program, model, pz.build_mesh(program.mesh, "cpu"))
        told.clear()
        warnings.warn(VIEW, stacklevel=1)
        warnings.warn("another", stacklevel=1)
    return [str(one.message) for one in told]


def test_fsdp_s_word_on_views_is_silenced_and_nothing_else() -> None:
    assert in_children([(_warned, "fsdp2")]) == [["another"]]
    assert in_children([(_warned, "single")]) == [[VIEW, "another"]]
