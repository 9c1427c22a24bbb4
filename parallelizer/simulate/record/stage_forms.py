"""What the stages of a pipeline are told by the stages before, in a world where these do not exist."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.compiler.observe.equal_layers import SHORT, Run, longest_run, shortened, shortened_copy
from parallelizer.language.pipeline.stages import Stages
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import allocate
from parallelizer.runtime.pipeline.forms import Forms, form_of
from parallelizer.runtime.pipeline.microbatches import Batch
from parallelizer.runtime.step import forward
from parallelizer.styles.application import Program
from parallelizer.torch_private import tree_leaves


def stage_forms(
    program: Program,
    model: nn.Module,
    mesh: DeviceMesh,
    microbatch: Batch,
    fake: AbstractContextManager[object],
) -> Forms:
    """The forms of what every call of every unit returns for a microbatch, from one forward of the whole model on `fake`
    tensors with all of the program but its cuts; a few of many equal layers are run. `model` is on meta and left as it is.
    """
    stages = program.require_stages()
    run = longest_run(program, model)
    uncut = dataclasses.replace(program, stages=None)
    whole = copy.deepcopy(model) if run is None else shortened_copy(model, run)
    apply(uncut if run is None else shortened(uncut, run, SHORT), whole, mesh)
    forms: Forms = {}
    every = _units(stages, model)
    for path in _units(stages, whole):
        whole.get_submodule(path).register_forward_hook(_note(path, forms))
    with fake:
        allocate(whole, "cpu")
        forward(whole, microbatch)
    return forms if run is None else _of_every_layer(forms, every, run)


@dataclass(frozen=True)
class CutTraffic:
    """What crosses the cut before `stage` in a step, between two ranks: so many `messages` each way, with the bytes of one
    activation and of one gradient.
    """

    stage: int
    messages: int
    activation_bytes: int
    gradient_bytes: int


def cut_traffic(stages: Stages, forms: Forms, parts: int) -> tuple[CutTraffic, ...]:
    """The traffic of each cut, by the forms of a microbatch and the number of parts that gradients are accumulated over."""
    found = []
    for number, stage in enumerate(stages.stages[1:], start=1):
        leaves = [tree_leaves(forms[v.unit, v.call])[v.leaf] for v in stage.receives]
        sizes = [(leaf.shape.numel() * leaf.dtype.itemsize, leaf.wants_gradient) for leaf in leaves]
        found.append(
            CutTraffic(
                number,
                parts * (stages.pipeline.microbatches or 1),
                sum(size for size, _ in sizes),
                sum(size for size, wanted in sizes if wanted),
            )
        )
    return tuple(found)


def _of_every_layer(forms: Forms, units: list[str], run: Run) -> Forms:
    """The forms of a model with all its layers from those of one with a few: equal layers return the same."""
    found: Forms = {}
    for path in units:
        pattern, index = run.split(path)
        there = path if index is None else run.join(pattern, min(index, SHORT - 1))
        found |= {(path, call): form for (unit, call), form in forms.items() if unit == there}
    return found


def _units(stages: Stages, model: nn.Module) -> list[str]:
    inside = set[str]().union(*(stage.units | stage.recomputed for stage in stages.stages))
    return [path for path, _ in model.named_modules() if path in inside]


def _note(path: str, forms: Forms) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        forms[path, sum(unit == path for unit, _ in forms)] = form_of(output)

    return hook
