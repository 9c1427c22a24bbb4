"""The degree of ulysses-ring must divide the ranks and the heads."""

from __future__ import annotations

import pytest

from parallelizer.language.workload import Workload
from tests.compiler.checks.test_attention_heads import IDS
from tests.findings import findings, mesh_of
from tests.runtime.test_step import llama

WORKLOAD = Workload({"input_ids": IDS, "labels": IDS}, 2, 16)
TEXT = "extends: llama\nrules: {{layers.*.attention.inner: {{style: context-parallel, {}}}}}"


def errors(options: str, **sizes: int) -> list[tuple[str, str, str | None]]:
    model = llama(n_heads=12, n_kv_heads=4, n_layers=3)
    found = findings(TEXT.format(options), model, mesh_of(**sizes), workload=WORKLOAD)
    return [(d.code, d.message, d.help) for d in found if d.severity == "error"]


@pytest.mark.parametrize("degree", [0, 3, 8])
def test_it_divides_the_ranks(degree: int) -> None:
    assert errors(f"method: ulysses-ring, ulysses_degree: {degree}", cp=4) == [
        ("ulysses-degree", f"ulysses_degree={degree} does not divide cp=4", "it can be 1, 2, 4")
    ]


@pytest.mark.parametrize("method", ["method: ring, ", "method: ulysses, ", ""])
def test_no_other_method_has_one(method: str) -> None:
    [(code, message, _)] = errors(f"{method}ulysses_degree: 2", cp=4)
    shown = method.removeprefix("method: ").removesuffix(", ") or "all-gather"
    assert (code, message) == (
        "ulysses-degree",
        f"ulysses_degree=2 needs `method: ulysses-ring`, and the method is {shown}",
    )


def test_heads_divide_by_it_after_tp_has_its_share() -> None:
    options = "method: ulysses-ring, ulysses_degree: 4"
    assert errors(options, cp=4) == errors(options, cp=8) == []
    assert errors(options, cp=4, tp=2) == [
        ("heads-not-divisible", f"layers.0.attention.inner has {heads} heads (2 ranks of tp share them), which ulysses "
         "cannot distribute over ulysses_degree=4 (2 more like it)",
         "choose a degree that divides the number of heads, or remove the option")
        for heads in ("12 query", "4 key-value")
    ]  # fmt: skip


def test_without_a_degree_whatever_fits_is_taken() -> None:
    assert errors("method: ulysses-ring", cp=4, tp=2) == []
    assert errors("method: auto, ulysses_degree: 2", cp=4) == []
