"""From a configuration to a Setup: presets, style defaults, rules of three sources, and every mistake in
them.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.plan import AXES, MESH_KEYS, PARTIAL, REPLICATE, shard
from parallelizer.language.schema.preset_keys import PARALLEL_KEYS
from parallelizer.language.styles import STYLES
from parallelizer.language.workload import Entry

CONFIG: dict[str, Any] = {
    "plan": "${model.plan}",
    "rules": [],
    "imports": [],
    "device": "cpu",
    "model": {
        "_target_": "torch.nn.Linear",
        "in_features": 4,
        "out_features": 4,
        "plan": "mine",
        "batch": {"input": {"shape": ["batch", "sequence"], "range": [0, 9]}},
        "loss": "torch.nn.functional.mse_loss",
    },
    "parallel": {
        "mesh": {"tp": 2, "dp_shard": 4},
        "layouts": {},
        "rules": [],
        "styles": {"fsdp": {"param_dtype": "${train.dtype}"}},
    },
    "train": {"batch_size": 8, "seq_len": 16, "accumulate": 2, "dtype": "bfloat16"},
}


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a plan, which is the working directory and on the import path."""
    (tmp_path / "mine.yaml").write_text(
        "layouts: {stream: shard(1)}\nrules: {'': [fsdp, {style: prepare-output, output: stream}]}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def setup(**changes: Any) -> Setup:
    """The Setup of CONFIG with some dotted keys (`__` for the dots) set anew; None removes `REMOVED`."""
    config = OmegaConf.create(copy.deepcopy(CONFIG))
    config.model.plan = "./mine.yaml"
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, merge=False, force_add=True)
    return from_config(config)


def refused(**changes: Any) -> list[Diagnostic]:
    with pytest.raises(PlanError) as caught:
        setup(**changes)
    assert all(found.help and found.message for found in caught.value.diagnostics)
    return list(caught.value.diagnostics)


def test_a_configuration_becomes_a_setup() -> None:
    read = setup()
    assert read.mesh.sizes == {**dict.fromkeys(AXES, 1), "tp": 2, "dp_shard": 4}
    assert (read.plan.name, read.plan.file, read.device) == ("mine", "./mine.yaml", "cpu")
    assert read.workload.entries == {"input": Entry(("batch", "sequence"), "int64", (0, 9))}
    assert (read.workload.batch_size, read.workload.seq_len, read.workload.accumulate) == (8, 16, 2)
    assert read.defaults["fsdp"].options["param_dtype"].value == "bfloat16"
    assert read.warnings == ()
    assert isinstance(read.build_model(), torch.nn.Linear)
    assert read.build_model().weight.is_meta
    assert read.loss() is torch.nn.functional.mse_loss


def test_rules_of_the_plan_come_first_then_the_presets_then_the_command_lines() -> None:
    read = setup(
        parallel__rules=["a: fsdp", {"b": "checkpoint"}], rules=["c: {style: fsdp, cpu_offload: true}"]
    )
    assert [rule.key for rule in read.plan.rules] == ["", "a", "b", "c"]
    assert read.plan.rules[-1].uses[0].options["cpu_offload"].value is True


def test_a_preset_sets_layouts_anew() -> None:
    assert setup().plan.layouts == {"stream": shard(1)}
    assert setup(parallel__layouts={"stream": "replicate"}).plan.layouts == {"stream": REPLICATE}
    assert setup(parallel__layouts={"stream": "shard(0)"}).plan.layouts == {"stream": shard(0)}


def test_a_layout_that_the_plan_does_not_have_is_a_warning_unless_a_rule_uses_it() -> None:
    read = setup(parallel__layouts={"steam": "partial"})
    [warning] = read.warnings
    assert (warning.code, warning.severity) == ("unknown-layout", "warning")
    assert "did you mean stream?" in (warning.help or "")
    for rule in (
        "a: {style: sequence, layout: steam}",
        "a: {style: prepare-input, input: {x: stream -> steam}}",
        "a: {style: shard-params, params: {weight: {tp: steam}}}",
    ):
        used = setup(parallel__layouts={"steam": "partial"}, rules=[rule])
        assert used.warnings == () and used.plan.layouts["steam"] == PARTIAL


def test_a_warning_about_the_configuration_comes_with_those_of_the_compiler() -> None:
    read = setup(parallel__layouts={"steam": "partial"}, parallel__mesh={"dp_shard": 4})
    program = read.compile(read.build_model())
    assert "unknown-layout" in [found.code for found in program.diagnostics]


