"""One stage of a model: the model's own forward over the modules of the stage, with stand-ins for all others.

The code of divided modules (rotary tables, masks, multipliers, loops over layers) runs on every stage as it was
written. A stand-in returns what the stage before sent in the place of its module's output. The forward is left by an
exception behind the stage's last unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from parallelizer.compiler.observe.calling import call
from parallelizer.language.pipeline.stages import Stage, Stages, UnitOutput
from parallelizer.runtime.pipeline.forms import Forms, TensorForm, filled, form_of
from parallelizer.torch_private import (
    call_instead,
    children_of,
    empty_twin,
    outline_twin,
    set_child,
    tree_leaves,
)


class _StageEnded(BaseException):
    """Leaves the forward behind the last unit. No `except Exception` of a model takes it."""


class StageModel(nn.Module):
    """What runs on one stage. `model` is the outline of the user's model: the same classes, code and names, with this
    stage's modules in it. FSDP's root unit of a stage is this module. `before` are this rank's earlier stages.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        index: int,
        mesh: DeviceMesh,
        before: Collection[StageModel] = (),
    ) -> None:
        super().__init__()
        self.index, self.stage, self.mesh = index, stages.stages[index], mesh
        self.divided, self.rewritten = stages.divided, stages.rewritten
        self.absent: dict[nn.Module, dict[str, torch.Tensor]] = {}
        names = {module: path for path, module in model.named_modules()}
        taken = frozenset(
            unit
            for other in before
            for unit in (*other.stage.recomputed, *(called for called, _ in other.stage.elsewhere))
        )
        self.model = _Outline(names, stages, self.stage, taken, self._stand_in, self.absent).of(model)
        modules = dict(self.model.named_modules())
        # In a tuple, so that they are no children of this module.
        self._outlined = tuple(
            (module, modules[path])
            for module, path in names.items()
            if path in self.divided or any(path == unit or path.startswith(f"{unit}.") for unit in taken)
        )
        self._stood_on: torch.device | None = None
        self._received: dict[UnitOutput, torch.Tensor] = {}
        self._known: Forms = {}
        self._calls: dict[str, int] = {}
        self._sent: dict[UnitOutput, torch.Tensor] = {}
        self.forms: Forms = {}
        self._handles: list[RemovableHandle] = []
        self.kept_gathered: set[nn.Module] = set()
        """FSDP's units that stay gathered from their first forward in a step to their last backward."""
        self.backward_at_once = False
        """Whether a module of the stage is checkpointed or compiled. Its backward is not split: each part would recompute the
        forward of a checkpoint, and a compiled backward can run once only.
        """

    def watch(self) -> None:
        """Note what the stage's units return from now on, behind all hooks that there are: these may change it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for path in sorted(self.stage.units | self.stage.recomputed):
            module = self.model.get_submodule(path)
            self._handles.append(module.register_forward_hook(self._returns(path)))
        for path in {unit for unit, _ in self.stage.elsewhere}:
            call_instead(self.model.get_submodule(path), self._here_or_elsewhere(path))

    def runs(self, path: str) -> bool:
        """Whether a module of the outline runs here: the others stand in for modules of other stages."""
        inside = self.stage.units | self.stage.recomputed
        return path in self.divided or any(path == unit or path.startswith(f"{unit}.") for unit in inside)

    def forward(
        self, received: Sequence[torch.Tensor], known: Forms, batch: Mapping[str, torch.Tensor]
    ) -> Any:
        """The tensors that the stage sends, in order; of the last stage the model's output. `received` are those that it
        receives, in order, and `known` the forms of what units of earlier stages return. Afterwards `forms` has these
        and those of this stage.
        """
        self._received = dict(zip(self.stage.receives, received, strict=True))
        self._known, self._calls, self._sent, self.forms = known, {}, {}, dict(known)
        self._stand_for_parameters(batch)
        for module, outline in self._outlined:
            outline.training = module.training  # `eval()` of the user's model reaches the stage's units alone
        try:
            return call(self.model, batch)
        except _StageEnded:
            passed_on = {**self._received, **self._sent}
            return tuple(passed_on[value] for value in self.stage.sends)
        finally:
            self._received, self._sent = {}, {}

    def _returns(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            index = self._next_call(path)
            self.forms[path, index] = form_of(output)
            leaves = tree_leaves(output)
            for value in self.stage.sends:
                if (value.unit, value.call) == (path, index):
                    # As it is here: each later stage changes it once more.
                    sent = leaves[value.leaf]
                    self._sent[value] = sent.clone() if value in self.rewritten else sent
            if self.stage.last == (path, index):
                raise _StageEnded

        return hook

    def _next_call(self, path: str) -> int:
        index = self._calls.get(path, 0)
        self._calls[path] = index + 1
        return index

    def _here_or_elsewhere(self, path: str) -> Callable[..., Any]:
        stand_in = self._stand_in(path)

        def chosen(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            there = (path, self._calls.get(path, 0)) in self.stage.elsewhere
            return stand_in(*args, **kwargs) if there else real(*args, **kwargs)

        return chosen

    def _stand_in(self, path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            index = self._next_call(path)
            form = self._known.get((path, index))
            if (path, index) not in self._known:
                raise RuntimeError(
                    f"{path} was called on stage {self.index}, and in the forward that was followed while compiling it ran on "
                    "a later stage: what the model calls must not depend on the batch"
                )
            device = next(
                (t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), None
            )

            def tensor(leaf: int, one: TensorForm) -> torch.Tensor:
                value = UnitOutput(path, index, leaf)
                found = self._received.get(value)
                if found is None:
                    found = one.wrapped(one.zeros(device or torch.device(self.mesh.device_type)), self.mesh)
                # Neither a leaf that wants a gradient nor zeros that take no memory can be written to in place.
                return found.clone() if value in self.rewritten else found

            return filled(form, tensor)

        return forward

    def _stand_for_parameters(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Zeros, which take no memory, for the parameters that other stages have: code around may ask for their dtype."""
        device = next(iter(batch.values())).device
        if device == self._stood_on:
            return
        self._stood_on = device
        zeros: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = {}
        for module, lacking in self.absent.items():
            for name, param in lacking.items():
                form = param.dtype, param.shape
                if form not in zeros:
                    zeros[form] = torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
                module.__dict__[name] = zeros[form]


