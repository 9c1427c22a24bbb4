"""`validate --quick`: what it finds without a model, and that it needs no torch for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelizer.commands.main import main
from tests.recipes.runs import ROOT, command

Captured = pytest.CaptureFixture[str]

WRONG = "rules:\n  layers.*: fdsp\n  norm: {style: sequence, layout: straem}\nlayouts: {stream: shard(1)}\n"

IMAGES = [
    "model=hf",
    "model.config={model_type: vit}",
    "model.auto=AutoModelForImageClassification",
    "plan=llama",
]
"""A model whose batch is derived from the model itself, by every command that builds it."""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["configs/plans/llama_tp.yaml"], 0),
        (["plan=./configs/plans/llama_tp.yaml", "parallel=tp8_cp2"], 0),
        (["--json", "parallel=fsdp8_tp8"], 0),
        (["tests/plans/bad/styles.yaml"], 1),
        (["plan=./tests/plans/bad/styles.yaml"], 1),
        (["parallel=tp22"], 1),
        (IMAGES, 0),
        (["parallel=[tp2"], 2),
    ],
)
def test_no_torch_is_loaded(arguments: list[str], status: int) -> None:
    code = (
        "import sys; from parallelizer.commands.main import main; "
        f"status = main(['validate', '--quick', *{arguments!r}]); "
        "print(status, sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'transformers'}))"
    )
    ended = command("-c", code, cwd=ROOT)
    assert ended.out.splitlines()[-1] == f"{status} []", ended


def test_plan_files_need_no_hydra() -> None:
    code = (
        "import sys; from parallelizer.commands.main import main; main(['validate', '--quick', 'configs/plans/llama.yaml']); "
        "print({'hydra', 'omegaconf'} & set(sys.modules))"
    )
    assert command("-c", code, cwd=ROOT).out == "configs/plans/llama.yaml: well formed\nset()\n"


def test_a_plan_and_a_preset_are_read_and_no_model_is_built(capsys: Captured) -> None:
    # This model cannot be built, and this sequence cannot be divided: both need the model to be found.
    assert (
        main(
            ["validate", "--no-proof", "--quick", "parallel=tp8_cp2", "model.n_heads=7", "train.seq_len=255"]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert printed.out.endswith("llama.yaml on cp=2 x tp=8: well formed (no model was built)\n")
    assert printed.err == ""
    assert main(["validate", "--no-proof", "parallel=tp8_cp2", "model.n_heads=7"]) == 1


def test_every_file_s_mistakes_come_in_one_run(tmp_path: Path, capsys: Captured) -> None:
    first, second, good = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"
    first.write_text(WRONG)
    second.write_text("rules:\n  norm: {style: sequence, layout: straem}\n  layers.*: fsdp\n")
    good.write_text("extends: llama\n")
    assert main(["validate", "--no-proof", "--quick", "--json", str(first), str(second), str(good)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["valid"] is False
    assert [
        (Path(d["span"]["file"]).name, d["span"]["line"], d["code"]) for d in document["diagnostics"]
    ] == [
        ("a.yaml", 2, "unknown-style"),
        ("b.yaml", 2, "unknown-layout"),
    ]


def test_several_files_are_counted(tmp_path: Path, capsys: Captured) -> None:
    wrong, good, fine = tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"
    wrong.write_text(WRONG)
    good.write_text("extends: llama\n")
    fine.write_text("extends: llama\n")
    assert main(["validate", "--no-proof", "--quick", str(wrong), str(good), str(fine)]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f"{good}: well formed", f"{fine}: well formed", "3 plan files: 2 well formed, 1 wrong",
    ]  # fmt: skip
    assert printed.err.endswith("1 error\n")
    assert main(["validate", "--no-proof", "--quick", str(good), str(fine)]) == 0
    assert capsys.readouterr().out.endswith("2 plan files: 2 well formed\n")
    assert main(["validate", "--no-proof", "--quick", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: well formed\n"


@pytest.mark.parametrize("overrides", [[], ["parallel=tp2"]])
def test_a_layout_that_is_not_there(overrides: list[str], tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "mine.yaml"
    plan.write_text("extends: llama\nrules:\n  norm: {style: sequence, layout: straem}\n")
    named = [f"plan={plan}", *overrides] if overrides else [str(plan)]
    assert main(["validate", "--no-proof", "--quick", "--json", *named]) == 1
    [found] = json.loads(capsys.readouterr().out)["diagnostics"]
    assert found["code"] == "unknown-layout" and "did you mean stream?" in found["help"]
    assert (found["span"]["line"], found["span"]["column"], found["span"]["end_column"]) == (3, 35, 41)


def test_a_layout_of_the_preset_is_there(tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "mine.yaml"
    plan.write_text("extends: llama\nrules:\n  norm: {style: sequence, layout: other}\n")
    assert (
        main(["validate", "--no-proof", "--quick", f"plan={plan}", "++parallel.layouts.other=replicate"]) == 0
    )
    assert main(["validate", "--no-proof", "--quick", f"plan={plan}"]) == 1
    assert "unknown-layout" in capsys.readouterr().err


def test_a_plan_is_looked_up_behind_one_s_own_folder(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "ours.yaml").write_text("extends: llama\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: ours\n")
    assert main(["validate", "--no-proof", "--quick", "--config-dir", str(tmp_path), str(mine)]) == 0
    assert main(["validate", "--no-proof", "--quick", str(mine)]) == 1
    assert "there is no plan named 'ours'" in capsys.readouterr().err


@pytest.mark.parametrize("others", [["parallel=tp2"], ["parallel=tp2", "train.seq_len=8"]])
def test_plan_files_and_overrides_do_not_stand_together(others: list[str], capsys: Captured) -> None:
    assert main(["validate", "--no-proof", "--quick", "configs/plans/llama.yaml", *others]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "write plan=configs/plans/llama.yaml" in printed.err
