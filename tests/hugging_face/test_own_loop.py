"""Models that somebody made with transformers, in a loop of their own: parallel, in float64, they compute what they do alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.compiler.observe.calling import logits_of
from parallelizer.language.plan import Mesh
from parallelizer.proof.modes import Float64
from tests.parity import EXACT, Batch, gathered, plan, relative
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="the optional extra `hf`")

VOCAB, ROWS, TOKENS, REAL = 32, 2, 16, 11
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 3, "head_dim": 4}
TAKEN = ("input_ids", "attention_mask", "position_ids")
DOCUMENTS = (
    "buffers: {batch: {position_ids: 1, documents: {dim: 1, documents: true}, attention_mask: document-mask}}"
)


def tokens() -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, VOCAB, (2, ROWS, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": labels}


def padded() -> Batch:
    """The first row is shorter than the second, which has padding in its middle, where a causal mask shows it."""
    batch = tokens()
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[0, REAL:] = False
    mask[1, 3:6] = False
    batch["labels"][~mask] = -100
    return {**batch, "attention_mask": mask}


def packed() -> Batch:
    """Documents of other lengths in each row, told by positions and by numbers."""
    lengths = ((5, 4, 7), (2, 11, 3))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    numbers = torch.stack([torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths])
    return {**tokens(), "position_ids": positions, "documents": numbers}


@dataclass(frozen=True)
class Case:
    """A model under a plan on a mesh; the plan is the architecture's with `more`."""

    name: str
    config: Mapping[str, Any]
    mesh: Mapping[str, int]
    batch: Callable[[], Batch]
    more: str = ""

    def plan(self) -> pz.Plan:
        return plan(f"version: 1\nextends: hf_{self.config['model_type']}\n{self.more}\n")


CASES = [
    Case("padding under cp", LLAMA, {"cp": 2}, padded),
    Case("padding and a window under cp", MISTRAL, {"cp": 2}, padded),
    Case("documents by number under cp", LLAMA, {"cp": 2}, packed, DOCUMENTS),
    Case("documents by position under tp", LLAMA, {"tp": 2}, packed, "buffers: {batch: {position_ids: 1}}"),
    Case("padding and a window under tp", MISTRAL, {"tp": 2}, padded),
]


def build(config: Mapping[str, Any]) -> nn.Module:
    """As a person would, on transformers' own sdpa."""
    sizes = dict(config)
    built = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(built, attn_implementation="sdpa")
    return model.double()


def token_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, labels = logits_of(output), batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def alone(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model as transformers runs it."""
    model, batch = build(case.config), case.batch()
    with Float64():
        total, count = token_loss(model(**{k: v for k, v in batch.items() if k in TAKEN}), batch)
        (total / count).backward()
    return total.detach() / count, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def in_parallel(case: Case) -> tuple[Tensor, dict[str, Tensor], str]:
    mesh, written = pz.build_mesh(Mesh(case.mesh), "cpu"), case.plan()
    model = pz.parallelize(build(case.config), written, mesh)
    local = pz.shard_batch(case.batch(), written, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    with Float64():
        done = pz.train_step(model, local, token_loss, optimizer)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return done.loss, gathered(model, gradients), model.config._attn_implementation  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float] | str]:
    def worker() -> dict[str, dict[str, float] | str]:
        found: dict[str, dict[str, float] | str] = {}
        for case in CASES:
            try:
                loss, gradients, implementation = in_parallel(case)
                expected_loss, expected = alone(case)
                found[case.name] = {n: relative(gradients[n], g) for n, g in expected.items()}
                found[case.name] |= {"loss": relative(loss, expected_loss)}  # type: ignore[operator]
                assert implementation == "parallelizer" and gradients.keys() == expected.keys()
            except Exception:
                found[case.name] = traceback.format_exc()
        return found

    return run_ranks(worker, 2)[1]


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_loss_and_gradients_are_those_of_one_process(
    name: str, errors: dict[str, dict[str, float] | str]
) -> None:
    found = errors[name]
    assert not isinstance(found, str), found
    assert {n: e for n, e in found.items() if not e < EXACT} == {}


def test_the_references_differ_by_what_is_proven() -> None:
    """Padding, the window and the documents change the loss: a run that lost them would not be equal."""
    losses = [alone(case)[0].item() for case in CASES]
    for case, loss in zip(CASES, losses, strict=True):
        plain = alone(Case("", LLAMA, {}, lambda case=case: {**tokens(), "labels": case.batch()["labels"]}))[
            0
        ].item()
        assert abs(loss - plain) > 1e-6, case.name