def test_a_style_is_switched_off_or_gets_defaults() -> None:
    assert setup(parallel__styles__fsdp=None).defaults["fsdp"].off
    read = setup(
        parallel__styles__fsdp__reshard_after_forward=False, parallel__styles__checkpoint={"mode": "full"}
    )
    assert read.defaults["fsdp"].options["reshard_after_forward"].value is False
    assert read.defaults["checkpoint"].options["mode"].value == "full"
    assert not read.defaults["fsdp"].off
    assert setup(parallel__styles__fsdp__param_dtype=None).defaults["fsdp"].options == {}
    assert setup(parallel__styles__fsdp={}).defaults["fsdp"].options == {}
    assert (
        setup(parallel__styles__prepare_io=None, parallel__styles={"prepare-io": None})
        .defaults["prepare-io"]
        .off
    )


@pytest.mark.parametrize(
    "parallel", [{}, None, {"mesh": None, "layouts": None, "rules": None, "styles": None}]
)
def test_a_preset_may_say_nothing(parallel: Any) -> None:
    read = setup(parallel=parallel)
    assert read.mesh.world_size == 1 and not read.defaults


def test_a_batch_has_one_sequence_of_one_token_unless_said() -> None:
    work = setup(train={"dtype": "float32"}).workload
    assert (work.batch_size, work.seq_len, work.accumulate) == (1, 1, 1)


