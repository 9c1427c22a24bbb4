"""Runs of equal layers: which layers are equal, and what a model is of which all but a few are taken out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parallelizer.compiler.observe.equal_layers import SHORT, Run, longest_run, runs_of, shorten, shorten_runs
from parallelizer.styles.application import Program
from tests.simulate.setups import stack


def compiled(*overrides: str) -> tuple[Program, nn.Module]:
    setup = stack(*overrides)
    model = setup.build_model()
    return setup.compile(model), model


def test_what_counts_layers_is_no_difference_but_any_other_attribute_is() -> None:
    program, model = compiled("parallel=fsdp2", "model.depths=[10]")
    assert [layer.index for layer in model.stacks[0]] == list(range(10))
    assert longest_run(program, model) == Run("stacks.0", 0, 10)
    model.stacks[0][9].index = 12
    assert longest_run(program, model) == Run("stacks.0", 0, 1 + 8) or longest_run(program, model) is None
    model.stacks[0][9].index = 9
    for value in (1.5, [1, 2], {"a": torch.float16}, object()):
        model.stacks[0][0].of_ones_own = value
        assert longest_run(program, model) == Run("stacks.0", 1, 9)
    del model.stacks[0][0].of_ones_own
    model.stacks[0][9].up.weight.requires_grad_(False)
    assert longest_run(program, model) == Run("stacks.0", 0, 9)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 3), st.integers(5, 12), st.integers(0, 3), st.sampled_from([SHORT, SHORT + 1]))
def test_a_shortened_model_keeps_the_ends(before: int, count: int, behind: int, keep: int) -> None:
    program, model = compiled("parallel.mesh.tp=2", f"model.depths=[{before + count + behind},2]")
    run = Run("stacks.0", before, count)
    layers = list(model.stacks[0])
    shorter = shorten(program, model, run, keep)
    kept = [*range(before + keep - 1), before + count - 1, *range(before + count, before + count + behind)]
    assert list(model.stacks[0]) == [layers[i] for i in kept]
    assert len(model.stacks[1]) == 2
    # The rules of the layers that are left, at their new places, and all else as it was.
    new = {f"stacks.0.{old}": f"stacks.0.{i}" for i, old in enumerate(kept)}
    expected = []
    for a in program:
        head, tail = a.module.split(".")[:3], a.module.split(".")[3:]
        layer = ".".join(head)
        if layer.startswith("stacks.0.") and layer not in new:
            continue
        expected.append((".".join([new.get(layer, layer), *tail]), a.slot, a.style, a.rule))
    assert [(a.module, a.slot, a.style, a.rule) for a in shorter] == expected
    names = {n for n, _ in model.named_parameters()}
    prefixed = {f"{a.module}.{n}".lstrip(".") for a in shorter.of_slot("fsdp") for n in a.params}
    assert prefixed <= names


@given(
    st.sampled_from(["", "a", "a.b"]),
    st.integers(0, 30),
    st.integers(1, 200),
    st.integers(0, 300),
    st.text("xy.", max_size=4),
)
def test_a_path_is_taken_apart_and_put_together(
    container: str, first: int, count: int, index: int, rest: str
) -> None:
    run = Run(container, first, count)
    tail = rest.strip(".").replace("..", ".")
    path = ".".join(part for part in (container, str(index), tail) if part)
    content, layer = run.split(path)
    assert run.join(content, layer) == path
    assert layer == (index - first if first <= index < first + count else None)
    for other in (f"{container}x.{index}", f"x.{path}", container):
        assert run.split(other) == (other, None)


def test_further_runs_are_those_that_are_long_enough_the_longest_first() -> None:
    assert runs_of(*compiled("model.depths=[10,12,9]")) == (Run("stacks.1", 0, 12), Run("stacks.0", 0, 10))
    assert runs_of(*compiled("model.depths=[8,9]")) == (Run("stacks.1", 0, 9),)
    assert runs_of(*compiled("model.depths=[7,4]")) == ()
    odd = compiled("model.depths=[24]", "model.odd=11")
    assert runs_of(*odd) == (Run("stacks.0", 12, 12), Run("stacks.0", 0, 11))


def test_a_list_inside_of_equal_layers_is_no_run() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))

    def model(layers: int) -> nn.Module:
        return nn.ModuleList(
            [nn.ModuleList(Layer() for _ in range(layers)), nn.ModuleList([nn.Linear(2, 2)] * 11)]
        )

    assert runs_of((), model(10)) == (Run("1", 0, 11), Run("0", 0, 10))
    assert longest_run((), model(4)) == Run("0.0.experts", 0, 12)  # too few layers around it
    empty_path = nn.Sequential(*(nn.Sequential(*(nn.Linear(2, 2) for _ in range(12))) for _ in range(10)))
    assert runs_of((), empty_path) == (Run("", 0, 10),)


def test_runs_of_one_list_are_shortened_together() -> None:
    program, model = compiled("parallel.mesh.tp=2", "model.depths=[24]", "model.odd=11")
    layers = list(model.stacks[0])
    runs = runs_of(program, model)
    shorter = shorten_runs(program, model, runs, (SHORT + 1, SHORT))
    kept = [0, 1, 10, 11, 12, 13, 14, 23]
    assert list(model.stacks[0]) == [layers[i] for i in kept]
    before = {(a.module, a.style): a.rule for a in program}
    for a in shorter:
        head, tail = a.module.split(".")[:3], a.module.split(".")[3:]
        old = [*head[:2], str(kept[int(head[2])])] if a.module.startswith("stacks.0.") else head
        assert before[".".join([*old, *tail]), a.style] == a.rule
