"""Notes on exceptions in planned modules: on which, what they say, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.language.styles import STYLES
from parallelizer.runtime.exception_notes import (
    PlannedModule,
    add_notes,
    noted_backward,
    noted_loss,
    planned_module,
    raised_by_torch,
)
from parallelizer.runtime.launch import launcher as launch
from parallelizer.styles.compiled_forward import compile_forward, mark_compiled
from parallelizer.styles.registry import FUNCTIONS
from parallelizer.styles.target import Target
from tests.findings import compiled, mesh_of


class Twice(torch.autograd.Function):
    """The identity, with a backward that cannot multiply its shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient @ gradient


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.mode = ""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        if self.mode == "forward":
            h = torch.cat([h, h], -1)
        if self.mode == "own":
            raise ValueError("six is too many")
        if self.mode == "backward":
            h = Twice.apply(h)
        out: Tensor = self.b(h)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.free = Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.free(self.inner(x))
        return out


RULES = "rules:\n  inner.a: colwise\n  inner.b: rowwise\n  inner: {style: prepare-input, input: {x: shard(1) -> replicate}}\n"


def noted(mode: str = "") -> Model:
    """A model of which a plan speaks, whole as it is: only the notes are put on."""
    model = Model()
    model.inner.mode = mode
    add_notes(compiled(RULES, Model, mesh_of(tp=2)), model)
    return model


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_the_innermost_planned_module_is_named_with_rule_and_layouts() -> None:
    with pytest.raises(RuntimeError) as caught:
        noted("forward")(torch.ones(3, 4))
    [note] = notes(caught.value)
    lines = note.split("\n")
    assert lines[0] == "in inner.b, on tp=2"
    assert (
        "plan.yaml:3: `inner.b: rowwise` expects input: shard(-1); output: partial -> replicate, summed over tp"
        in lines[1]
    )
    assert "weight: shard(1) on tp" in lines[1]
    assert lines[2:] == ["  received input: a plain tensor 3x12, float32"]
    planned = planned_module(caught.value)
    assert planned is not None and planned.is_laid_out and raised_by_torch(caught.value)


def test_a_hook_before_the_forward_counts_as_the_module() -> None:
    model = noted()
    model.inner.register_forward_pre_hook(lambda module, args: (args[0] @ args[0],))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 4))
    assert notes(caught.value)[0].startswith("in inner, on tp=2\n")
    assert "received x: a plain tensor 3x4, float32" in notes(caught.value)[0]


def test_an_exception_elsewhere_has_no_note() -> None:
    model = noted()
    model.free = nn.Linear(5, 5)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 4))
    assert notes(caught.value) == [] and planned_module(caught.value) is None


def test_what_somebody_is_handling_meanwhile_is_left_alone() -> None:
    try:
        raise KeyError("earlier")
    except KeyError as earlier:
        noted()(torch.ones(3, 4))
        assert notes(earlier) == []


def test_backward() -> None:
    out = noted("backward")(torch.ones(3, 4, requires_grad=True))
    with pytest.raises(RuntimeError) as caught, noted_backward():
        out.sum().backward()
    [note] = notes(caught.value)
    assert note.startswith("in backward, at the border of inner.b, on tp=2\n")
    assert note.endswith("  received gradient: a plain tensor 3x6, float32")
    assert raised_by_torch(caught.value)


def test_the_codes_own_exceptions_are_told_from_torchs() -> None:
    with pytest.raises(ValueError, match="six") as caught:
        noted("own")(torch.ones(3, 4))
    assert notes(caught.value)[0].startswith("in inner, ") and not raised_by_torch(caught.value)
    for failing in (lambda: torch.ones(2) @ torch.ones(3), lambda: nn.Linear(2, 2)(torch.ones(3))):
        with pytest.raises(RuntimeError) as caught_too:
            failing()
        assert raised_by_torch(caught_too.value)
    with pytest.raises(RuntimeError) as own:
        raise RuntimeError("no operation of torch's")
    assert not raised_by_torch(own.value)
    try:
        raise torch.OutOfMemoryError("not the plan's fault")
    except torch.OutOfMemoryError as error:
        assert not raised_by_torch(error)


def test_compiled_whole_and_with_the_same_values() -> None:
    torch.manual_seed(0)
    model, x = noted(), torch.ones(3, 4)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))