@pytest.mark.parametrize(
    ("changes", "code", "message", "advice"),
    [
        ({"parallel": 3}, "wrong-type", "parallel takes a map, not '3'", "set its parts"),
        ({"parallel": ["a"]}, "wrong-type", "parallel takes a map, not a list", "set its parts"),
        ({"parallel__msh": {}}, "unknown-key", "a preset has no key 'msh'", "did you mean mesh?"),
        ({"parallel__mesh": 3}, "wrong-type", "parallel.mesh takes a map, not '3'", "set its parts"),
        ({"parallel__mesh__tpp": 2}, "unknown-axis", "there is no axis 'tpp'", "the axes are pp, dp_replicate"),
        *[({"parallel__mesh__tp": size}, "wrong-type", "the size of tp is", "whole number from 1")
          for size in (0, -2, 2.0, "2", True, "", "???", None, [2])],
        ({"parallel__mesh__tp": "${nope}"}, "interpolation", "parallel.mesh.tp cannot be resolved", "write the value"),
        ({"parallel__mesh__tp": "${oc.env:NO_SUCH_VARIABLE}"}, "interpolation", "NO_SUCH_VARIABLE", "write the value"),
        ({"parallel__layouts": "replicate"}, "wrong-type", "parallel.layouts takes a map", "set its parts"),
        ({"parallel__layouts__a": "shard(x)"}, "unknown-placement", "'shard(x)' is not a placement", "a placement is"),
        ({"parallel__layouts__shard": "replicate"}, "bad-layout-name", "cannot be called 'shard'", "letters"),
        ({"parallel__styles": []}, "wrong-type", "parallel.styles takes a map, not a list", "set its parts"),
        ({"parallel__styles__fsd": None}, "unknown-style", "there is no style 'fsd'", "did you mean fsdp?"),
        ({"parallel__styles__fsdp": 3}, "wrong-type", "the defaults of fsdp are a map", "null"),
        ({"parallel__styles__fsdp__reshard": True}, "unknown-option", "has no option 'reshard'", "mean reshard_after_forward?"),
        ({"parallel__styles__fsdp__cpu_offload": "maybe"}, "wrong-type", "'maybe' is not true or false", "true or false"),
        ({"train__dtype": "float31"}, "unknown-value", "'float31' is no dtype", "did you mean float32?"),
        *[({key: value}, "wrong-type", f"{key.replace('__', '.')} takes a list of rules", "in a list: '")
          for key in ("rules", "parallel__rules") for value in ("a: fsdp", 3, {"a": "fsdp"}, "")],
        ({"rules": [3]}, "wrong-type", "'3' is not a rule", "a rule is"),
        ({"rules": [None]}, "wrong-type", "'null' is not a rule", "a rule is"),
        ({"rules": ["a: fdsp"]}, "unknown-style", "there is no style 'fdsp'", "did you mean fsdp?"),
        ({"rules": ["a: ${x}"]}, "interpolation", "plans and rules have no", "write the value itself"),
        ({"rules": [{"a": {"style": "${x}"}}]}, "interpolation", "plans and rules have no", "write the value itself"),
        ({"parallel__rules": ["a: {style: fsdp, _target_: os.system}"]}, "not-data", "'_target_' has no", "a plan is data"),
        ({"plan": None}, "plan-not-found", "no plan is chosen", "set plan="),
        ({"plan": ""}, "plan-not-found", "no plan is chosen", "set plan="),
        ({"plan": ["a"]}, "plan-not-found", "is not the name of a plan", "set plan="),
        ({"plan": 3}, "plan-not-found", "there is no plan named '3'", "the plans are alibi"),
        ({"plan": "${nope}"}, "interpolation", "the value of plan cannot be resolved", "write the value"),
        ({"device": "gpu"}, "unknown-value", "there is no device 'gpu'", "the devices are auto, cpu, cuda"),
        ({"model": None, "plan": "llama"}, "model-build", "no model is configured", "set model="),
        ({"model": 3, "plan": "llama"}, "model-build", "no model is configured", "set model="),
        ({"model___target_": None}, "model-build", "the model config has no `_target_`", "_target_ with its arguments"),
        ({"model__loss": ""}, "model-build", "the model config has no `loss`", "plan, batch and loss"),
        ({"model__in_features": "${nope}"}, "interpolation", "cannot be resolved", "write the value"),
        ({"train": 3, "parallel__styles": None}, "wrong-type", "train takes a map", "set its parts"),
        *[({f"train__{key}": value}, "wrong-type", f"train.{key} is", "whole number from 1")
          for key in ("batch_size", "seq_len", "accumulate") for value in (0, "many", None, 1.5)],
        ({"model__batch": 3}, "wrong-type", "model.batch takes a map of entries", "write {shape:"),
        *[({"model__batch__input": entry}, "wrong-type", f"model.batch.input {wrong}", "write {shape:") for entry, wrong in (
            (3, "needs a shape"), ({}, "needs a shape"), ({"shape": "batch"}, "needs a shape"),
            ({"shape": ["batch", "sequnce"]}, "needs a shape"), ({"shape": [2.5]}, "needs a shape"),
            ({"shape": ["batch"], "dtype": "int65"}, "has the dtype 'int65'"),
            ({"shape": ["batch"], "dtype": "nn"}, "has the dtype 'nn'"),
            ({"shape": ["batch"], "range": 3}, "needs a range"), ({"shape": ["batch"], "range": [3, 3]}, "needs a range"),
            ({"shape": ["batch"], "range": [0, 1, 2]}, "needs a range"), ({"shape": ["batch"], "ignore": "x"}, "has an `ignore`"),
        )],
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_what_to_do(
    changes: dict[str, Any], code: str, message: str, advice: str
) -> None:
    [found] = refused(**changes)
    assert found.code == code
    assert message in found.message and advice in (found.help or "")


def test_every_mistake_of_a_configuration_and_its_plan_comes_at_once() -> None:
    Path("mine.yaml").write_text("rules: {a: fdsp}\n")
    changes = {
        "parallel__mesh__tp": 0,
        "parallel__layouts__a": "b",
        "parallel__styles__x": None,
        "parallel__rules": [3],
    }
    found = refused(**changes, rules=["c: d"], train__seq_len=0, device="gpu", model__loss=None)
    assert Counter(one.code for one in found) == {
        "wrong-type": 3,  # tp, the preset's rule, seq_len
        "unknown-style": 3,  # in the plan, of the preset, on the command line
        "unknown-placement": 1,
        "unknown-value": 1,
        "model-build": 1,
    }


# --- imports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("imports", [["my_styles"], "my_styles", ["my_styles", "json"]])
def test_imports_are_imported_before_the_plan_is_read(
    working_directory: Path, imports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working_directory / "my_styles.py").write_text(
        "from parallelizer.language.styles import StyleDeclaration, declare\n"
        "declare(StyleDeclaration('mine', 'checkpoint', None, 'a style of my own'))\n"
    )
    monkeypatch.delitem(sys.modules, "my_styles", raising=False)
    try:
        read = setup(imports=imports, rules=["a: mine"])
        assert read.plan.rules[-1].uses[0].style == "mine"
    finally:
        STYLES.pop("mine", None)
        sys.modules.pop("my_styles", None)


@pytest.mark.parametrize(
    ("imports", "text", "message"),
    [
        (["no_such_module"], "", "cannot import no_such_module: ModuleNotFoundError"),
        (["broken"], "def f(:\n", "cannot import broken: SyntaxError"),
        (["broken"], "x = 1\nraise KeyError('why')\n", "cannot import broken: KeyError: 'why'"),
        (["broken"], "import no_such_module\n", "No module named 'no_such_module'"),
        ([3], "", "cannot import 3"),
        (3, "", "cannot import 3"),
        ([""], "", "cannot import"),
        (["..relative"], "", "cannot import ..relative"),
    ],
)
def test_what_cannot_be_imported_is_named(
    working_directory: Path, imports: Any, text: str, message: str
) -> None:
    (working_directory / "broken.py").write_text(text)
    [found] = refused(imports=imports)
    assert found.code == "import-failed" and message in found.message
    if "KeyError" in message:
        assert f"{working_directory / 'broken.py'}:2" in found.message


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model___target_": "torch.nn.Liner"}, "Liner"),
        ({"model___target_": "no_such_module.Model"}, "no_such_module"),
        ({"model___target_": "no dots"}, "the model cannot be built"),
        ({"model___target_": "torch.nn"}, "the model cannot be built"),
        ({"model__out_features": "many"}, "the model cannot be built"),
        ({"model__nonsense": 3}, "torch.nn.Linear takes no argument 'nonsense'"),
        ({"model__out_features": "???"}, "model.out_features has no value"),
        ({"model___target_": "builtins.dict"}, "makes a dict, not a torch.nn.Module"),
        ({"model___target_": "broken_model.Model", "model__in_features": 1}, "RuntimeError: no model today"),
    ],
)
def test_a_model_that_cannot_be_built_is_named(
    working_directory: Path, changes: dict[str, Any], message: str
) -> None:
    (working_directory / "broken_model.py").write_text(
        "def Model(**_):\n    raise RuntimeError('no model today')\n"
    )
    read = setup(**changes)
    with pytest.raises(PlanError) as caught:
        read.build_model()
    [found] = caught.value.diagnostics
    assert found.code == "model-build" and message in found.message and found.help
    assert "HYDRA_FULL_ERROR" not in found.message and "\n" not in found.message


