"""docs/experts.md is followed as it is written; and the loss of the whole batch, which it says is refused, is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.recipes.runs import ROOT, typed

TEXT = (ROOT / "docs/experts.md").read_text()
FILES: dict[str, str] = {}
for name, text in re.findall(r"```(?:python|yaml)\n# (\S+\.(?:py|yaml))[^\n]*\n(.*?)```", TEXT, re.S):
    FILES[name] = FILES.get(name, "") + text
COMMANDS = re.findall(r"^\$ python -m parallelizer (.*)$", TEXT, re.M)

OF_THE_BATCH = """

def of_the_batch(output, batch):
    labels = batch["labels"]
    count = (labels != -100).sum()
    probabilities = output["scores"].softmax(-1)
    experts = probabilities.shape[-1]
    chosen = F.one_hot(output["scores"].topk(2, -1).indices, experts).sum(-2).to(probabilities.dtype)
    balance = experts * (chosen.mean((1, 2)) * probabilities.mean((1, 2))).sum(-1).mean()
    return pz.cross_entropy(output["logits"], labels) + 1e-2 * balance * count, count
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + OF_THE_BATCH * name.endswith(".py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_page_has_all_of_it() -> None:
    assert {name for name in FILES if name.endswith(".py")} == {"my_moe.py", "listed_moe.py"}
    assert len(FILES) == 6 and len(COMMANDS) == 8
    assert all(line.startswith("verify ") for line in COMMANDS)


@pytest.mark.ranks
@pytest.mark.parametrize("line", [COMMANDS[2], COMMANDS[5]])
def test_its_plans_are_valid(here: Path, line: str) -> None:
    done = typed(
        *shlex.split(line.replace("verify", "validate")), cwd=here, module="parallelizer", timeout=120
    )
    assert done.status == 0, done.out + done.err


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_what_is_proven(here: Path, line: str) -> None:
    if "hf_" in line:
        pytest.importorskip("transformers", reason="the optional extra `hf`")
    done = typed(*shlex.split(line), cwd=here, module="parallelizer", timeout=300)
    assert done.status == 0, done.out + done.err
    assert "proven: the sharded run equals the unsharded one" in done.out


@pytest.mark.ranks
def test_validate_warns_of_the_loss_of_the_whole_batch(here: Path) -> None:
    line = "plan --config-dir mine model=my_moe parallel=fsdp2 model.loss=my_moe."
    done = typed(*shlex.split(line + "of_the_batch"), cwd=here, module="parallelizer", timeout=120)
    assert "warning[local-statistics]" in done.out + done.err
    assert "balance = experts * (chosen.mean" in done.out + done.err


@pytest.mark.ranks
@pytest.mark.slow
def test_the_loss_of_the_whole_batch_is_refused(here: Path) -> None:
    line = "verify --config-dir mine model=my_moe parallel=fsdp2 model.loss=my_moe.of_the_batch"
    done = typed(*shlex.split(line), cwd=here, module="parallelizer", timeout=300)
    assert done.status == 1 and "error[not-equal]" in done.out + done.err
