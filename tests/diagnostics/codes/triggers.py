"""What no file can trigger, triggered in another way: by code, a function that reports it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.child import new_process
from parallelizer.commands import plan, rehearse, verify
from parallelizer.commands.explain import codes
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.origins import Origins
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import Mesh
from parallelizer.language.yaml_nodes import read_file
from parallelizer.optim import build_optimizer
from parallelizer.proof import certificate as certificates
from parallelizer.proof.compare import ProofVerdict
from parallelizer.proof.divergence import Divergence
from parallelizer.proof.not_equal import not_equal
from parallelizer.proof.proof import Proof
from parallelizer.proof.prove import check_ranks
from parallelizer.propose.from_transformers.proposal import inexpressible
from parallelizer.propose.from_transformers.tp_plan import TpPlanEntry, read_tp_plan
from parallelizer.propose.from_transformers.translate import translate
from parallelizer.propose.search.aims import pursue
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.nothing import nothing
from parallelizer.propose.search.task import read_task
from parallelizer.propose.search.within import read_within
from parallelizer.report import lock
from parallelizer.report.diff import check_rank
from parallelizer.report.explanation import explain
from parallelizer.report.export.export import export
from parallelizer.report.html import page as html
from parallelizer.runtime.guards import agreement, drift, nonfinite
from parallelizer.runtime.initialize import materialize
from parallelizer.runtime.launch import outside
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.state import ParallelState, refuse_added_parameters, remember
from parallelizer.runtime.taken_step import Step
from parallelizer.simulate.time.machine import machine_of
from parallelizer.training.data.choose_tokenizer import tokenizer_of
from parallelizer.training.data.corpus import build_data
from parallelizer.training.data.files import check_unchanged, read_document
from parallelizer.training.data.position import DataPosition, check_same_data
from parallelizer.training.data.text import load
from parallelizer.training.data.tokenizer import BYTES
from parallelizer.training.data.windows import window_count
from parallelizer.training.job.prepare import prepare
from parallelizer.training.sampling.prepare import tokens_of
from parallelizer.training.trackers import TRACKERS, failed, missing
from parallelizer.training.watch.first_step import StepComparison
from tests.findings import findings
from tests.runtime.checkpoint.broken import report as broken_checkpoint

Found = Iterable[Diagnostic]


def raised(call: Callable[[], Any]) -> Found:
    """The findings of the PlanError that a call raises."""
    try:
        call()
    except PlanError as error:
        return error.diagnostics
    return ()


def verified(error: Exception) -> Found:
    """What `verify` says when its proof ends with an error."""
    arguments = argparse.Namespace(
        matrix=False, full_mesh=False, seed=0, force=False, dtype="float64", json=True, write=None
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.object(verify, "read_setup", side_effect=error):
        verify.run(arguments)
    found = json.loads(printed.getvalue())["diagnostics"]
    return [Diagnostic(d["code"], d["message"], None, d["help"], d["severity"]) for d in found]


def unequal() -> Found:
    """A proof that has failed."""
    where = Divergence("layers.0", "backward", "tp", None, "the gradient of layers.0 differs")
    return [not_equal(Proof("llama", Mesh({"tp": 2}), "float64", ProofVerdict((), 0.0), (1.0, 1.0), where))]


def exported() -> Found:
    """A program with a style that torch does not have."""

    class Mine(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return module

    setup = from_config(*compose_config(("parallel=tp2",)))
    model = setup.build_model()
    program = setup.compile(model)
    own = [dataclasses.replace(program.of_slot("params")[0], act=Mine())]
    return raised(lambda: export(dataclasses.replace(program, applications=tuple(own)), model))


def exported_stages() -> Found:
    setup = from_config(*compose_config(("parallel=pp2_cp2",)))
    model = setup.build_model()
    program = setup.compile(model)
    return raised(lambda: export(program, model))


def not_locked() -> Found:
    arguments = argparse.Namespace(lock="plan.lock", locked=None)
    return raised(lambda: plan._lock(arguments, None, None, None, None))  # type: ignore[arg-type]


def optimizer() -> Found:
    config = {"lr": -1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "fused": False}
    return raised(lambda: build_optimizer(nn.Linear(1, 1), config))


def weights(code: str, here: Path) -> Found:
    """What is said of a folder of weights that is broken for it."""
    from tests.hugging_face import broken  # which skips the test where transformers is not installed

    return broken.report(code, here)


def added() -> Found:
    """A parallel model that is remembered with fewer parameters than it has."""
    program: Any = SimpleNamespace(mesh=Mesh({"dp_shard": 2}))
    nothing: Any = None
    model = nn.Linear(1, 1)
    remember(model, ParallelState(program, nothing, {}, nothing, (), frozenset({"weight"})))
    return raised(lambda: refuse_added_parameters(model))


def uninitialised() -> Found:
    """What is said of a parameter that neither a method nor a constructor fills."""
    with torch.device("meta"):
        model = nn.ParameterList([torch.empty(2)])
    return raised(lambda: materialize(model, device="cpu", seed=0))


def machine_without_bandwidth() -> Found:
    """What is assumed of hardware that has a rate for products and no other."""
    machine = machine_of({"name": "X", "bf16_tflops": 100})
    return machine.assumed[:1] if machine is not None else ()


def unsayable() -> Found:
    """What is said of a `tp_plan` with a string that is new."""
    entry = TpPlanEntry("linear", "colwise_from_tomorrow", ("linear",), ("linear.weight",))
    _, failed = translate(nn.ModuleDict({"linear": nn.Linear(2, 2)}), [entry])
    return inexpressible(failed)


def overwritten(file: Path) -> Found:
    """What is said of a text that gets shorter under a run."""
    file.write_text("a text")
    record = read_document(file).file
    file.write_text("a")
    return raised(lambda: check_unchanged([record]))


def not_finite() -> Found:
    """What is said of a step in which no token counts."""
    nan = torch.tensor(torch.nan)
    return [nonfinite.nonfinite(3, Step(nan, nan), [nonfinite.Nonfinite(0, "batch", "", "NaN")])]


def apart() -> Found:
    """What is said of a rank that is a step ahead."""
    found = agreement.out_of_step(agreement.Verdict(out_of_step=(1,), steps=(3, 4, 3), positions=(0, 0, 0)))
    return [found] if found else []


def drifted() -> Found:
    """What is said of a parameter that two ranks hold otherwise."""
    return [drift.ranks_drifted(100, [drift.Drift("norm.weight", "", (0, 1), (0, 1), 0.5)])]


def lacking_torchao(folder: Path) -> Found:
    """A plan with float8 where torchao is not installed."""
    with mock.patch("importlib.util.find_spec", lambda name: None):
        return findings("rules: {inner: float8}", lambda: nn.ModuleDict({"inner": nn.Linear(16, 16)}))


def lacking_tracker(folder: Path) -> Found:
    """A tracker whose package nobody has."""
    before = dict(TRACKERS)
    TRACKERS["nobody-has-it"] = type("Lacking", (), {"package": "nobody-has-it"})
    try:
        return missing(["nobody-has-it"], None)
    finally:
        TRACKERS.clear()
        TRACKERS.update(before)


def unwritable_certificate(here: Path) -> None:
    (here / "file").write_text("")
    proven = certificates.Certificate({}, "plan", "model", {}, {}, 0.1, "a", (1.0, 1.0), "2026-01-01")
    certificates.write(proven, here / "file")


def normed() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(8, 8))


TRIGGERS: dict[str, Callable[[Path], Found]] = {
    "not-as-planned": lambda folder: StepComparison(1, (), (), (3 << 30, 1 << 30)).findings(),
    "tracker-failed": lambda folder: [failed("wandb", OSError("no space left on device"))],
    "tracker-missing": lacking_tracker,
    "precision-torchao": lacking_torchao,
    "checkpoint-damaged": lambda here: broken_checkpoint("checkpoint-damaged", here),
    "checkpoint-dtype": lambda here: broken_checkpoint("checkpoint-dtype", here),
    "checkpoint-exists": lambda here: broken_checkpoint("checkpoint-exists", here),
    "checkpoint-in-use": lambda here: broken_checkpoint("checkpoint-in-use", here),
    "checkpoint-mismatch": lambda here: broken_checkpoint("checkpoint-mismatch", here),
    "checkpoint-not-found": lambda here: broken_checkpoint("checkpoint-not-found", here),
    "checkpoint-optimizer": lambda here: broken_checkpoint("checkpoint-optimizer", here),
    "checkpoint-unwritable": lambda here: broken_checkpoint("checkpoint-unwritable", here),
    "computed-tensor": lambda folder: findings('rules: {"": fsdp}', normed),
    "config-not-found": lambda here: raised(lambda: compose_config((), config_name="trian")),
    "data-changed": lambda here: overwritten(here / "text.txt"),
    "data-mismatch": lambda here: raised(
        lambda: prepare(*compose_config(["model=vit_tiny", "data=images", "data.size=64"]), here)
    ),
    "data-not-found": lambda here: raised(lambda: load(path=str(here / "nowhere.txt"), heldout=0.1)),
    "data-too-short": lambda here: raised(lambda: window_count(torch.zeros(8), 8)),
    "data-unreadable": lambda here: raised(lambda: build_data(OmegaConf.create({"_target_": "os.getcwd"}))),
    "export-pipeline": lambda here: exported_stages(),
    "export-style": lambda here: exported(),
    "file-unreadable": lambda here: raised(lambda: read_file(str(here), "plan.yaml")),
    "file-unwritable": lambda here: raised(lambda: html.save(b"", here / "nowhere" / "plan.html")),
    "lock-incomplete": lambda here: not_locked(),
    "lock-not-found": lambda here: raised(lambda: lock.read_lock(here / "nowhere.lock")),
    "lock-not-written": lambda here: raised(lambda: lock.write_lock(here / "nowhere" / "plan.lock", {})),
    "lock-unreadable": lambda here: raised(lambda: lock.read_lock(__file__)),
    "no-tp-plan": lambda here: raised(lambda: read_tp_plan(nn.Linear(2, 2))),
    "no-initializer": lambda here: uninitialised(),
    "nonfinite": lambda here: not_finite(),
    "not-equal": lambda here: unequal(),
    "not-proven": lambda here: [certificates.missing(certificates.Found({}))],
    "certificate-not-written": lambda here: raised(lambda: unwritable_certificate(here)),
    "optim-invalid": lambda here: optimizer(),
    "out-of-step": lambda here: apart(),
    "parameters-added": lambda here: added(),
    "prompt-invalid": lambda here: raised(lambda: tokens_of("longer", BYTES, 256, 4)),
    "cuda-in-use": lambda here: raised(lambda: new_process.pickled(lambda: None, "a loss")),
    "one-gpu-seen": lambda here: [outside._alone(8)],
    "rank-failed": lambda here: verified(LaunchError("rank 1 failed")),
    "too-many-ranks": lambda here: raised(lambda: check_ranks(Mesh({"dp_shard": 65}))),
    "ranks-drifted": lambda here: drifted(),
    "rehearsal-failed": lambda here: [rehearse._failed("torch.OutOfMemoryError: CUDA out of memory", 0)],
    "resume-data": lambda here: check_same_data(
        DataPosition(0, 0, 8, ""), DataPosition(0, 1, 8, ""), Origins()
    ),
    "search-gpus": lambda here: raised(lambda: read_task(["hardware=h100"])),
    "search-price": lambda here: raised(
        lambda: pursue("cost", [read_task(["gpus=8", "hardware=h100"])], lambda _: None)
    ),
    "search-hardware": lambda here: raised(lambda: read_task(["gpus=8"])),
    "search-nothing": lambda here: [nothing(SearchResult(), read_task(["gpus=8", "hardware=h100"]))],
    "search-preset": lambda here: raised(lambda: read_task(["gpus=8", "hardware=h100", "parallel=tp2"])),
    "search-within": lambda here: raised(lambda: read_within(["mesh.pt=1..8"])),
    "time-assumed": lambda here: machine_without_bandwidth(),
    "tokenizer-unreadable": lambda here: raised(lambda: tokenizer_of(str(here / "nowhere"))),
    "tp-plan-string": lambda here: unsayable(),
    "unknown-code": lambda here: [codes.unknown("unmached-glob")],
    "unknown-path": lambda here: raised(
        lambda: explain(from_config(*compose_config(())), "layers.0.atention.wq", 0)
    ),
    "unknown-rank": lambda here: raised(lambda: check_rank(4, Mesh({"tp": 4}))),
    "weights-conversion": lambda here: weights("weights-conversion", here),
    "weights-dtype": lambda here: weights("weights-dtype", here),
    "weights-missing": lambda here: weights("weights-missing", here),
    "weights-not-found": lambda here: weights("weights-not-found", here),
    "weights-shape": lambda here: weights("weights-shape", here),
    "weights-unexpected": lambda here: weights("weights-unexpected", here),
    "weights-unreadable": lambda here: weights("weights-unreadable", here),
    "weights-untied": lambda here: weights("weights-untied", here),
    "weights-unwritable": lambda here: weights("weights-unwritable", here),
}
