"""Whose fault it is that a step does not run: the model's, which is an error, or that of tensors without values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.language.load import load_plan
from parallelizer.language.workload import Entry, Workload
from parallelizer.losses import cross_entropy
from parallelizer.simulate.fake_world import raises_anywhere
from tests.simulate.setups import failing

PLAN = "version: 1\nrules: {output: {style: colwise, output: replicate}}\n"


@pytest.mark.parametrize("preset", ["fsdp2", "tp2"])  # on data axes alone no step is followed
def test_a_model_that_does_not_run_by_itself_is_an_error_at_its_line(preset: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    plan = (f"plan={tmp_path / 'plan.yaml'}",) if preset == "tp2" else ()
    found = pz.validate(failing("shapes", f"parallel={preset}", *plan))
    [error] = [one for one in found if one.severity != "note"]
    assert (error.code, error.severity) == ("model-failed", "error")
    assert (
        "the model does not run, with or without the plan: forward of layers.0 fails at aten.mm"
        in error.message
    )
    assert error.span is not None and Path(error.span.file).name == "failing.py"
    assert [(r.span.file, r.label) for r in error.related] == [
        ("<override model.kind=shapes>", "this is set here")
    ]


def test_a_mistake_of_python_is_told_without_an_operator() -> None:
    [error] = [one for one in pz.validate(failing("raises", "parallel=fsdp2")) if one.severity != "note"]
    assert error.code == "model-failed" and "layers.0 fails: KeyError: " in error.message


@pytest.mark.parametrize("kind", ["kernel", "exits"])
def test_what_fake_tensors_cannot_do_is_no_mistake(kind: str) -> None:
    found = pz.validate(failing(kind, "parallel=fsdp2"))
    assert [(d.code, d.severity) for d in found if d.severity != "note"] == [("trace-failed", "warning")]


@pytest.mark.parametrize("kind", ["item", "numpy"])  # a branch on a sum over the batch, and a factor of one
def test_a_sum_over_the_batch_is_an_error_where_ranks_have_rows_of_their_own(kind: str) -> None:
    found = pz.validate(failing(kind, "parallel=fsdp2"))
    warning, error = (one for one in found if one.severity != "note")
    assert (warning.code, error.code) == ("trace-failed", "not-equal")
    assert error.span is not None and warning.span is not None
    assert (error.span.file, error.span.line) == (warning.span.file, warning.span.line)


class Counted(nn.Module):
    """A model whose forward wants its layers to be as many as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.output = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        assert len(self.layers) == 8
        for layer in self.layers:
            x = layer(x)
        return self.output(x if x.sum() > 0 else -x)


def test_a_model_that_counts_its_layers_is_not_taken_for_one_that_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    entries = {name: Entry(("batch", "sequence"), "int64", (0, 32)) for name in ("input_ids", "labels")}
    workload = Workload(entries, batch_size=2, seq_len=4, accumulate=1)
    with torch.device("meta"):
        model = Counted()
    plan = load_plan(tmp_path / "plan.yaml")
    found = pz.validate(model, plan, {"tp": 2}, workload=workload, loss=cross_entropy)
    assert "model-failed" not in {one.code for one in found}


def raised_by(code: str) -> BaseException:
    with pytest.raises(Exception) as caught:
        exec(code)
    return caught.value


@pytest.mark.parametrize(
    ("code", "anywhere"),
    [
        ("1 / 0", True),
        ("{}['there']", True),
        ("raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')", True),
        ("raise RuntimeError('Cannot access data pointer of Tensor, size 3')", False),
        ("raise AssertionError('it wants a GPU')", False),
        ("raise NotImplementedError('Could not run op')", False),
        ("raise RuntimeError('out of luck')", False),
        ("raise OSError('no such file')", False),
    ],
)
def test_errors_of_shapes_and_of_python_are_raised_anywhere(code: str, anywhere: bool) -> None:
    assert raises_anywhere(raised_by(code)) is anywhere
