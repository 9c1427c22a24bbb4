"""What `parallelizer new` writes, where it refuses, and that nothing is left of what it could not finish."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallelizer.commands.new.create import create
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.diagnostics.package_folder import config_folder

ROOT = Path(__file__).resolve().parents[3]


def files(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_the_recipe_is_copied_as_it_is(tmp_path: Path) -> None:
    names = create(tmp_path / "mine")
    written = files(tmp_path / "mine")
    assert sorted(written) == names
    recipe = {p.relative_to(ROOT).as_posix(): p.read_text() for p in (ROOT / "recipes").rglob("*.py")}
    assert {name: text for name, text in written.items() if name.startswith("recipes/")} == recipe


def test_it_is_little_to_read(tmp_path: Path) -> None:
    create(tmp_path)
    written = files(tmp_path)
    assert len(written) <= 8
    assert sum(len(text.splitlines()) for text in written.values()) <= 400


def test_the_root_configuration_is_the_shipped_one_with_the_copys_model(tmp_path: Path) -> None:
    create(tmp_path)
    ours = (config_folder() / "train.yaml").read_text().splitlines()
    theirs = (tmp_path / "conf" / "train.yaml").read_text().splitlines()
    differing = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert differing == [("  - model: llama_debug", "  - model: my_gpt")]


def test_the_copy_compiles_from_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    setup = from_config(*compose_config(["parallel=fsdp2_cp2_tp2"], "conf"))
    assert setup.plan.file == "conf/plans/my_gpt.yaml"
    assert setup.compile(setup.build_model()).diagnostics == ()


def test_the_model_is_the_one_that_the_page_about_own_models_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your_own_model.md").read_text()
    shown = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page, re.S))
    create(tmp_path)
    assert (tmp_path / "my_gpt.py").read_text().endswith(shown["my_gpt.py"])
    assert (tmp_path / "conf/model/my_gpt.yaml").read_text() == shown["mine/model/my_gpt.yaml"]


def test_the_plan_is_the_one_that_init_proposes(tmp_path: Path) -> None:
    """tests/docs/test_your_own_model.py runs `init` for the page."""
    page = (ROOT / "docs" / "your_own_model.md").read_text()
    [proposed] = re.findall(r"```yaml\n# mine/plans/my_gpt.yaml\n(.*?)```", page, re.S)
    create(tmp_path)
    assert (tmp_path / "conf/plans/my_gpt.yaml").read_text() == proposed


def test_a_folder_with_other_files_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "other.yaml").write_text("a: 1\n")
    create(tmp_path)
    assert (tmp_path / "conf" / "other.yaml").read_text() == "a: 1\n"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine\n")
    with pytest.raises(PlanError) as raised:
        create(tmp_path)
    [found] = raised.value.diagnostics
    assert found.code == "file-unwritable" and "README.md" in found.message
    assert files(tmp_path) == {"README.md": "mine\n"}


def test_every_name_that_collides_is_told(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    for name in ("README.md", "my_gpt.py", "recipes/train.py"):
        (tmp_path / name).write_text("mine\n")
    with pytest.raises(PlanError) as raised:
        create(tmp_path)
    told = [found.message for found in raised.value.diagnostics]
    assert told == [
        f"{tmp_path / name} exists already" for name in ("README.md", "my_gpt.py", "recipes/train.py")
    ]


def test_nothing_is_left_of_what_cannot_be_finished(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "recipes").write_text("a file where a folder is wanted\n")
    with pytest.raises(PlanError) as raised:
        create(tmp_path / "deep")
    assert raised.value.diagnostics[0].code == "file-unwritable"
    assert files(tmp_path) == {"deep/recipes": "a file where a folder is wanted\n"}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["recipes"]
