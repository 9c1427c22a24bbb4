"""Which method `auto` takes is told with what every possible method would send."""

from __future__ import annotations

import re
from functools import cache

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.report.explanation import explain
from parallelizer.styles.context_parallel.choice import Heads, cheapest, sent
from tests.simulate.setups import LLAMA

STYLE = "++parallel.styles.context-parallel."


@cache
def notes(*overrides: str, module: str = "layers.0.attention.inner") -> tuple[str, ...]:
    answer = explain(from_config(*compose_config((*LLAMA, *overrides))), module)
    [filled] = [f for f in answer.explanations[0].slots if f.slot == "attention"]
    return filled.notes


def figures(lines: tuple[str, ...]) -> dict[str, tuple[float, str]]:
    """By method, its share of K and its bytes."""
    found = (re.fullmatch(r"  ([\w-]+)(?: \(ulysses_degree=\d+\))? (\S+) K, (.+)", line) for line in lines)
    return {m[1]: (float(m[2]), m[3]) for m in found if m}


@pytest.mark.parametrize(
    ("heads", "ranks", "tp"),
    [((16, 8), 4, 1), ((16, 2), 4, 1), ((8, 4), 8, 1), ((8, 4), 2, 4), ((16, 8), 2, 2)],
)
def test_auto_is_told_with_what_each_method_sends(heads: tuple[int, int], ranks: int, tp: int) -> None:
    sizes = f"parallel.mesh.cp={ranks}", f"parallel.mesh.tp={tp}"
    model = f"model.n_heads={heads[0]}", f"model.n_kv_heads={heads[1]}", "model.dim=128"
    lines = notes(*sizes, *model, f"{STYLE}method=auto")
    local = Heads(heads[0] // tp, heads[1] // tp)
    assert lines[0].startswith(
        f"auto takes {cheapest(local, ranks, is_causal=True)} for {heads[0]} query and {heads[1]}"
    )
    assert ("a rank of tp has" in lines[0]) == (tp > 1)
    told = figures(lines)
    for method, (share, _) in told.items():
        assert share == float(sent(method, local, ranks, is_causal=True))
    assert {"ring", "all-gather"} <= told.keys() and next(iter(told)) == cheapest(
        local, ranks, is_causal=True
    )


def test_bytes_are_those_of_one_sequence() -> None:
    lines = notes(
        "parallel=cp2", f"{STYLE}method=auto", "model.n_heads=16", "model.n_kv_heads=8", "model.dim=128"
    )
    # 8 key heads of 8 numbers, 32 rows over 2 ranks, keys and values in float32.
    assert "K = 8.0 KiB: one rank's keys and values in float32" in lines[-1]
    assert figures(lines)["ring"] == (3.0, "24.0 KiB")


def test_a_degree_that_is_set_is_the_one_that_is_weighed() -> None:
    overrides = (
        "parallel=cp4",
        "model.n_heads=16",
        "model.n_kv_heads=8",
        "model.dim=128",
        f"{STYLE}method=auto",
    )
    [line] = [n for n in notes(*overrides, f"{STYLE}ulysses_degree=2") if n.startswith("  ulysses-ring")]
    assert line.startswith("  ulysses-ring (ulysses_degree=2) 6 K")


def test_the_degree_that_ulysses_ring_takes_is_told() -> None:
    overrides = ("parallel=cp4", "model.n_heads=4", "model.n_kv_heads=2", f"{STYLE}method=ulysses-ring")
    assert notes(*overrides) == (
        "ulysses_degree=2 for 4 query and 2 key heads over 4 ranks sends least, 6 K",
    )
    assert notes(*overrides, f"{STYLE}ulysses_degree=1") == ()  # nothing to choose


def test_where_heads_are_unknown_the_closed_forms_are_told() -> None:
    """A model whose forward does not run on meta."""
    lines = notes("parallel=cp4", f"{STYLE}method=auto", "rules=['norm: context-parallel']", module="norm")
    assert lines[0].startswith("auto takes what sends least over 4 ranks")
    assert lines[1:4] == (
        "  all-gather 9 K, 6 K under a mask or with keep_gathered",
        "  ring 9 K, not under a mask",
        "  ulysses 1.5 (1+g) K, if both numbers of heads divide by 4",
    )


def test_other_methods_need_no_word() -> None:
    assert notes("parallel=cp2") == ()
