"""A lock says what a plan comes to, survives being read back, and is never half written."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallelizer.commands.main import main
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Workload
from parallelizer.report import lock
from parallelizer.report.figures import Figures, FigureSubject, changes, figures
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.rank_classes import RankClass
from parallelizer.simulate.record.trace import Trace
from tests.findings import compiled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def model(layers: int = 4) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(layers)))


def entry(module: str, payload: int = 1024, kind: str = "all_gather", phase: str = "forward") -> Collective:
    return Collective(phase, kind, "tp", 2, payload, payload // 2, "float32", module, None, False)


PLAN = "version: 1\nrules:\n  '*.up': colwise\n  '*.down': rowwise\n"
LEDGER = (
    *(entry(f"{i}.{name}") for i in range(4) for name in ("up", "down")),
    entry("", 8, "all_reduce", "loss"),
)
USAGE = Usage(1000, "backward", "2.up", {"parameters": 600, "activations": 400, "gathered": 0})


def example(
    plan: str = PLAN, layers: int = 4, ledger: tuple[Collective, ...] = LEDGER, usage: Usage = USAGE
) -> Figures:
    built = model(layers)
    program = compiled(plan, lambda: built, Mesh({"tp": 2}))
    return figures(program, built, Trace(0, ledger, usage), Workload({}, 4, 16))


# --- what is in it ---------------------------------------------------------------------------------


def test_it_names_every_figure_once_and_folds_equal_layers() -> None:
    assert [line for line in lock.text(example()).splitlines() if not line.startswith("#")] == [
        "",
        "[plan]",
        "plan: name plan",
        "model: class Sequential, parameters 1024",
        "mesh: tp 2, ranks 2",
        "step: sequences 4, tokens 16, parts 1",
        "rank: number 0",
        "",
        "[parameters]",
        "{0..3}.up.weight: dtype float32, global 16x8, local 8x8, over tp=shard(0), bytes 256",
        "{0..3}.down.weight: dtype float32, global 8x16, local 8x8, over tp=shard(1), bytes 256",
        "",
        "[collectives]",
        "forward tp all_gather: calls 8, payload 8192, sent 4096",
        "loss tp all_reduce: calls 1, payload 8, sent 4",
        "",
        "[collectives by module]",
        "forward tp all_gather {0..3}.{up,down}: calls 1, payload 1024, dtype float32",
        "loss tp all_reduce (root): calls 1, payload 8, dtype float32",
        "",
        "[memory]",
        "parameters: bytes 600",
        "activations: bytes 400",
        "peak: bytes 1000, phase backward, module 2.up",
    ]


def test_ranks_that_differ_are_in_it_and_ranks_that_are_alike_are_not() -> None:
    classes = (RankClass(0, 1, 600, 1000), RankClass(1, 1, 500))
    built = model()
    program = compiled(PLAN, lambda: built, Mesh({"tp": 2}))
    of_two = Trace(0, LEDGER, USAGE, classes=classes)
    written = lock.text(figures(program, built, of_two, Workload({}, 4, 16)))
    assert written.splitlines()[-3:] == [
        "[rank classes]",
        "like rank 0: ranks 1, parameters 600, peak 1000",
        "like rank 1: ranks 1, parameters 500, peak untraced",
    ]
    of_one = dataclasses.replace(of_two, classes=classes[:1])
    assert lock.text(figures(program, built, of_one, Workload({}, 4, 16))) == lock.text(example())


def test_nothing_of_the_machine_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lock.text(example())
    monkeypatch.chdir(tmp_path)
    assert lock.text(example()) == before
    assert str(tmp_path) not in before and os.sep + "tmp" not in before


def test_one_more_layer_changes_few_lines() -> None:
    old, new = (set(lock.text(example(layers=n)).splitlines()) for n in (4, 5))
    assert {line.partition(":")[0] for line in old - new} == {
        "model",
        "{0..3}.up.weight",
        "{0..3}.down.weight",
    }


# --- written and read ---------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    lock.write_lock(tmp_path / "a.lock", example())
    assert lock.read_lock(tmp_path / "a.lock") == example()


segments = st.text(string.ascii_letters + string.digits + "_*[]{}-,: ", min_size=1, max_size=8)
paths = st.lists(segments, min_size=1, max_size=4).map(".".join)
values = st.sampled_from(["float32", "12", "8x8", "dp_shard=shard(0) tp=replicate"])


@given(
    st.dictionaries(
        paths, st.dictionaries(st.sampled_from(["bytes", "local"]), values, min_size=1), max_size=8
    )
)
def test_any_module_names_survive(section: dict[str, dict[str, str]]) -> None:
    written = {"parameters": {FigureSubject("", path): fields for path, fields in section.items()}}
    assert lock._parse(lock.text(written).splitlines(), "a.lock") == written


def test_writing_keeps_the_mode_and_follows_the_umask(tmp_path: Path) -> None:
    file = tmp_path / "a.lock"
    lock.write_lock(file, example())
    (tmp_path / "plain").write_text("")
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    file.chmod(0o640)
    lock.write_lock(file, example())
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.parametrize("step", ["replace", "chmod"])
def test_a_lock_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    file = tmp_path / "a.lock"
    file.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, step, full)
    with pytest.raises(PlanError, match="No space left"):
        lock.write_lock(file, example())
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["a.lock"]


@pytest.mark.parametrize("where", ["missing/a.lock", "file/a.lock"])
def test_a_folder_that_is_none_gives_one_diagnostic(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError) as raised:
        lock.write_lock(tmp_path / where, example())
    assert [d.code for d in raised.value.diagnostics] == ["lock-not-written"]


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, "lock-not-found", "there is no such file"),
        (b"", "lock-unreadable", "is no lock"),
        (b"version: 1\nrules: {}\n", "lock-unreadable", "is no lock"),
        (b"\xff\xfe\x00", "lock-unreadable", "is no lock"),
        (b"# parallelizer lock 7\n[plan]\n", "lock-unreadable", "another version"),
        (b"# parallelizer lock 1\nplan: name llama\n", "lock-unreadable", "this line"),
        (b"# parallelizer lock 1\n[plan]\nplan\n", "lock-unreadable", "this line"),
        (b"# parallelizer lock 1\n[plan]\nplan: name\n", "lock-unreadable", "this line"),
        (b"# parallelizer lock 1\n[parameters]\nlayers.{0..: bytes 1\n", "lock-unreadable", "this line"),
        (b"# parallelizer lock 1\n[parameters]\n{0..999999999}: bytes 1\n", "lock-unreadable", "this line"),
    ],
)
def test_a_file_that_is_no_lock_gives_one_diagnostic(
    tmp_path: Path, content: bytes | None, code: str, message: str
) -> None:
    file = tmp_path / "a.lock"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PlanError) as raised:
        lock.read_lock(file)
    [found] = raised.value.diagnostics
    assert found.code == code and message in found.message and found.help


def test_a_folder_is_no_lock(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as raised:
        lock.read_lock(tmp_path)
    assert [d.code for d in raised.value.diagnostics] == ["lock-unreadable"]


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.lock"
    with file.open("wb") as stream:
        stream.write(b"# parallelizer lock 1\n")
        stream.truncate(1 << 34)  # sparse
    with pytest.raises(PlanError) as raised:
        lock.read_lock(file)
    assert [d.code for d in raised.value.diagnostics] == ["lock-unreadable"]


# --- compared -----------------------------------------------------------------------------------------


def test_equal_figures_differ_in_nothing() -> None:
    assert lock.differences(example(), example()) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (
            lambda: example(plan=PLAN.replace("'*.down'", "'{0,1,3}.down'")),
            [
                "parameters: 2.down.weight: local 8x16, locked 8x8; over tp=replicate, locked tp=shard(1); bytes 512, locked 256"
            ],
        ),
        (
            lambda: example(ledger=(*LEDGER, entry("3.up", 4096))),
            [
                "collectives: forward tp all_gather: calls 9, locked 8; payload 12,288, locked 8,192; sent 6,144, locked 4,096",
                "collectives by module: forward tp all_gather 3.up: calls 2, locked 1; payload 5,120, locked 1,024",
            ],
        ),
        (
            lambda: example(ledger=LEDGER[:-1]),
            [
                "collectives: loss tp all_reduce: gone (calls 1, payload 8, sent 4)",
                "collectives by module: loss tp all_reduce (root): gone (calls 1, payload 8, dtype float32)",
            ],
        ),
        (
            lambda: example(
                usage=Usage(
                    1100, "backward", "2.up", {"parameters": 600, "activations": 400, "gathered": 100}
                )
            ),
            ["memory: peak: bytes 1,100, locked 1,000", "memory: gathered: new (bytes 100)"],
        ),
        (
            lambda: example(layers=5),
            [
                "plan: model: parameters 1,280, locked 1,024",
                "parameters: 4.up.weight: new (dtype float32, global 16x8, local 8x8, over tp=shard(0), bytes 256)",
                "parameters: 4.down.weight: new (dtype float32, global 8x16, local 8x8, over tp=shard(1), bytes 256)",
            ],
        ),
    ],
    ids=["one layer sharded otherwise", "a collective more", "a collective less", "memory", "a layer more"],
)
def test_differences_are_said_in_words(now: Any, words: list[str]) -> None:
    assert lock.differences(example(), now()) == words


def test_the_same_change_of_many_layers_is_one_line() -> None:
    other = example(ledger=tuple(dataclasses.replace(e, payload_bytes=9) for e in LEDGER))
    found = [c for c in changes(example(), other) if c.section == "collectives by module"]
    assert [(c.subjects, c.number) for c in found] == [
        (("forward tp all_gather {0..3}.{up,down}",), 8),
        (("loss tp all_reduce (root)",), 1),
    ]


def test_the_report_says_that_torch_was_another(tmp_path: Path) -> None:
    file = tmp_path / "a.lock"
    lock.write_lock(file, example())
    assert "torch" not in lock.report(file, ["x"])
    file.write_text(file.read_text().replace("# torch ", "# torch 0."))
    assert "locked with torch 0." in lock.report(file, ["x"])
    assert lock.read_lock(file) == example()


# --- the command ------------------------------------------------------------------------------------------

SMALL = ["model.dim=64", "model.n_layers=1", "model.hidden_dim=64", "train.seq_len=32", "train.batch_size=4"]


def test_a_plan_is_as_locked_until_it_changes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "a.lock")
    assert main(["plan", "parallel=tp2", *SMALL, "--lock", file]) == 0
    assert capfd.readouterr().out == f"{file}: written\n"
    assert main(["plan", "parallel=tp2", *SMALL, "--locked", file]) == 0
    assert capfd.readouterr().out == f"as locked in {file}\n"
    assert main(["plan", "parallel=tp2", *SMALL, "plan=llama_tp", "--locked", file, "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert "plan: plan: name llama_tp, locked llama" in document["differences"]
    assert main(["plan", "parallel=tp2", *SMALL, "plan=llama_tp", "--locked", file]) == 1
    out = capfd.readouterr().out
    assert out.startswith(f"not as locked in {file}:\n") and "collectives: forward tp all_reduce: new" in out


def test_a_missing_lock_is_one_error_and_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "parallel=single", *SMALL, "--locked", str(tmp_path / "a.lock")]) == 1
    captured = capfd.readouterr()
    assert (
        captured.out == "" and captured.err.count("error[") == 1 and "error[lock-not-found]" in captured.err
    )
