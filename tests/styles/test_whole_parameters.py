"""Parameters that FSDP leaves whole: gradients summed over data ranks, computed with in the unit's dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.models.llama import Llama
from parallelizer.styles.fsdp import compute_in, sum_gradients_of
from tests.findings import on_meta
from tests.parity import plan, style_defaults, token_batch, token_loss
from tests.ranks import run_ranks
from tests.runtime.test_step import llama


class Twice(nn.Module):
    """Uses its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + x @ self.weight).sum()


@pytest.mark.ranks
def test_gradients_are_summed_in_every_backward() -> None:
    def worker() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        x = torch.full((1, 3), float(rank + 1))

        model = Twice()
        sum_gradients_of(model, ["weight"], [group])
        model(x).backward()
        torch.testing.assert_close(model.weight.grad, torch.full((3, 2), 6.0))  # 2 * (1 + 2)
        model(x).backward()  # accumulates; hooks are not put on twice
        torch.testing.assert_close(model.weight.grad, torch.full((3, 2), 12.0))

        # Materialising makes new parameters.
        model.weight = nn.Parameter(torch.ones(3, 2))
        model(x).backward()
        torch.testing.assert_close(model.weight.grad, torch.full((3, 2), 6.0))

        # A gradient that is not contiguous, and one in bfloat16, of which gloo would make another on every
        # rank.
        model.weight = nn.Parameter(torch.ones(2, 3).T)
        model(x).backward()
        torch.testing.assert_close(model.weight.grad, torch.full((3, 2), 6.0))
        model.bfloat16()
        (model(torch.full((1, 3), 256.0 if rank == 0 else 1.5, dtype=torch.bfloat16))).backward()
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, torch.full((3, 2), 516.0, dtype=torch.bfloat16))

        # Frozen now: no hook.
        model.weight = nn.Parameter(torch.ones(3, 2), requires_grad=False)
        model(x)

        # DTensors keep their placements: partial ones are summed over the other axis later.
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
        for placement in (Shard(0), Replicate(), Partial()):
            model = Twice()
            lies = [Replicate() if isinstance(placement, Partial) else placement]
            model.weight = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh["tp"], lies))
            sum_gradients_of(model, ["weight"], [mesh.get_group("dp_shard")])
            gradient = DTensor.from_local(
                torch.full((3, 2), rank + 1.0), mesh["tp"], [placement], run_check=False
            )
            model.register_forward_hook(lambda module, *_: module.weight)
            model.forward = lambda: None  # type: ignore[method-assign]
            (model() * 1).backward(gradient)
            assert isinstance(model.weight.grad, DTensor)
            assert model.weight.grad.placements == (placement,)
            torch.testing.assert_close(model.weight.grad.to_local(), torch.full((3, 2), 3.0))

    run_ranks(worker, 2)


@pytest.mark.ranks
def test_sixteen_bit_gradients_are_added_up_in_float32() -> None:
    def worker() -> Tensor:
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        model = Twice().bfloat16()
        sum_gradients_of(model, ["weight"], [group])
        model(torch.full((1, 3), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)).backward()
        assert model.weight.grad is not None
        return model.weight.grad

    # 512 + 2 is 512 in bfloat16, but 512 + 2 + 2 + 2 is 520. On gloo every rank would make another sum of it.
    assert all((gradient == 520).all() for gradient in run_ranks(worker, 4))


def wide_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss in float32, of logits in whatever the model computes in: a sum in bfloat16 would be off by its last digit."""
    return token_loss(output.float(), batch)


@pytest.mark.ranks
def test_mixed_precision_holds_for_them_too() -> None:
    """Every parameter left whole, computing in bfloat16: as a model in bfloat16 with weights in float32."""

    def worker() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, rule in (("plain", ""), ("checkpoint", "rules: {layers.*: checkpoint}")):
            model = on_meta(llama())
            options = {"fsdp": {"min_size": 10**9, "param_dtype": "bfloat16", "reduce_dtype": "float32"}}
            for sizes in ({"dp_shard": 2}, {"tp": 2, "dp_shard": 1}):
                model = on_meta(llama())
                mesh = pz.build_mesh(Mesh(sizes), "cpu")
                program = pz.compile(
                    plan(f"extends: llama\n{rule}"), model, mesh, defaults=style_defaults(options)
                )
                pz.materialize(pz.apply(program, model, mesh), device="cpu", seed=5)
                seen: list[torch.dtype] = []
                model.norm.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out.dtype))
                index, count = pz.batch_rank(mesh)
                rows = {k: v.chunk(count)[index] for k, v in token_batch().items()}
                done = pz.train_step(
                    model, rows, wide_loss, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
                )
                assert seen == [torch.bfloat16]
                assert all(
                    p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32
                    for p in model.parameters()
                )
                found[f"{name} {sizes}"] = done.loss.item()
        return found

    reference = pz.materialize(on_meta(llama()), device="cpu", seed=5).bfloat16()
    expected = (
        wide_loss(reference(token_batch()["input_ids"]), token_batch())[0].item()
        / token_batch()["labels"].numel()
    )
    for result in run_ranks(worker, 2):
        assert len(result) == 4
        assert result == {name: pytest.approx(expected, rel=2e-3) for name in result}


def test_only_the_owners_of_the_named_parameters_see_them_cast() -> None:
    model = Llama(vocab_size=8, dim=8, n_layers=1, n_heads=2, n_kv_heads=2, hidden_dim=8, max_seq_len=8)
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, out.dtype))
    compute_in(model.get_submodule("layers.0.feed_forward.w1"), ["weight"], torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.zeros(1, 8, dtype=torch.long))
    assert set(seen.values()) == {torch.float32}
    assert model.layers[0].feed_forward.w1.weight.dtype == torch.float32
