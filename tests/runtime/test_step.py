"""The promise: a step on a mesh computes what an unsharded model computes. Every gradient is compared, never
the loss alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.language.plan import Plan
from parallelizer.models.llama import Llama
from parallelizer.runtime import apply as applier
from parallelizer.runtime import step
from parallelizer.runtime.taken_step import Step
from parallelizer.simulate.rehearse.host_reads import host_reads
from parallelizer.styles import fsdp
from tests.chosen import chosen
from tests.parity import (
    EXACT,
    VOCAB,
    Case,
    Errors,
    asked_for,
    assert_exact,
    compare,
    ignored_batch,
    plan,
    token_batch,
    token_loss,
)

MESHES_OF_2 = {
    "tp2": {"tp": 2},
    "fsdp2": {"dp_shard": 2},
    "cp2": {"cp": 2},
    "replicate2": {"dp_replicate": 2},
}
MESHES_OF_4 = {
    "tp4": {"tp": 4},
    "fsdp4": {"dp_shard": 4},
    "fsdp2_tp2": {"dp_shard": 2, "tp": 2},
    "fsdp2_cp2": {"dp_shard": 2, "cp": 2},
    "cp2_tp2": {"cp": 2, "tp": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "replicate2_cp2": {"dp_replicate": 2, "cp": 2},
    "replicate2_tp2": {"dp_replicate": 2, "tp": 2},
}


def llama(**sizes: Any) -> Callable[[], nn.Module]:
    """Grouped heads, and sizes of which none is the same as another."""
    every = {
        "vocab_size": VOCAB,
        "dim": 24,
        "n_layers": 2,
        "n_heads": 12,
        "n_kv_heads": 4,
        "hidden_dim": 40,
        "max_seq_len": 20,
    }
    return lambda: Llama(**{**every, **sizes})


def frozen() -> nn.Module:
    """Only the feed-forward networks and the final norm are trained."""
    model = llama()()
    for name, param in model.named_parameters():
        param.requires_grad_("feed_forward" in name or name == "norm.weight")
    return model


def with_rules(*rules: str, extends: str = "llama") -> Plan:
    lines = "".join(f"\n  {rule}" for rule in rules)
    return plan(f"extends: {extends}" + (f"\nrules:{lines}" if rules else ""))


EVERYTHING = {
    "checkpoint full": {"plan": with_rules("layers.*: checkpoint")},
    "checkpoint selective": {"plan": with_rules("layers.*: {style: checkpoint, mode: selective}")},
    "checkpoint around a unit": {"plan": with_rules("layers.*: checkpoint", "layers.*.attention: fsdp")},
    "accumulation": {"accumulate": 2},
    "shard_dim largest": {"options": {"fsdp": {"shard_dim": "largest"}}},
    "min_size": {"options": {"fsdp": {"min_size": 500}}},
    "min_size above everything": {
        "plan": with_rules("layers.*: checkpoint"), "options": {"fsdp": {"min_size": 10**9}}, "accumulate": 2,
    },
    "min_params": {"options": {"fsdp": {"min_params": 10**9}}},
    "reshard_after_forward true": {"options": {"fsdp": {"reshard_after_forward": True}}},
    "reshard_after_forward false": {"options": {"fsdp": {"reshard_after_forward": False}}},
    "cpu_offload": {"options": {"fsdp": {"cpu_offload": True}}},
    "ignored labels": {"batch": ignored_batch, "accumulate": 2},
    "tied embeddings": {"model": llama(tie_embeddings=True)},
    "frozen parameters": {"model": frozen},
    "frozen whole parameters": {"model": frozen, "options": {"fsdp": {"min_size": 10**9}}},
    "uneven shards": {"model": llama(dim=36, n_heads=6, n_kv_heads=2, hidden_dim=42)},
    "no clipping": {"clip": None},
    "keep_gathered": {"plan": with_rules("layers.*.attention.inner: {style: context-parallel, keep_gathered: true}")},
}  # fmt: skip

OPTIONS_OF_2 = {
    "tp2": [
        "checkpoint full", "checkpoint selective", "accumulation", "ignored labels", "tied embeddings", "no clipping",
        "frozen parameters",
    ],
    "fsdp2": list(EVERYTHING),
    "cp2": [
        "checkpoint full", "checkpoint selective", "accumulation", "min_size", "reshard_after_forward false", "ignored labels",
        "keep_gathered",
    ],
    "replicate2": ["accumulation", "shard_dim largest", "min_size above everything", "ignored labels", "tied embeddings"],
}  # fmt: skip

OPTIONS_OF_4 = {
    "fsdp2_tp2": [
        "checkpoint full",
        "accumulation",
        "shard_dim largest",
        "min_size",
        "tied embeddings",
        "ignored labels",
    ],
    "hsdp2x2": ["checkpoint selective", "min_size above everything", "cpu_offload", "ignored labels"],
    "cp2_tp2": ["checkpoint full", "min_size", "tied embeddings", "shard_dim largest"],
    "replicate2_cp2": ["accumulation", "checkpoint around a unit", "ignored labels"],
    "fsdp2_cp2": ["min_size", "checkpoint selective", "ignored labels"],
    "replicate2_tp2": ["min_size above everything"],
}


def cases(meshes: dict[str, dict[str, int]], options: dict[str, list[str]]) -> list[Case]:
    """Both plans on every mesh, and the first with options."""
    plain = [
        Case(f"{mesh} {name}", with_rules(extends=name), sizes, llama())
        for mesh, sizes in meshes.items()
        for name in ("llama", "llama_tp")
    ]
    others = [
        Case(
            f"{mesh} {name}",
            **{"plan": with_rules(), "mesh": meshes[mesh], "model": llama(), **EVERYTHING[name]},
        )  # type: ignore[arg-type]
        for mesh, names in options.items()
        for name in names
    ]
    return plain + others


CASES_OF_2 = cases(MESHES_OF_2, OPTIONS_OF_2)
CASES_OF_4 = [
    *cases(MESHES_OF_4, OPTIONS_OF_4),
    Case(
        "fsdp4 reshard_after_forward 2",
        with_rules(),
        {"dp_shard": 4},
        llama(),
        options={"fsdp": {"reshard_after_forward": 2}},
    ),
]


def without(module: Any, name: str, instead: Any) -> Callable[[], Any]:
    """One ingredient of a step taken away."""
    return lambda: mock.patch.object(module, name, instead)


WITHOUT_NORMS = with_rules('"layers.*.{attention_norm,ffn_norm}": none', "norm: none")
SPOILT = [
    Case("a plan without the norms", WITHOUT_NORMS, {"tp": 2}, llama()),
    Case("no sum of partial gradients", with_rules(), {"tp": 2}, llama(), setting=without(step, "sum_partial", lambda _: None)),
    Case("no correction of the scale", with_rules(), {"tp": 2}, llama(), setting=without(step, "scale_", lambda *_: None)),
    Case(
        "no sum of whole parameters", with_rules(), {"dp_shard": 2}, llama(), options={"fsdp": {"min_size": 500}},
        setting=without(fsdp, "sum_gradients_of", lambda *_: None),
    ),
    Case(
        "gradients averaged by fsdp", with_rules(), {"dp_shard": 2}, llama(), batch=ignored_batch,
        setting=without(fsdp, "sum_instead_of_average", lambda _: None),
    ),
    Case("tokens of this rank", with_rules(), {"dp_shard": 2}, llama(), setting=without(applier, "data_groups", lambda _: [])),
    Case("ties cut", with_rules(), {"tp": 2}, llama(tie_embeddings=True), setting=without(applier, "tie", lambda *_: None)),
]  # fmt: skip


DEFAULT = {
    *(f"{mesh} llama" for mesh in (*MESHES_OF_2, "fsdp2_tp2", "hsdp2x2")),
    "tp2 llama_tp",
    "fsdp2 min_size above everything",  # with checkpoints and accumulation
    "fsdp2 frozen whole parameters",
    "fsdp2 uneven shards",
    "tp2 tied embeddings",
    "cp2 ignored labels",
    "cp2_tp2 shard_dim largest",
}
"""Every kind of mesh, and what differs most from it."""


@pytest.fixture(scope="module")
def on_2_ranks(request: pytest.FixtureRequest) -> dict[str, Errors | str]:
    return compare([*asked_for(CASES_OF_2, request), *SPOILT])


@pytest.fixture(scope="module")
def on_4_ranks(request: pytest.FixtureRequest) -> dict[str, Errors | str]:
    return compare(asked_for(CASES_OF_4, request))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", chosen([case.name for case in CASES_OF_2], DEFAULT & {case.name for case in CASES_OF_2})
)
def test_two_ranks_compute_what_one_does(name: str, on_2_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_2_ranks[name])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", chosen([case.name for case in CASES_OF_4], DEFAULT & {case.name for case in CASES_OF_4})
)
def test_four_ranks_compute_what_one_does(name: str, on_4_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_4_ranks[name])


def test_what_is_due_always_is_there() -> None:
    assert {case.name for case in (*CASES_OF_2, *CASES_OF_4)} >= DEFAULT


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in SPOILT])
def test_the_comparison_sees_what_is_missing(name: str, on_2_ranks: dict[str, Errors | str]) -> None:
    result = on_2_ranks[name]
    assert not isinstance(result, str), result
    assert max(result.values()) > 1e6 * EXACT


@pytest.mark.ranks
def test_a_norm_without_a_rule_spoils_its_gradient_and_not_the_loss(
    on_2_ranks: dict[str, Errors | str],
) -> None:
    result = on_2_ranks["a plan without the norms"]
    assert not isinstance(result, str), result
    assert result["loss 0"] < EXACT
    wrong = {name for name, error in result.items() if name.startswith("gradient") and error > 0.01}
    # All gradients are scaled by the clipping, which has seen a wrong norm; beside that only the norms' are
    # wrong.
    assert {
        "gradient norm.weight",
        "gradient layers.0.attention_norm.weight",
        "gradient layers.1.ffn_norm.weight",
    } <= wrong


# One process


class Tiny(nn.Module):
    """Token ids to logits, and no more; notes how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.training, torch.is_grad_enabled()))
        logits: torch.Tensor = self.table(input_ids)
        return logits


