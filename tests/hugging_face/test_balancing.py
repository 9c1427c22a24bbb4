"""The balancing loss of a mixture of transformers: its own formula, of the whole batch on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import parallelizer as pz
from parallelizer.compiler.observe.calling import Routed
from parallelizer.losses import cross_entropy
from parallelizer.proof.prove import prove
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.step import forward, outcome_for_loss
from tests.hugging_face.small import settings
from tests.proof import subjects

transformers = pytest.importorskip("transformers", reason="the optional extra `hf`")

ASKED = (
    "model=hf_mixtral",
    "++model.config.output_router_logits=true",
    "++model.config.router_aux_loss_coef=1.0",
)


def built(kind: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5, **changes}
    config = transformers.AutoConfig.for_model(kind, **settings(kind, **asked))
    return transformers.AutoModelForCausalLM.from_config(config)


def batch(rows: int = 2, tokens: int = 12, padded: int = 0) -> dict[str, torch.Tensor]:
    made = {"input_ids": torch.randint(0, 32, (rows, tokens)), "labels": torch.randint(0, 32, (rows, tokens))}
    if padded:
        made["attention_mask"] = torch.ones(rows, tokens, dtype=torch.int64)
        made["attention_mask"][:, -padded:] = 0
    return made


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_it_is_the_loss_that_transformers_computes(kind: str, padded: int) -> None:
    model, given = built(kind), batch(padded=padded)
    theirs = model(**{k: v for k, v in given.items() if k != "labels"}).aux_loss
    found = outcome_for_loss(model, given)
    assert isinstance(found, Routed) and found.coefficient == 0.5
    mine = pz.load_balancing_loss(found.router, found.top_k, found.counted)
    torch.testing.assert_close(mine, theirs)
    total, weight = loss_sums(cross_entropy, found, given)
    alone, _ = cross_entropy(found.logits, given)
    torch.testing.assert_close(total, alone + 0.5 * mine * weight)
    assert isinstance(forward(model, given), torch.Tensor)


def test_a_model_that_does_not_ask_for_it_has_none() -> None:
    assert isinstance(outcome_for_loss(built("mixtral", output_router_logits=False), batch()), torch.Tensor)


def test_without_layers_there_is_none() -> None:
    with pytest.raises(ValueError, match="of a layer at least"):
        pz.load_balancing_loss((), 2)


def test_where_it_is_refused_and_where_it_is_warned_of() -> None:
    def said(*overrides: str) -> list[tuple[str, str]]:
        setup = subjects.setup(*ASKED, *overrides)
        try:
            found = setup.compile(setup.build_model()).diagnostics
        except pz.PlanError as error:
            found = tuple(error.diagnostics)
        return [(one.severity, one.message) for one in found if one.code == "balancing-loss"]

    assert said("parallel=fsdp2") == []
    ((severity, message),) = said("parallel=fsdp2", "train.accumulate=2")
    assert severity == "warning" and "of each of the 2 parts of the batch" in message
    ((severity, message),) = said("parallel=pp2")
    assert severity == "error" and "pp=2 cuts these" in message


@pytest.mark.ranks
@pytest.mark.parametrize(
    "where",
    [
        ("parallel=tp2", "parallel.mesh.ep=2"),  # in terms of a sum over tp
        *(
            pytest.param(where, marks=pytest.mark.slow)
            for where in (
                ("parallel=fsdp2_ep2",),
                ("parallel=fsdp2",),
                ("parallel=cp2",),
                ("parallel=cp2", "parallel.mesh.ep=2", "train.seq_len=15"),  # cp fills up the sequence
                ("parallel=fsdp2_tp2",),
                ("parallel=fsdp2_ep4_tp2",),
                ("parallel=fsdp2", "train.accumulate=2"),
                ("parallel=fsdp2", 'rules=["model.layers.*: checkpoint"]'),
            )
        ),
    ],
    ids=" ".join,
)
def test_it_is_that_of_one_rank(where: tuple[str, ...]) -> None:
    proof = prove(subjects.setup(*ASKED, *where))
    assert proof.passed, proof.divergence
