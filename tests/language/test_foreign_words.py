"""Words of torch's and transformers' are answered with the ones that plans have."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import parallel

from parallelizer.diagnostics.diagnostic import Findings
from parallelizer.language import foreign_words
from parallelizer.language.parse_rule import parse_rules
from parallelizer.language.styles import STYLES
from parallelizer.language.yaml_nodes import MappingNode, read


def helps(text: str) -> list[str | None]:
    node, findings = read(f"rules: {{m: {text}}}", "p.yaml"), Findings()
    assert isinstance(node, MappingNode)
    rules = node.get("rules")
    assert isinstance(rules, MappingNode)
    parse_rules(rules, findings)
    return [found.help for found in findings.items]


@pytest.mark.parametrize(("word", "meant"), foreign_words.STYLES.items())
def test_what_help_says_is_a_rule(word: str, meant: str) -> None:
    assert helps(word) == [f"a plan writes it `{meant}`"]
    assert helps(meant) == []


@pytest.mark.parametrize("path", ["torch.distributed.tensor.parallel.ColwiseParallel", "ColwiseParallel()"])
def test_however_it_is_imported(path: str) -> None:
    assert helps(path) == ["a plan writes it `colwise`"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Shard(1)", "shard(1)"),
        ("Shard(dim=-1)", "shard(-1)"),
        ("Replicate()", "replicate"),
        ("torch.distributed.tensor.Replicate()", "replicate"),
        ("replicate()", "replicate"),
        ("Partial()", "partial"),
        ("sharded(1)", None),
        ("shard", None),
    ],
)
def test_placements_of_torch(text: str, meant: str | None) -> None:
    assert foreign_words.placement(text) == meant
    found = helps(f"{{style: rowwise, output: {text}}}")
    assert found == ([f"a plan writes it `{meant}`"] if meant else found) and len(found) == 1


@pytest.mark.parametrize("option", foreign_words.OPTIONS)
def test_arguments_of_torch(option: str) -> None:
    [found] = helps(f"{{style: colwise, {option}: true}}")
    assert found is not None and found.startswith(
        f"a plan writes it `{foreign_words.OPTIONS[option]}`; it has "
    )


def test_every_parallel_style_of_torch_has_a_word() -> None:
    own = {name for name in parallel.__all__ if "Parallel" in name or name.startswith("PrepareModule")}
    assert own - set(foreign_words.STYLES) <= {"ParallelStyle"}
    assert {w for w in foreign_words.STYLES.values() if w[0] != "{"} <= set(STYLES)
