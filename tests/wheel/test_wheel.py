"""What is in the wheel, and what its commands do outside of a checkout."""

from __future__ import annotations

import email
import json
import textwrap
import zipfile
from pathlib import Path

import pytest

from parallelizer.diagnostics.codes.all_codes import CODES
from tests.wheel.installed import ROOT, Installed

pytestmark = pytest.mark.slow  # it builds a wheel and installs it; `make test-wheel` runs it


def names(installed: Installed) -> set[str]:
    with zipfile.ZipFile(installed.wheel) as opened:
        return set(opened.namelist())


def test_it_carries_one_package_and_its_data(installed: Installed) -> None:
    found = names(installed)
    assert {name.split("/")[0] for name in found if ".dist-info/" not in name} == {"parallelizer"}
    assert "parallelizer/py.typed" in found
    for below, inside in (
        ("configs", "parallelizer/configs"),
        ("recipes", "parallelizer/training/recipes"),
        ("parallelizer", "parallelizer"),
    ):
        for path in (ROOT / below).rglob("*"):
            if path.suffix in (".py", ".yaml", ".css", ".js") and "__pycache__" not in path.parts:
                assert f"{inside}/{path.relative_to(ROOT / below).as_posix()}" in found
    assert {code.file for code in CODES.values()} <= found


def test_its_metadata_says_what_it_is(installed: Installed) -> None:
    [name] = [name for name in names(installed) if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(installed.wheel) as opened:
        said = email.message_from_bytes(opened.read(name))
    assert (said["Name"], said["License-Expression"]) == ("torch-parallelizer", "Apache-2.0")
    assert said["Requires-Python"] == ">=3.11"
    assert said["Summary"] and said["Description-Content-Type"] == "text/markdown"
    classifiers = said.get_all("Classifier", [])
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "Typing :: Typed" in classifiers
    urls = said.get_all("Project-URL", [])
    assert not [url for url in urls if "example" in url]


def test_commands_run_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    status, out = installed.run(
        "parallelizer", "plan", "model=llama3_8b", "parallel=fsdp8_tp8", "--json", cwd=tmp_path
    )
    assert status == 0, out
    document = json.loads(out)
    assert document["world_size"] == 64 and document["collectives"]
    assert all(
        rule["rule"]["file"].endswith("parallelizer/configs/plans/llama.yaml")
        for rule in document["applications"]
    )
    status, out = installed.run("parallelizer", "validate", "train.stepss=3", cwd=tmp_path)
    assert status == 1 and "did you mean steps?" in out and "Traceback" not in out
    status, out = installed.run("parallelizer", "explain", "heads-not-divisible", cwd=tmp_path)
    assert status == 0 and out.startswith("error[heads-not-divisible]: ") and "\nFix: " in out, out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_the_recipe_that_is_installed_runs_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text((ROOT / "LICENSE").read_text())
    words = ["data=text", "data.path=text.txt", "train.steps=1", "train.seq_len=64", "train.batch_size=2"]
    recipe = ("python", "-m", "parallelizer.training.recipes.train")
    status, out = installed.run(*recipe, *words, "device=cpu", "hydra.run.dir=a", cwd=tmp_path)
    assert status == 0 and "trained 1 step" in out, out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "text.txt"]


OWN = {
    "mine/net.py": """
        from torch import nn


        class Net(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.embed, self.up = nn.Embedding(64, width), nn.Linear(width, 4 * width)
                self.down = nn.Linear(4 * width, 64)

            def forward(self, input_ids):
                return self.down(self.up(self.embed(input_ids)).relu())
        """,
    "mine/__init__.py": "",
    "conf/model/net.yaml": """
        _target_: mine.net.Net
        width: 16
        plan: net
        batch:
          input_ids: {shape: [batch, sequence], range: [0, 64]}
          labels: {shape: [batch, sequence], range: [0, 64]}
        loss: parallelizer.losses.cross_entropy
        """,
    "conf/plans/net.yaml": """
        version: 1
        rules: {up: colwise, down: rowwise, "": fsdp}
        buffers: {batch: {input_ids: 1, labels: 1}}
        """,
    "conf/parallel/ours.yaml": "{defaults: [tp2], mesh: {dp_shard: 2}}\n",
    "conf/app.yaml": """
        defaults: [model: net, parallel: ours, optim: adamw, hardware: auto, _self_]
        hydra:
          searchpath: [pkg://parallelizer.configs]
          run: {dir: runs}
          output_subdir: null
        plan: ${model.plan}
        device: cpu
        train: {batch_size: 8, seq_len: 16, accumulate: 1, dtype: float32}
        """,
    "app.py": """
        import hydra
        import parallelizer as pz


        @hydra.main(version_base="1.3", config_path="conf", config_name="app")
        def main(config):
            setup = pz.from_config(config)
            program = setup.compile(setup.build_model())
            print(program.plan.file, setup.mesh, [a.module for a in program.applications])


        main()
        """,
}


def own_repository(folder: Path) -> Path:
    for name, text in OWN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text).lstrip())
    return folder


def test_ones_own_files_are_searched_first_and_ours_behind(installed: Installed, tmp_path: Path) -> None:
    here = own_repository(tmp_path)
    words = ["--config-dir", "conf", "model=net", "parallel=ours"]
    status, out = installed.run("parallelizer", "validate", "--no-proof", *words, cwd=here)
    assert (status, out) == (0, "conf/plans/net.yaml on dp_shard=2 x tp=2: valid\n")
    # `tp2`, which is ours, takes its mesh from one's own `base` now.
    (here / "conf/parallel/base.yaml").write_text("mesh: {tpp: 1}\n")
    status, out = installed.run("parallelizer", "validate", *words, cwd=here)
    assert status == 1 and "conf/parallel/base.yaml:1:8" in out


def test_an_own_hydra_application_finds_the_package_by_its_search_path(
    installed: Installed, tmp_path: Path
) -> None:
    here = own_repository(tmp_path)
    status, out = installed.run("python", "app.py", "parallel.mesh.tp=4", cwd=here)
    assert status == 0, out
    assert out.startswith("conf/plans/net.yaml dp_shard=2 x tp=4 [")


def test_another_hydra_application_on_the_machine_sees_nothing_of_us(
    installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text("a: 1\n")
    (tmp_path / "app.py").write_text(
        "import hydra\n\n\n"
        '@hydra.main(version_base="1.3", config_path="conf", config_name="app")\n'
        "def main(config):\n    print(config)\n\n\nmain()\n"
    )
    status, out = installed.run("python", "app.py", "--info", "all", cwd=tmp_path)
    assert status == 0, out
    # The environment's own folder is called after this test.
    assert "parallelizer" not in out.replace(str(tmp_path), "").replace(str(installed.python.parents[2]), "")
