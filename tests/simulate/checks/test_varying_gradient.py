"""Gradients that nothing sums: exactly the parameters that train on them are named, at the rule that is missing."""

from __future__ import annotations

import itertools
import re

import pytest

from parallelizer.proof.prove import prove
from tests.proof import subjects
from tests.simulate.checks.test_followed_step import found, marked, rule, slowly

NORMS = ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")


@pytest.mark.parametrize(
    "dropped",
    slowly([c for n in (1, 2, 3) for c in itertools.combinations(NORMS, n)], ("norm",), NORMS),
    ids=" ".join,
)
def test_exactly_the_norms_without_a_rule_are_named(dropped: tuple[str, ...]) -> None:
    rules = "rules=[" + ",".join(f'"{norm}: none"' for norm in dropped) + "]"
    (diagnostic,) = found("parallel=tp2", rules)
    assert (diagnostic.code, diagnostic.severity) == ("varying-gradient", "error")
    named = {
        name for norm in dropped for name in ([norm] if norm == "norm" else [norm.replace("*", "{0,1}")])
    }
    message = diagnostic.message.replace(
        "{attention_norm,ffn_norm}", "attention_norm.weight, layers.{0,1}.ffn_norm"
    )
    assert set(re.findall(r"(\S+)\.weight", message)) == named
    assert "over tp" not in message and "of tp" in message
    assert "split since tok_embeddings" in message
    assert marked(diagnostic) == "output"
    style = "replicate" if len(dropped) == len(NORMS) else "sequence"  # as other norms of the plan have it
    assert diagnostic.help is not None and f": {style}`" in diagnostic.help


def test_what_is_named_is_what_a_proof_finds_wrong() -> None:
    overrides = ("parallel=tp2", 'rules=["layers.*.ffn_norm: none","norm: none"]')
    proof = prove(subjects.setup(*overrides), force=True)
    wrong = {d.name for d in proof.verdict.of("gradient") if d.step == 0 and not d.passed}
    assert wrong == {"layers.0.ffn_norm.weight", "layers.1.ffn_norm.weight", "norm.weight"}
    (diagnostic,) = found(*overrides)
    assert "layers.{0,1}.ffn_norm.weight, norm.weight" in diagnostic.message


@pytest.mark.parametrize(("plan", "grad"), [("llama", "partial"), ("llama_tp", "replicate")])
def test_the_right_kind_of_gradient_is_accepted(plan: str, grad: str) -> None:
    assert found("parallel=tp2", f"plan={plan}", rule(f"norm: {{style: replicate, grad: {grad}}}")) == ()


def test_layers_that_are_not_followed_are_named_with_the_others() -> None:
    (diagnostic,) = found("parallel=tp2", "model.n_layers=40", rule("layers.*.ffn_norm: none"))
    assert "the whole of layers.{0..39}.ffn_norm.weight" in diagnostic.message
