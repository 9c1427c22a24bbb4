"""`python -m benchmarks.proofs`: its exit status and what it prints where there is no table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.proofs import matrix
from benchmarks.proofs.__main__ import main
from benchmarks.proofs.cells import Cell, Row


@pytest.fixture
def one_cell(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Row, str, bool]]:
    """The matrix of one model on one preset, whose proof is not run; the cells that were asked for."""
    asked: list[tuple[Row, str, bool]] = []

    def proven(row: Row, preset: str, full_mesh: bool = False, known: object = None) -> Cell:
        asked.append((row, preset, full_mesh))
        return Cell(row, preset, row.model == "right", 0.25, "tp=2", "the loss is off")

    monkeypatch.setattr(matrix, "columns", lambda full_mesh=False: ["tp2"])
    monkeypatch.setattr(matrix, "rows", lambda: [Row("right", "llama")])
    monkeypatch.setattr(matrix, "prove_cell", proven)
    return asked


@pytest.mark.parametrize("full_mesh", [False, True])
def test_the_table_is_printed_and_written(
    full_mesh: bool, one_cell: list[tuple[Row, str, bool]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, marker = tmp_path / "page.md", "full-matrix" if full_mesh else "matrix"
    page.write_text(f"before\n<!-- {marker}:begin -->\n<!-- {marker}:end -->\nafter\n")
    assert main([*(["--full-mesh"] if full_mesh else []), "--write", str(page)]) == 0
    out, err = capfd.readouterr()
    assert "0 proofs: 1 of 1 cells are proven" in out and "| right, llama | 0.25 |" in out
    assert err == "[1/1] right, llama on tp2: 0.25\n"
    assert one_cell == [(Row("right", "llama"), "tp2", full_mesh)]
    assert out.strip() in page.read_text() and page.read_text().endswith("\nafter\n")


def test_a_cell_that_is_not_proven_exits_with_1(
    one_cell: list[tuple[Row, str, bool]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "rows", lambda: [Row("right", "llama"), Row("wrong", "llama")])
    assert main(["llama", "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert not document["passed"]
    assert [(c["model"], c["passed"], c["mesh"]) for c in document["cells"]] == [
        ("right", True, "tp=2"),
        ("wrong", False, "tp=2"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lama"], "invalid choice: 'lama'"),
        (["families", "--full-mesh"], "families takes no --full-mesh"),
        (["llama", "parallel=tp2"], "unrecognized arguments: parallel=tp2"),
    ],
)
def test_a_table_that_there_is_not_exits_with_2(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and said in capfd.readouterr().err


@pytest.mark.parametrize("which", ["llama", "families"])
@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("# A page", "has no place")])
def test_a_page_without_a_place_for_the_table_is_told_before_the_proofs(
    which: str, text: str | None, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    if text:
        page.write_text(text)
    assert main([which, "--write", str(page)]) == 1
    out, err = capfd.readouterr()
    assert out == "" and "error[file-unwritable]" in err and words in " ".join(err.split())
    assert main([which, "--write", str(page), "--json"]) == 1
    [found] = json.loads(capfd.readouterr().out)["diagnostics"]
    assert found["code"] == "file-unwritable"
