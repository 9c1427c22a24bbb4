"""A process that has used CUDA starts its children anew, and they find the same; commands and the recipe do not use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.child import cuda_use
from parallelizer.child.children import WorldError, in_children
from parallelizer.child.in_time import Failed, NotInTime, in_time
from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.prove import prove
from parallelizer.runtime.launch import launcher as launch
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.testing import assert_equivalent
from tests.child.functions import divide, drawn, drawn_large_and_visible, kill_self, sleep, visible
from tests.proof.subjects import token_loss
from tests.recipes.runs import ROOT
from tests.simulate.setups import llama, traced


@pytest.fixture
def cuda_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that CUDA is initialised. A fork is an error."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process that uses CUDA was forked"))


@pytest.mark.parametrize("in_use", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_child_sees_no_gpu(in_use: bool, request: pytest.FixtureRequest) -> None:
    if in_use:
        request.getfixturevalue("cuda_in_use")
    before = dict(os.environ)
    (there,), timed = in_children([(visible,)]), in_time(visible, 60)
    assert len({there[0], timed[0], os.getpid()}) == 3
    assert there[1:] == timed[1:] == ("", 1)
    assert in_time(visible, 60, sees_gpus=True)[1] == before.get("CUDA_VISIBLE_DEVICES")
    assert dict(os.environ) == before


@pytest.mark.ranks
def test_ranks_on_cpus_see_no_gpu() -> None:
    assert [seen[1] for seen in launch.start(visible, ranks=2, device="cpu")] == ["", ""]


@pytest.mark.usefixtures("cuda_in_use")
def test_a_new_process_answers_as_a_forked_one_and_sees_no_gpu() -> None:
    torch.manual_seed(7)
    [(numbers, data, seen)] = in_children([(drawn_large_and_visible,)])
    assert numbers == drawn() and len(data) == 3_000_000
    assert seen[0] != os.getpid() and seen[1:] == ("", 1)
    with pytest.raises(Failed, match=r"^ZeroDivisionError: division by zero$"):
        in_time(divide, 60)


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_in_use")
def test_a_new_process_that_fails_is_told_as_a_forked_one() -> None:
    with pytest.raises(WorldError, match="ZeroDivisionError: division by zero"):
        in_children([(divide,)])
    with pytest.raises(WorldError, match="was killed by SIGKILL"):
        in_children([(kill_self,)])
    with pytest.raises(NotInTime):
        in_time(sleep, 0.5)


@pytest.mark.usefixtures("cuda_in_use")
def test_what_does_not_pickle_is_an_error_that_says_what_to_do() -> None:
    def local() -> None:
        pass

    for attempt in (lambda: in_children([(local,)]), lambda: in_time(local, 20)):
        with pytest.raises(PlanError) as caught:
            attempt()
        (found,) = caught.value.diagnostics
        assert found.code == "cuda-in-use"
        assert "local" in found.message
        assert found.help is not None and "top level of a module" in found.help
    with pytest.raises(LaunchError, match="top level of a module"):
        launch.start(local, ranks=2, device="cpu")


def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from parallelizer.child.children import in_children\n"
        "from parallelizer.diagnostics.diagnostic import PlanError\n"
        "torch.cuda.is_initialized = lambda: True\n"
        "try:\n"
        "    in_children([(int, '3')])\n"
        "except PlanError as error:\n"
        "    print(error.diagnostics[0].code, error.diagnostics[0].help)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout.startswith("cuda-in-use"), done.stderr
    assert '`if __name__ == "__main__":`' in done.stdout


def test_the_trace_and_the_findings_are_the_same(request: pytest.FixtureRequest) -> None:
    setup = llama("parallel=cp2_tp2")
    model = setup.build_model()
    program = setup.compile(model)
    forked = validated(setup, program, model, rank=1)
    assert forked.trace is not None
    request.getfixturevalue("cuda_in_use")
    anew = validated(setup, program, model, rank=1)
    assert (anew.found, anew.trace) == (forked.found, forked.trace)


@pytest.mark.ranks
def test_the_verdict_is_the_same(request: pytest.FixtureRequest) -> None:
    setup = llama("parallel=fsdp2_tp2")
    forked = prove(setup)
    request.getfixturevalue("cuda_in_use")
    anew = prove(setup)
    assert forked.passed and anew.passed
    assert (anew.losses, anew.verdict) == (forked.losses, forked.verdict)


def test_a_transformers_model_finds_its_attention_in_a_new_process(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("transformers")
    setup = from_overrides(["model=hf_llama", "parallel=tp2"])
    forked = traced(setup)
    request.getfixturevalue("cuda_in_use")
    assert traced(setup) == forked


@pytest.mark.ranks
@pytest.mark.slow
def test_a_transformers_model_is_validated_and_proven_in_new_processes(
    request: pytest.FixtureRequest,
) -> None:
    pytest.importorskip("transformers")
    setup = from_overrides(["model=hf_llama", "parallel=tp2"])
    forked = pz.validate(setup, prove=False)
    request.getfixturevalue("cuda_in_use")
    assert pz.validate(setup, prove=False) == forked
    assert prove(setup).passed


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(input_ids))


@pytest.mark.ranks
@pytest.mark.usefixtures("cuda_in_use")
def test_a_users_own_model_is_proven(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nrules:\n  output: {style: colwise, output: replicate}\n")
    ids = torch.arange(32).view(4, 8) % 16
    batch = {"input_ids": ids, "labels": ids}
    assert assert_equivalent(Two, plan, {"tp": 2}, loss=token_loss, batch=batch).passed


RECORDED = """
import os, sys, torch

