"""A model that fake tensors do not get through: one diagnostic, and all else that the commands print."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from parallelizer.commands.main import main
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.plan import Buffer
from parallelizer.simulate.follow.flow import StepFailure
from parallelizer.simulate.places import Places
from parallelizer.simulate.trace_failed import fails_without_the_plan
from tests.recipes.runs import ROOT, command
from tests.simulate import failing as models
from tests.simulate.setups import FAILING, failing, traced

Captured = pytest.CaptureFixture[str]
VALUES = "reads values"
KERNEL = "torch.library.register_fake"
OTHER = "on real tensors"

# kind: the module and the operator as the message says them, the error, the help, what is underlined
CASES = {
    "item": ("layers.0 at aten._local_scalar_dense.default", "DataDependentOutputException", VALUES, "y.sum().item()"),
    "branch": ("layers.0 at aten._local_scalar_dense.default", "DataDependentOutputException", VALUES, "y.sum() > 0"),
    "nonzero": ("layers.0 at aten.nonzero.default", "DynamicOutputShapeException", VALUES, "y.nonzero()"),
    "kernel": ("layers.0 at failing.double.default", "RuntimeError: There was no fake impl", KERNEL, "double(y)"),
    "backward": ("layers.1 in backward at aten._local_scalar_dense.default", "DataDependent", VALUES, "grad.sum().item()"),
    "shapes": ("layers.0 at aten.mm.default", "RuntimeError: a and b must have same", OTHER, "y @ torch.ones(3, 5)"),
    "numpy": ("layers.0 after aten.detach.default", "RuntimeError: .numpy()", OTHER, "y.detach().numpy()"),
    "raises": ("layers.0 after aten.", r"KeyError: 'nobody\nis here'", OTHER, r'raise KeyError("nobody\nis here")'),
}  # fmt: skip


def refused(kind: str, *overrides: str, fold: bool = False) -> Diagnostic:
    with pytest.raises(PlanError) as caught:
        traced(failing(kind, "parallel=fsdp2", *overrides), fold=fold)
    [found] = caught.value.diagnostics
    assert found.code == "trace-failed" and found.severity == "warning"
    return found


def underlined(found: Diagnostic) -> str:
    assert found.span is not None
    line = Path(found.span.file).read_text().splitlines()[found.span.line - 1]
    return line[found.span.column - 1 : found.span.end_column - 1]


@pytest.mark.parametrize("kind", CASES)
def test_it_names_the_module_the_operator_and_the_expression(kind: str, capfd: Captured) -> None:
    found = refused(kind)
    where, error, help_text, expression = CASES[kind]
    assert f"fake tensors: {where}" in found.message and error in found.message
    assert found.help and help_text in found.help
    assert found.span is not None and Path(found.span.file).name == "failing.py"
    assert underlined(found) == expression
    [related] = found.related
    assert related.span.line == 3 and related.label == f"the rule of {where.split()[0]}"
    printed = capfd.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err and "Error" not in printed.err


def test_of_folded_layers_it_names_the_one_in_the_whole_model() -> None:
    assert "fake tensors: layers.0 at" in refused("item", "model.depth=9", fold=True).message
    found = refused("backward", "model.depth=9", fold=True)
    assert "fake tensors: layers.8 in backward at" in found.message
    assert found.related[0].label == "the rule of layers.8"


def test_a_loss_that_reads_a_value_is_named_as_the_loss() -> None:
    found = refused("fine", "model.loss=tests.simulate.failing.asking_loss")
    assert "the loss at aten._local_scalar_dense.default" in found.message
    assert found.span is not None and found.related == ()
    source, first = inspect.getsourcelines(models.asking_loss)
    assert "total.item()" in source[found.span.line - first]


def test_a_model_that_ends_the_program_ends_the_dry_run_alone() -> None:
    found = refused("exits")
    assert "SystemExit: 0" in found.message and underlined(found) == "raise SystemExit(0)"


@pytest.mark.parametrize(
    ("kind", "ending"), [("dies", "ended with status 0"), ("killed", "was killed by SIGKILL")]
)
def test_a_process_that_is_gone_is_told_of_too(kind: str, ending: str) -> None:
    found = refused(kind)
    assert "broke off" in found.message and ending in found.message


def test_an_optimizer_that_cannot_be_made_is_an_error_of_the_configuration() -> None:
    with pytest.raises(PlanError) as caught:
        traced(failing("fine", "optim._target_=tests.simulate.failing.no_optimizer"))
    [found] = caught.value.diagnostics
    assert (found.code, found.severity) == ("optim-invalid", "error")
    assert "no_optimizer makes no optimizer: TypeError: there is none" in found.message


def test_plan_prints_all_but_the_step_and_ends_well(capfd: Captured) -> None:
    assert main(["plan", *FAILING, "parallel=fsdp2", "model.kind=item"]) == 0
    failed = capfd.readouterr()
    assert main(["plan", *FAILING, "parallel=fsdp2", "model.kind=fine"]) == 0
    fine = capfd.readouterr()
    shown, _, why = failed.out.partition("collectives, memory and time are not known: ")
    assert fine.out.startswith(shown) and len(fine.out) > len(failed.out)
    assert why.startswith("the step cannot run on fake tensors: ")
    for part in (
        "mesh  2 ranks: dp_shard=2",
        "parameters of rank 0",
        "modules",
        "layers.{0,1}.linear.weight",
    ):
        assert part in failed.out
    assert "collectives of one step" in fine.out
    assert "of one step" not in failed.out
    lines = failed.err.splitlines()
    assert lines[0].startswith("warning[trace-failed]: ") and lines[-1] == "1 warning"
    assert "Traceback" not in failed.err
    assert "printed by the model" in fine.err and "printed by the model" not in fine.out


def test_the_command_shows_the_diagnostic_alone_where_torch_logs_a_traceback() -> None:
    # In a process of its own: torch's handler holds the stderr that was there when torch was imported.
    ended = command("-m", "parallelizer", "plan", *FAILING, "parallel=fsdp2", "model.kind=shapes", cwd=ROOT)
    lines = ended.err.splitlines()
    assert ended.status == 1 and re.match(r"error\[model-failed\]: the model does not run", lines[0])
    assert lines[-1] == "1 error" and len(lines) < 15


def document(capfd: Captured, *arguments: str) -> dict[str, Any]:
    main(["plan", "--json", *FAILING, "parallel=fsdp2", *arguments])
    return json.loads(capfd.readouterr().out)


def test_the_document_has_all_but_the_step(capfd: Captured) -> None:
    failed, fine = document(capfd, "model.kind=kernel"), document(capfd, "model.kind=fine")
    assert set(fine) == set(failed)
    same = ("world_size", "mesh", "device", "rank", "applications", "parameters")
    assert {k: failed[k] for k in same} == {k: fine[k] for k in same}
    assert [d["code"] for d in failed["diagnostics"]] == ["trace-failed"]
    assert fine["ledger"] and not failed["ledger"] and not failed["collectives"]


def test_a_lock_of_it_is_refused(capfd: Captured, tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert main(["plan", *FAILING, "parallel=fsdp2", "model.kind=item", "--lock", str(file)]) == 1
    printed = capfd.readouterr()
    assert "trace-failed" in printed.err and "error[lock-incomplete]" in printed.err
    assert not file.exists()


def test_a_model_that_fails_with_entries_of_the_plan_is_not_said_to_fail_without_it() -> None:
    failure = StepFailure(
        "layers.0", "forward", "aten.mul.Tensor", "RuntimeError", "sizes differ", anywhere=True
    )
    made = (Buffer("index", Span("plan.yaml", 9, 12), make="positions"),)
    found = fails_without_the_plan(failure, Places(made=made))
    assert found.code == "model-failed"
    assert "with the entries that the plan adds to its batch" in found.message
    assert [(r.span.line, r.label) for r in found.related] == [(9, "index: int64 [rows, tokens]")]
    assert "with or without the plan" in fails_without_the_plan(failure, Places()).message