def test_an_unsharded_model_takes_the_same_step() -> None:
    torch.manual_seed(0)
    model, reference = Tiny().double(), Tiny().double()
    reference.load_state_dict(model.state_dict())
    batch = ignored_batch()
    done = pz.train_step(model, batch, token_loss, torch.optim.SGD(model.parameters(), lr=0.1), 0.01)

    labels = batch["labels"]
    loss = torch.nn.functional.cross_entropy(reference(batch["input_ids"]).flatten(0, 1), labels.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close(done.loss, loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(done.grad_norm, norm, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.table.weight, reference.table.weight, rtol=1e-12, atol=1e-15)
    assert model.table.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_that_may_be_skipped_reads_everything_at_once(dtype: torch.dtype) -> None:
    """One host read a step: the loss, the norm, whether they are finite, and words of 63 bits."""
    model = llama()().to(dtype)
    twin, batch = copy.deepcopy(model), token_batch()
    optimizer = torch.optim.SGD(model.parameters())
    plain = pz.train_step(twin, batch, token_loss, torch.optim.SGD(twin.parameters()), 1.0)
    words = torch.tensor([7, -(2**62) - 1])
    taken: list[Step] = []

    def take() -> None:
        taken.append(
            pz.train_step(model, batch, token_loss, optimizer, 1.0, skip_nonfinite=True, words=words)
        )

    reads = host_reads(take, "cpu")
    [done] = taken
    assert sum(reads.values()) == 1, reads
    assert torch.equal(done.loss, plain.loss) and torch.equal(done.grad_norm, plain.grad_norm)
    assert done.loss.dtype == plain.loss.dtype and done.loss.device.type == "cpu"
    assert done.words == (7, -(2**62) - 1)


def test_parts_of_unequal_weight_are_one_batch() -> None:
    whole = ignored_batch()
    parts = [{k: v[:1] for k, v in whole.items()}, {k: v[1:] for k, v in whole.items()}]
    torch.manual_seed(0)
    a, b = Tiny().double(), Tiny().double()
    b.load_state_dict(a.state_dict())
    one = pz.train_step(a, whole, token_loss, torch.optim.SGD(a.parameters(), lr=0.1))
    two = pz.train_step(b, parts, token_loss, torch.optim.SGD(b.parameters(), lr=0.1))
    torch.testing.assert_close(two.loss, one.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(b.table.weight, a.table.weight, rtol=1e-12, atol=1e-15)


def test_the_step_scales_by_a_power_of_two() -> None:
    mantissa, _ = torch.frexp(torch.tensor(step.SCALE))
    assert mantissa.item() == 0.5


def test_evaluation_runs_without_gradients_and_leaves_the_mode_as_it_was() -> None:
    model = Tiny()
    loss = pz.evaluate(model, [token_batch(), ignored_batch()], token_loss)
    assert model.training
    assert model.seen == [(False, False)] * 2
    sums = [token_loss(model(b["input_ids"]), b) for b in (token_batch(), ignored_batch())]
    expected = sum(total for total, _ in sums) / sum(weight for _, weight in sums)
    torch.testing.assert_close(loss, expected.detach())

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pz.evaluate(model, [token_batch()], fails)
    assert model.training


def test_no_batch_is_refused() -> None:
    model = Tiny()
    with pytest.raises(ValueError, match="no batch"):
        pz.train_step(model, [], token_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no batch"):
        pz.evaluate(model, [], token_loss)


def test_only_what_forward_takes_is_handed_to_it() -> None:
    class Open(Tiny):
        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            self.names = set(batch)
            return super().forward(batch["input_ids"])

    model = Open()
    step.forward(model, token_batch())
    assert model.names == {"input_ids"}  # labels are the loss's, unless forward names them
    step.forward(Tiny(), token_batch())  # takes no labels