asked = []

def ask():
    asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
    return False

def fork():
    print("asked before a fork:", sorted(set(map(str, asked))), file=sys.stderr)
    return real()

real, os.fork = os.fork, fork
torch.cuda.is_available = ask
"""


def recorded(text: str, tmp_path: Path) -> str:
    environment = {n: v for n, v in os.environ.items() if n != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    done = subprocess.run(
        [sys.executable, "-c", RECORDED + text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("asked before a fork")]
    assert lines
    return " ".join(lines)


SMALL = ["model.dim=32", "model.n_layers=1", "model.hidden_dim=64", "train.seq_len=16", "parallel=tp2"]
COMMAND = "from parallelizer.commands.main import main\nassert main({words}) == 0\n"
RECIPE = """
import sys
sys.argv = ["train", *{words}]
from recipes.train import train
from parallelizer import training
training.run(train)
"""


@pytest.mark.parametrize(
    "text",
    [
        COMMAND.format(words=["plan", "device=auto", *SMALL]),
        COMMAND.format(words=["validate", "device=auto", *SMALL]),
        RECIPE.format(words=["device=auto", "dry_run=true", *SMALL]),
    ],
    ids=["plan", "validate", "recipe"],
)
def test_commands_and_the_recipe_ask_by_nvml_before_they_fork(text: str, tmp_path: Path) -> None:
    assert "None" not in recorded(text, tmp_path)


def test_a_question_without_nvml_would_be_seen(tmp_path: Path) -> None:
    text = "torch.cuda.is_available()\nif not os.fork():\n    os._exit(0)\n"
    assert "None" in recorded(text, tmp_path)


@pytest.mark.parametrize("answer", [3, 0])
def test_the_driver_knows_whether_it_was_initialised(answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        cuDeviceGetCount: Callable[..., int] = staticmethod(lambda count: answer)

    monkeypatch.setattr(cuda_use.ctypes, "CDLL", lambda name, mode: Driver)
    assert cuda_use.must_not_fork() is (answer == 0)


def test_without_cuda_a_process_may_fork() -> None:
    assert not cuda_use.must_not_fork()
