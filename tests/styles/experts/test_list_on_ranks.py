"""A list of experts with its author's loop on ranks that share them out: each keeps its own, checkpoints fit, it is proven."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parallelizer as pz
import parallelizer.testing
from parallelizer.language.plan import Mesh
from parallelizer.runtime.checkpoint.loading import load_checkpoint
from parallelizer.runtime.checkpoint.saving import save_checkpoint
from parallelizer.styles.experts.stack import stack_experts
from tests.chosen import chosen
from tests.parity import VOCAB, plan, token_batch, token_loss
from tests.ranks import run_ranks
from tests.runtime.checkpoint.models import gathered_state
from tests.styles.experts.models import EXPERTS, Loop, Mixture
from tests.styles.experts.test_meshes import TERMS
from tests.styles.models import around

pytestmark = pytest.mark.ranks

RULES = plan(f"rules: {{inner.experts: experts, inner.gate: replicate, {TERMS}, '': fsdp}}")
MESHES = {
    "ep2": Mesh({"dp_shard": 2}, ep=2),
    "ep4": Mesh({"dp_shard": 4}, ep=4),
    "fsdp2_ep2": Mesh({"dp_shard": 4}, ep=2),
    "ep2_tp2": Mesh({"tp": 2}, ep=2),
    "fsdp2_ep4_tp2": Mesh({"dp_shard": 2, "tp": 2}, ep=4),
    "fsdp2": Mesh({"dp_shard": 2}),
    "fsdp4": Mesh({"dp_shard": 4}),
}


def unstacked() -> nn.Module:
    with torch.device("meta"):
        return around(lambda: Mixture(Loop()))()


def made() -> nn.Module:
    return stack_experts(unstacked(), RULES)


class Trained:
    """A model on a mesh with its optimizer."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh, self.model = pz.build_mesh(mesh, "cpu"), made()
        pz.apply(pz.compile(RULES, self.model, mesh), self.model, self.mesh)
        pz.materialize(self.model, device="cpu", seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)

    def step(self) -> float:
        """The loss."""
        local = pz.shard_batch(token_batch(), RULES, self.mesh)
        return pz.train_step(self.model, local, token_loss, self.optimizer, 1.0).loss.item()

    def state(self) -> dict[str, str]:
        return gathered_state(self.model, self.optimizer)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("ep2", "fsdp2")),
        pytest.param(2, ("ep2_tp2", "fsdp2"), marks=pytest.mark.slow),
        pytest.param(4, ("ep4", "fsdp2_ep2", "fsdp2_ep4_tp2", "fsdp4"), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_one_mesh_fits_the_others_to_the_bit(
    ranks: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    def worker() -> tuple[set[str], float]:
        apart, wrong = 0.0, set()
        for source in names:
            one = Trained(MESHES[source], 1)
            one.step()
            saved = one.state()
            save_checkpoint(tmp_path / source, 1, one.model, one.optimizer)
            loss = one.step()
            for target in names:
                other = Trained(MESHES[target], 2)
                load_checkpoint(tmp_path / source / "step_1", other.model, other.optimizer)
                if other.state() != saved:
                    wrong.add(f"{source} to {target}")
                apart = max(apart, abs(other.step() - loss) / loss)
        return wrong, apart

    for wrong, apart in run_ranks(worker, ranks):
        assert not wrong and apart < 1e-5


def test_each_rank_has_its_own_experts_and_no_others() -> None:
    whole = sum(p.numel() for n, p in made().named_parameters() if ".experts." in n)

    def worker() -> tuple[int, set[int]]:
        model = Trained(MESHES["ep2"], 1).model
        local = [p.to_local() for n, p in model.named_parameters() if ".experts." in n]  # type: ignore[attr-defined]
        return sum(t.untyped_storage().nbytes() // t.element_size() for t in local), {
            t.shape[0] for t in local
        }

    assert run_ranks(worker, 2) == [(whole // 2, {EXPERTS // 2})] * 2


@pytest.mark.parametrize("name", chosen(["ep2", "fsdp2_ep2", "ep2_tp2", "ep4", "fsdp2_ep4_tp2"], ["ep2_tp2"]))
def test_it_is_proven(name: str) -> None:
    """As a list, which the tool for tests stacks."""
    mesh = {axis: size for axis, size in MESHES[name].every.items() if size > 1}
    pz.testing.assert_equivalent(unstacked, RULES, mesh, loss=token_loss, batch=batch, clip=0.5)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCAB, (2, 4, 8), generator=generator)
    for row in range(4):
        labels[row, :row] = -100
    return {"input_ids": ids, "labels": labels}