@pytest.mark.parametrize(
    "path", ["torch.nn.functional.mse_los", "no_such_module.loss", "nodots", "torch.nn", "torch.pi"]
)
def test_a_loss_that_is_none_is_named(path: str) -> None:
    with pytest.raises(PlanError) as caught:
        setup(model__loss=path).loss()
    [found] = caught.value.diagnostics
    assert found.code == "model-build" and path in found.message and found.help


def test_how_tensors_are_redistributed_is_read_and_checked() -> None:
    assert setup().redistribute == "greedy"
    assert setup(parallel__redistribute="min-cost").redistribute == "min-cost"
    for wrong in ("min_cost", 3, None, ["greedy"]):
        with pytest.raises(PlanError) as caught:
            setup(parallel__redistribute=wrong)
        [found] = caught.value.diagnostics
        assert found.code == "unknown-value" and "greedy, min-cost" in (found.help or "")


def test_the_shipped_presets_and_plans_are_there() -> None:
    folder = config_folder()
    assert (folder / "train.yaml").is_file() and (folder / "plans" / "llama.yaml").is_file()
    base = OmegaConf.load(folder / "parallel" / "base.yaml")
    assert tuple(base) == PARALLEL_KEYS
    assert tuple(base.mesh) == MESH_KEYS


@pytest.mark.parametrize(
    ("written", "read"),
    [("010", 8), ("012", 10), ("0_12", 10), ("1:30", 90), ("12:30:45", 45045), ("+010", 8)],
)
def test_a_size_that_yaml_reads_as_another_number_is_refused(
    written: str, read: int, working_directory: Path
) -> None:
    (working_directory / "parallel").mkdir()
    (working_directory / "parallel" / "ours.yaml").write_text(f"defaults: [base]\nmesh: {{tp: {written}}}\n")
    with pytest.raises(PlanError) as caught:
        from_config(*compose_config(["parallel=ours"], str(working_directory)))
    [found] = [d for d in caught.value.diagnostics if d.code == "yaml-retyped"]
    assert found.message == f"YAML reads `{written}` as the number {read}"
    assert found.span is not None and (found.span.line, found.span.column) == (2, 12)


@pytest.mark.parametrize("written", ["8", "1_0", "0x8", "0b1000"])
def test_a_size_that_is_read_as_it_is_written_is_fine(written: str, working_directory: Path) -> None:
    (working_directory / "parallel").mkdir()
    (working_directory / "parallel" / "ours.yaml").write_text(f"defaults: [base]\nmesh: {{tp: {written}}}\n")
    assert from_config(*compose_config(["parallel=ours"], str(working_directory))).mesh.sizes["tp"] in (8, 10)


@pytest.mark.parametrize("share", [-0.1, 1.5, "a", True, [0.1]])
def test_a_share_is_a_number_from_0_to_1(share: Any) -> None:
    [found] = refused(parallel__max_unsharded=share)
    assert found.code == "wrong-type" and "parallel.max_unsharded is" in found.message


def test_a_share_is_handed_on() -> None:
    limit = setup(parallel__max_unsharded=0.02).max_unsharded
    assert limit is not None and limit.value == 0.02
    assert setup().max_unsharded is None


def test_a_model_config_without_a_plan_is_told_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "_target_: torch.nn.Identity\nloss: torch.sum\nbatch: {x: {shape: [batch]}}\n"
    )
    with pytest.raises(PlanError) as caught:
        from_config(*compose_config(["model=mine"], str(tmp_path)))
    [found] = caught.value.diagnostics
    assert (found.code, found.message) == ("plan-not-found", "the model config has no `plan`")
    assert found.span is not None and found.span.file.endswith("model/mine.yaml")
