"""The table of mixtures; `python -m benchmarks.proofs experts` runs all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from benchmarks.proofs import mixtures
from benchmarks.proofs.__main__ import main
from benchmarks.proofs.experts import COLUMNS, Architecture, ExpertCell, markdown, prove, summary
from benchmarks.proofs.mixtures import architectures, override, settings
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.propose.from_transformers.tp_plan import read_ep_plan

pytest.importorskip("transformers", reason="the optional extra `hf`")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["granitemoe", "deepseek_v3"])
def test_an_architecture_is_proven_on_every_mesh(kind: str) -> None:
    architecture = Architecture.of(kind)
    cells = [prove(column, kind, architecture) for column in COLUMNS]
    assert [cell.reason for cell in cells if not cell.passed] == []


@pytest.mark.ranks
@pytest.mark.slow
def test_experts_of_a_split_stream_differ_without_the_sums_of_the_router() -> None:
    import dataclasses

    from parallelizer.propose.from_transformers.imported import parsed

    kind, (column,) = "qwen3_moe", [column for column in COLUMNS if column.split]
    architecture = Architecture.of(kind)
    wrong = parsed('rules: {"model.layers.*.mlp.gate": {style: replicate, grad: replicate}}')
    assert architecture.split is not None
    rules = (*architecture.split.rules, *wrong.rules)
    planted = dataclasses.replace(architecture, split=dataclasses.replace(architecture.split, rules=rules))
    cell = prove(column, kind, planted)
    assert not cell.passed and "gate" in cell.reason


def test_a_tiny_form_without_experts_is_not_proven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mixtures, "MORE", {"lfm2_moe": {"layer_types": ["conv", "full_attention"]}})
    assert main(["experts", "--only", "lfm2_moe", "--cells", str(tmp_path / "cells")]) == 1
    found = [json.loads(line) for line in (tmp_path / "cells").read_text().splitlines()]
    assert {cell["reason"] for cell in found} == {"its tiny form has no experts"}
    assert not any(cell["passed"] for cell in found)


@pytest.mark.slow  # it builds a model of every configuration of transformers
def test_every_tiny_form_has_experts() -> None:
    kinds = [kind for kind, reason in architectures().items() if not reason]
    built = {kind: _built(kind) for kind in kinds}
    assert [kind for kind, model in built.items() if not read_ep_plan(model)] == []


def _built(kind: str) -> nn.Module:
    return from_config(*compose_config(["model=hf", override(kind)]), planless=True).build_model()


@pytest.mark.slow  # it imports every configuration of transformers
def test_every_architecture_with_an_ep_plan_is_there() -> None:
    assert len(architectures()) >= 65


def test_an_architecture_says_whether_it_makes_a_language_model() -> None:
    found = architectures(lambda kind: kind in ("mixtral", "muse_spark_text", "llama"))
    assert list(found) == ["mixtral", "muse_spark_text"]
    assert not found["mixtral"] and "no causal" in found["muse_spark_text"]
    assert settings("mixtral")["num_local_experts"] == 8 and "num_experts: 8" in override("qwen3_moe")


def cells() -> list[ExpertCell]:
    return [
        ExpertCell("mixtral", "ep2", 0.25, passed=True),
        ExpertCell("mixtral", "ep4", 0.5, passed=True),
        ExpertCell("jamba", "ep2", 0.5, passed=True),
        ExpertCell("jamba", "ep4", 3.0, reason="the gradient differs"),
        ExpertCell("zaya", "ep2", None, reason="it has one expert a token"),
        ExpertCell("zaya", "ep4", None, reason="it has one expert a token"),
    ]


def test_what_is_not_proven_is_below_the_table_with_its_reason() -> None:
    text = markdown(cells())
    assert "| mixtral | 0.25 | 0.50 |" in text and "| jamba | 0.50 | not equal |" in text
    assert "- jamba on ep4: the gradient differs" in text and "- zaya: it has one expert a token" in text
    assert summary(cells()).startswith("1 of 3 architectures are proven on every mesh, 3 of 6 cells")


def test_kept_cells_make_the_table_and_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "cells.jsonl"
    kept.write_text(json.dumps({"model": "mixtral", "column": "ep2", "share": 0.5, "passed": True}) + "\n")
    main(["experts", "--cells", str(kept), "--kept", "--only", "mixtral"])
    assert "| mixtral | 0.50 |" in capsys.readouterr().out
