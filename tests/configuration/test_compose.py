"""Hydra's composition as the recipe has it, and the command line's exit codes for what cannot be composed."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from parallelizer.commands import main as cli
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.override_mistakes import OverrideSyntaxError
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.plan import REPLICATE, shard


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def mesh(config: Any) -> dict[str, int]:
    return {axis: size for axis, size in config.parallel.mesh.items() if size > 1}


def test_the_shipped_configuration_is_composed_without_hydras_part() -> None:
    config, origins = compose_config(["parallel=tp8_cp2", "train.steps=3"])
    assert mesh(config) == {"cp": 2, "tp": 8} and config.train.steps == 3
    assert "hydra" not in config
    assert origins.overrides == ["parallel=tp8_cp2", "train.steps=3"]
    assert origins.folders == [config_folder()]


def test_a_users_folder_is_searched_before_the_shipped_one(here: Path) -> None:
    folder = "my conf, [really]=1"
    files = {
        "parallel/tp2.yaml": "defaults: [base]\nmesh: {tp: 64}\n",
        "parallel/mine.yaml": "defaults: [tp2]\nmesh: {cp: 4}\n",
        "plans/llama_tp.yaml": "rules: {x: fsdp}\n",
        "plans/mine.yaml": "extends: llama\nlayouts: {stream: replicate}\n",
    }
    write(here / folder, files)
    assert mesh(compose_config(["parallel=tp2"], folder)[0]) == {"tp": 64}
    config, origins = compose_config(["parallel=mine", "plan=mine"], folder)
    assert mesh(config) == {"cp": 4, "tp": 64}
    assert origins.folders == [here / folder, config_folder()]
    plan = from_config(config, origins).plan
    assert len(plan.rules) > 5 and plan.layouts == {"stream": REPLICATE}
    config, origins = compose_config(["plan=llama_tp"], folder)
    assert from_config(config, origins).plan.file == f"{folder}/plans/llama_tp.yaml"
    assert plan.file == f"{folder}/plans/mine.yaml"


def test_an_own_root_that_names_the_package_is_composed(here: Path) -> None:
    root = "defaults: [parallel: mine, _self_]\nhydra: {searchpath: [pkg://parallelizer.configs]}\n"
    write(here, {"conf/own.yaml": root, "conf/parallel/mine.yaml": "defaults: [tp2]\nmesh: {cp: 4}\n"})
    config, origins = compose_config([], "conf", "own")
    assert mesh(config) == {"cp": 4, "tp": 2}
    assert origins.folders == [here / "conf", config_folder(), config_folder()]


def test_another_search_path_is_added_to_the_users_folder(here: Path) -> None:
    write(here, {"one/parallel/a.yaml": "mesh: {tp: 3}\n", "two/parallel/b.yaml": "mesh: {tp: 5}\n"})
    also = f"hydra.searchpath=[file://{here / 'two'}]"
    assert mesh(compose_config([also, "parallel=a"], "one")[0]) == {"tp": 3}
    config, origins = compose_config([also, "parallel=b"], "one")
    assert mesh(config) == {"tp": 5}
    assert origins.folders == [here / "one", config_folder(), here / "two"]


def test_a_users_folder_is_forgotten_afterwards(here: Path) -> None:
    write(here, {"one/parallel/a.yaml": "mesh: {tp: 3}\n"})
    compose_config(["parallel=a"], "one")
    with pytest.raises(PlanError):
        compose_config(["parallel=a"])


def test_a_root_configuration_of_ones_own_is_named(here: Path) -> None:
    write(
        here, {"c/mine.yaml": "defaults: [train, {override parallel: tp4}, _self_]\ntrain: {seq_len: 64}\n"}
    )
    config, _ = compose_config([], "c", "mine")
    assert mesh(config) == {"tp": 4} and config.train.seq_len == 64


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("++parallel.layouts.stream=replicate", "layouts", {"stream": REPLICATE}),
        ("++parallel.layouts.stream='shard(0)'", "layouts", {"stream": shard(0)}),
        ('++parallel.layouts.stream="shard(0)"', "layouts", {"stream": shard(0)}),
        ("++parallel.layouts={stream: replicate, other: partial}", "layouts", None),
    ],
)
def test_layouts_are_set_on_the_command_line(override: str, key: str, value: Any) -> None:
    plan = from_config(*compose_config([override])).plan
    assert plan.layouts["stream"] == (value or {"stream": REPLICATE})["stream"]


def test_styles_are_set_and_switched_off_on_the_command_line() -> None:
    read = from_config(
        *compose_config(["++parallel.styles.fsdp.reshard_after_forward=false", "train.dtype=bfloat16"])
    )
    options = {name: option.value for name, option in read.defaults["fsdp"].options.items()}
    assert options == {"param_dtype": "bfloat16", "reduce_dtype": "float32", "reshard_after_forward": False}
    for override in ("++parallel.styles.fsdp=null", "parallel.styles.fsdp=null"):
        assert from_config(*compose_config([override])).defaults["fsdp"].off


@pytest.mark.parametrize(
    ("override", "rules"),
    [
        (
            'rules=["layers.*.attention.w[qkv]: {style: rowwise, output: shard(1)}"]',
            ["layers.*.attention.w[qkv]"],
        ),
        ('rules=["a: fsdp", "b.{c,d}: [fsdp, checkpoint]"]', ["a", "b.{c,d}"]),
        ("rules=['\"\": fsdp', '\"*.x\": fsdp']", ["", "*.x"]),
        ("rules=[layers.*: checkpoint]", ["layers.*"]),
        ("rules=[{layers.*: checkpoint}]", ["layers.*"]),
        ("+rules=['a: fsdp']", ["a"]),
        ("rules=[]", []),
        ("rules=null", []),
        ("parallel.rules=['a: fsdp']", ["a"]),
    ],
)
def test_rules_are_added_on_the_command_line(override: str, rules: list[str]) -> None:
    shipped = 12
    plan = from_config(*compose_config([override])).plan
    assert [rule.key for rule in plan.rules[shipped:]] == rules


def test_presets_and_plans_are_chosen_apart(here: Path) -> None:
    write(here, {"mine.yaml": "extends: llama_tp\nrules: {norm: none}\n"})
    read = from_config(*compose_config(["parallel=tp2", "plan=./mine.yaml", "parallel.mesh.cp=2"]))
    assert read.plan.file == "./mine.yaml" and read.plan.layouts == {"stream": REPLICATE}
    assert {axis: n for axis, n in read.mesh.sizes.items() if n > 1} == {"cp": 2, "tp": 2}
    assert from_config(*compose_config(["plan=llama_tp"])).plan.name == "llama_tp"


def test_the_mesh_knows_where_its_sizes_were_set() -> None:
    read = from_config(*compose_config(["parallel=tp2", "parallel.mesh.cp=2"]))
    assert Path(read.mesh.spans["tp"].file).name == "tp2.yaml"
    assert read.mesh.spans["cp"].file == "<override parallel.mesh.cp=2>"
    assert Path(read.mesh.spans["ep"].file).name == "base.yaml"


def test_an_error_of_the_command_line_can_be_copied_and_sent() -> None:
    with pytest.raises(OverrideSyntaxError) as caught:
        compose_config(["a"])
    for twin in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert twin.diagnostic == caught.value.diagnostic
    assert str(caught.value).startswith("<override a>:1:1: error[override-syntax]: 'a' is not an override")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("mine.yaml", "plan=mine.yaml"),
        ("./my plan.yml", "'plan=./my plan.yml'"),
        ("plans/mine", "plan=plans/mine"),
    ],
)
def test_a_plan_file_by_itself_is_told_how_to_be_checked(word: str, meant: str) -> None:
    with pytest.raises(OverrideSyntaxError) as caught:
        compose_config(["parallel=tp2", word])
    help_text = caught.value.diagnostic.help or ""
    assert f"with a model, write {meant} " in help_text and "validate --quick" in help_text


@pytest.mark.parametrize("command", ["validate", "plan"])
@pytest.mark.parametrize(
    ("overrides", "status", "said"),
    [
        (["parallel.mesh.tp=abc"], 1, "error[wrong-type]: the size of tp is 'abc'"),
        (["parallel=tp9"], 1, "error[unknown-preset]: there is no parallel 'tp9'"),
        (["plan=lama"], 1, "error[plan-not-found]: there is no plan named 'lama'"),
        (["++parallel.layouts.stream=shard(1)"], 2, "\"++parallel.layouts.stream='shard(1)'\""),
        (["rules=[a.w[qk]: fsdp]"], 2, "'rules=[\"a.w[qk]: fsdp\"]'"),
    ],
)
def test_the_exit_status_tells_a_wrong_configuration_from_a_wrong_command_line(
    capsys: pytest.CaptureFixture[str], command: str, overrides: list[str], status: int, said: str
) -> None:
    assert cli.main([command, *overrides]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err
    assert "Traceback" not in captured.err and "\x1b" not in captured.err


def test_json_is_the_only_thing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--json", "rules=['a: fdsp']", "plan=lama"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["valid"] is False and captured.err == ""
    assert {found["code"] for found in document["diagnostics"]} == {"unknown-style", "plan-not-found"}
    [style] = [found for found in document["diagnostics"] if found["code"] == "unknown-style"]
    text = style["span"]["file"].removeprefix("<override ").removesuffix(">")
    assert text[style["span"]["column"] - 1 : style["span"]["end_column"] - 1] == "fdsp"
    assert cli.main(["validate", "--json", "a"]) == 2
    assert capsys.readouterr().out == ""


def test_the_composed_configuration_is_unresolved() -> None:
    config, _ = compose_config([])
    assert OmegaConf.to_container(config, resolve=False)["plan"] == "${model.plan}"  # type: ignore[call-overload,index]
