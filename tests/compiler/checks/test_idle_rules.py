"""Rules that do nothing because their axes have size 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.compiler.checks.idle_rules import idle_rules
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic


def idle(*overrides: str) -> list[Diagnostic]:
    setup = from_config(*compose_config(overrides))
    return list(idle_rules(setup.compile(setup.build_model())))


def test_the_rules_of_a_plan_are_told_of_in_one_line() -> None:
    [found] = idle("parallel=single")
    assert (found.code, found.severity) == ("idle-rule", "note")
    assert found.message == (
        "these rules have no effect on this mesh: `tok_embeddings` and 1 more (dp_replicate=1, dp_shard=1, cp=1, tp=1); "
        "`layers.*.{attention_norm,ffn_norm}` and 6 more (tp=1); `layers.*.attention.inner` (cp=1); "
        "`layers.*` and 1 more (dp_replicate=1, dp_shard=1, cp=1)"
    )
    assert found.span is None and found.help is None  # one line


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("fsdp2_cp2_tp2", None),
        ("tp8_cp2", None),
        (
            "hsdp2x2",
            "have no effect on this mesh: `layers.*.{attention_norm,ffn_norm}` and 6 more (tp=1); "
            "`layers.*.attention.inner` (cp=1)",
        ),
        ("cp2", "have no effect on this mesh: `layers.*.{attention_norm,ffn_norm}` and 6 more (tp=1)"),
    ],
)
def test_a_rule_with_something_to_do_is_not_told_of(preset: str, message: str | None) -> None:
    found = [d.message for d in idle(f"parallel={preset}")]
    assert found == ([f"these rules {message}"] if message else [])


def test_a_rule_of_the_command_line_gets_a_note_of_its_own() -> None:
    found = idle("parallel=fsdp2_tp2", 'rules=["layers.0.attention: context-parallel"]')
    assert [d.message for d in found if d.span and d.span.file.startswith("<override")] == [
        "`layers.0.attention` has no effect on this mesh: cp=1"
    ]


def test_a_rule_of_a_preset_gets_one_too(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    preset = "defaults: [base]\nmesh: {tp: 2}\nrules: ['layers.0.attention: context-parallel']\n"
    (tmp_path / "parallel" / "ours.yaml").write_text(preset)
    setup = from_config(*compose_config(["parallel=ours"], str(tmp_path)))
    [found] = idle_rules(setup.compile(setup.build_model()))
    assert found.message == "`layers.0.attention` has no effect on this mesh: cp=1"
    assert found.span is not None and (Path(found.span.file).name, found.span.line) == ("ours.yaml", 3)


@pytest.mark.parametrize("preset", ["tp2", "fsdp2_tp2", "cp2_tp2"])
def test_a_mesh_without_data_or_context_parallelism_is_nothing_to_tell_of(preset: str) -> None:
    assert idle(f"parallel={preset}") == []


def test_precision_and_styles_without_an_axis_are_something_to_do() -> None:
    overrides = ["parallel=single", "train.dtype=bfloat16", 'rules=["layers.0: checkpoint"]']
    assert [d.message for d in idle(*overrides)] == [
        "these rules have no effect on this mesh: `layers.*.{attention_norm,ffn_norm}` and 6 more (tp=1); "
        "`layers.*.attention.inner` (cp=1)"
    ]


def test_axes_named_in_params_count() -> None:
    rule = 'rules=["output: {style: shard-params, params: {weight: {tp_outer: shard(0)}}}"]'
    # On tp_outer alone nothing happens; tp, which the style stands on too, is above 1.
    assert "output" not in str([d.message for d in idle("parallel=tp2", rule)])