def test_a_compiled_module_has_one_note_for_what_is_inside_it() -> None:
    rules = RULES.replace("inner: {style", "inner: [{style").replace(
        "replicate}}", "replicate}}, {style: compile, backend: eager}]"
    )
    model = Model()
    model.inner.mode = "forward"
    program = compiled(rules, Model, mesh_of(tp=2))
    compile_forward(model.inner, backend="eager")
    mark_compiled(model.inner)
    add_notes(program, model)
    assert not model.inner.b._forward_hooks
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 4))
    note = next(note for note in notes(caught.value) if note.startswith("in "))
    lines = note.split("\n")
    assert lines[0] == "in inner, on tp=2"
    at = lines.index("  inside it, compiled with it:")
    assert "plan.yaml:2: `inner.a: colwise` expects input: replicate" in lines[at + 1]
    assert "plan.yaml:3: `inner.b: rowwise` expects input: shard(-1)" in lines[at + 2]
    assert lines[at + 3 :] == ["  received x: a plain tensor 3x4, float32"]
    planned = planned_module(caught.value)
    assert planned is not None and planned.is_laid_out


# --- on ranks --------------------------------------------------------------------------------------


class Doubles(ParallelStyle):
    """Hands a module its input twice over."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (torch.cat([args[0], args[0]], -1),), prepend=True)
        return module


class Breaks(ParallelStyle):
    """Puts a backward behind a module that cannot multiply its shapes."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module.register_forward_hook(lambda _, args, output: Twice.apply(output))
        return module


def run(rule: str) -> None:
    program = compiled(f"rules:\n  inner.a: colwise\n  inner.b: {rule}\n", Model, Mesh({"tp": 2}))
    mesh = pz.build_mesh(program.mesh, "cpu")
    model = pz.apply(program, Model(), mesh)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return output.sum(), torch.tensor(1.0)

    pz.train_step(model, {"x": torch.ones(3, 4)}, loss, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("style", "where", "received"),
    [
        (
            "doubles",
            "in inner.b, on tp=2",
            "received input: a DTensor 3x12, float32, shard(1) on tp, here 3x6",
        ),
        (
            "breaks",
            "in backward, at the border of inner.b, on tp=2",
            "received gradient: a plain tensor 3x4, float32",
        ),
    ],
)
def test_a_launch_shows_the_note_and_puts_the_traceback_into_the_log(
    style: str, where: str, received: str, tmp_path: Path
) -> None:
    before = dict(STYLES), dict(FUNCTIONS)
    try:

        @pz.style("doubles", slot="io")
        def doubles(target: Target) -> ParallelStyle:
            return Doubles()

        @pz.style("breaks", slot="io")
        def breaks(target: Target) -> ParallelStyle:
            return Breaks()

        with pytest.raises(launch.LaunchError) as caught:
            launch.start(run, (f"[rowwise, {style}]",), ranks=2, device="cpu", log_dir=tmp_path)
    finally:
        for registry, kept in zip((STYLES, FUNCTIONS), before, strict=True):
            registry.clear()
            registry.update(kept)
    message = str(caught.value)
    assert "Traceback" not in message
    assert where in message and received in message and f"`inner.b: {style}`" in message
    assert "plan.yaml:3: `inner.b: rowwise` expects input: shard(-1)" in message
    logs = [path for path in tmp_path.glob("rank*.log") if "Traceback" in path.read_text()]
    assert logs and any(f"its traceback: {log}" in message for log in logs)


@pytest.mark.parametrize(
    ("text", "noted"),
    [("shapes cannot be multiplied", True), ("Connection closed by peer [127.0.0.1]:1", False)],
)
def test_that_another_rank_has_ended_is_nobodys_doing_here(
    text: str, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallelizer.runtime.exception_notes._lies", lambda tensor: "a DTensor")
    monkeypatch.setattr("parallelizer.runtime.exception_notes.DTensor", torch.Tensor)
    with pytest.raises(RuntimeError) as caught, noted_loss(torch.zeros(1)):
        raise RuntimeError(text)
    assert bool(getattr(caught.value, "__notes__", [])) == noted
    error = RuntimeError(text)
    PlannedModule("inner", (), "tp=2")._add(error, [])
    assert bool(getattr(error, "__notes__", [])) == noted