@dataclass(frozen=True)
class _Outline:
    """Makes the outline of a model. `names` are those of all modules of the model; one that stands at several places has the
    first. `taken` are units that an earlier stage of this rank has too. `absent` gets the parameters that stand-ins lack.
    """

    names: Mapping[nn.Module, str]
    stages: Stages
    stage: Stage
    taken: frozenset[str]
    stand_in: Callable[[str], Any]
    absent: dict[nn.Module, dict[str, torch.Tensor]]

    def of(self, module: nn.Module) -> nn.Module:
        """A divided module with this stage's modules in it, and stand-ins for the others."""
        children: dict[str, nn.Module | None] = {}
        for name, child in children_of(module).items():
            inner = self.names[child] if child is not None else ""
            if child is None or inner in self.stage.units or inner in self.stage.recomputed:
                # Without parameters, so it may be twice on a rank, each with its own hooks: each stage has its own rules.
                children[name] = _twin(child) if child is not None and inner in self.taken else child
            elif inner in self.stages.divided:
                children[name] = self.of(child)
            else:
                children[name] = self._hollow(child, self.stand_in(inner))
        return outline_twin(module, children)

    def _hollow(self, module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
        """A stand-in, with the names of all that the module holds."""
        twin = empty_twin(module, forward)
        for name, child in children_of(module).items():
            if child is not None:
                set_child(twin, name, self._hollow(child, _not_here(self.names[child])))
        lacking = {n: torch.empty_like(p, device="meta") for n, p in module.named_parameters(recurse=False)}
        if lacking:
            self.absent[twin] = lacking
        return twin


def _twin(module: nn.Module) -> nn.Module:
    """Another module over the same parameters and buffers, down to its last child, with hooks of its own."""
    children = {n: None if child is None else _twin(child) for n, child in children_of(module).items()}
    return outline_twin(module, children)


def leave_out(model: nn.Module, paths: Iterable[str]) -> None:
    """Put an empty module into every place of each that runs on no stage of this rank."""
    gone: dict[nn.Module, nn.Module] = {}
    for path in paths:
        module = model.get_submodule(path)
        if module not in gone:
            gone[module] = empty_twin(module, _not_here(path))
    for around in list(model.modules()):
        for name, child in children_of(around).items():
            if child in gone:
                set_child(around, name, gone[child])


def refuse_calls(model: nn.Module) -> None:
    """Let a call of a model that is cut raise, in place of a failure somewhere in its forward."""
    model.register_forward_pre_hook(lambda *_: _not_here("the model")())


def _not_here(path: str) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{path} cannot be called: it is cut into stages, which run on several ranks. Use parallelizer.train_step and "
            "parallelizer.evaluate"
        )

    return forward
