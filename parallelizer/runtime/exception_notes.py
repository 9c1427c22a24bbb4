"""Notes on exceptions: the module of the plan, its rules, and the placements of its tensors.

A forward hook adds the note; torch calls it after an exception too, so the call itself is not wrapped. The
hook also marks the autograd nodes at the inputs and outputs of its module, so that an exception in backward
finds the module.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.compiler.observe.running_module import within
from parallelizer.compiler.wording import SHARDED_LOSS, flow, place
from parallelizer.language.placement import from_torch
from parallelizer.runtime.lost_rank import is_of_another
from parallelizer.styles.application import Application, Program
from parallelizer.styles.compiled_forward import compiled_modules, seen_from_outside
from parallelizer.styles.conversions import conversions

_NODES = 3
"""So many nodes of autograd lie at most between a module and the tensor that it was given or gave away."""

_MARK = "parallelizer.module"
_NOTED = "__parallelizer_module__"


@dataclass(frozen=True)
class PlannedModule:
    """What a note says of one module: its path, and what the plan does to it."""

    path: str
    applications: tuple[Application, ...]
    mesh: str
    inside: tuple[Application, ...] = ()
    """Those inside a compiled module, which have no notes of their own."""

    @property
    def is_laid_out(self) -> bool:
        """Whether the plan changes the layouts of its tensors, and not only when they are there."""
        return any(a.slot in ("params", "io", "attention") for a in (*self.applications, *self.inside))

    def note(self, received: Sequence[str], phase: str) -> str:
        """The text, with how the tensors lay that it received."""
        lines = [f"{phase}{self.path or 'the root module'}, on {self.mesh}"]
        lines += map(_line, self.applications)
        if self.inside:
            lines.append("  inside it, compiled with it:")
            lines += [f"  {line}" for line in dict.fromkeys(map(_line, self.inside))]
        lines += [f"  received {tensor}" for tensor in received]
        return "\n".join(lines)

    def after(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """The hook. Under torch.compile, as when a user compiles the whole model, it is nothing."""
        if torch.compiler.is_compiling():
            return
        error = sys.exception()
        if error is None:
            self._mark((output, *args, *kwargs.values()))
        elif not torch_private.stops_recomputation(error) and _is_of_this_call(error):
            self._add(error, list(_received(module, args, kwargs)))
        # Any other exception is being handled already, and this call is a part of its handler.

    def _add(self, error: BaseException, received: Sequence[str], phase: str = "in ") -> None:
        """Add a note, once: the innermost module is the first to be left. That another rank has ended is no module's doing."""
        if not hasattr(error, _NOTED) and not is_of_another(error):
            setattr(error, _NOTED, self)
            error.add_note(self.note(received, phase))

    def _mark(self, values: Iterable[Any]) -> None:
        for value in values:
            for tensor in value if isinstance(value, tuple | list) else (value,):
                node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
                for _ in range(_NODES):
                    # Others are never found again: an exception tells of nodes that are written in Python.
                    if not isinstance(node, BackwardCFunction):
                        break
                    node.metadata.setdefault(_MARK, self)
                    node = node.next_functions[0][0] if node.next_functions else None


def add_notes(program: Program, model: nn.Module) -> None:
    """From now on an exception that leaves a planned module has a note of it.

    A compiled module has one note for everything inside it. Hooks inside would be guards of the compiled code: each
    layer has hooks of its own, so each layer would be compiled on its own.
    """
    outside, compiled = dict(seen_from_outside(model)), compiled_modules(model)
    planned: dict[str, list[Application]] = {}
    inside: dict[str, list[Application]] = {}
    for application in program:
        path = application.module
        if path in outside:
            planned.setdefault(path, []).append(application)
        else:
            around = next(outer for outer in compiled if within(path, outer))
            inside.setdefault(around, []).append(application)
    for path, applications in planned.items():
        noting = PlannedModule(path, tuple(applications), str(program.mesh), tuple(inside.get(path, ())))
        outside[path].register_forward_hook(noting.after, with_kwargs=True, always_call=True)


@contextmanager
def noted_backward() -> Iterator[None]:
    """Around a backward pass: an exception out of a planned module's border gets that module's note."""
    try:
        yield
    except Exception as error:
        found, gradients = _marked(error)
        if found is not None:
            found._add(error, gradients, "in backward, at the border of ")
        raise


@contextmanager
def noted_loss(output: Any) -> Iterator[None]:
    """Around a loss: an exception out of it gets a note of how the output lay, where that is a DTensor."""
    lies = [_lies(t) for t in torch_private.tree_leaves(output) if isinstance(t, DTensor)]
    del output
    try:
        yield
    except Exception as error:
        if lies and not is_of_another(error):
            error.add_note(f"in the loss, which was given {', '.join(lies)}\n  {SHARDED_LOSS}")
        raise


def planned_module(error: BaseException) -> PlannedModule | None:
    """The module that an exception was noted with."""
    found: PlannedModule | None = getattr(error, _NOTED, None)
    return found


def raised_by_torch(error: BaseException) -> bool:
    """Whether an operation of torch raised it, and not a `raise` or `assert` in other code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, torch.OutOfMemoryError | torch.distributed.DistError):
        return False
    frame = trace.tb_frame
    if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "parallelizer"):
        return True
    return (
        isinstance(error, RuntimeError)
        and dis.opname[frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS"
    )


def _is_of_this_call(error: BaseException) -> bool:
    """Whether the exception is leaving the very call whose hook is running now."""
    # Never this function's own frame in a variable: that is a cycle, and keeps all its tensors until some
    # garbage collection.
    return error.__traceback__ is not None and error.__traceback__.tb_frame is sys._getframe(2)


def _marked(error: BaseException) -> tuple[PlannedModule | None, list[str]]:
    """The module of the innermost autograd node, written in Python, that an exception went through, and the
    gradients that the node was given.
    """
    found: PlannedModule | None = None
    gradients: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        here = list(trace.tb_frame.f_locals.values())
        nodes = [value for value in here if isinstance(value, BackwardCFunction)]
        if any(_MARK in node.metadata for node in nodes):
            found = next(node.metadata[_MARK] for node in nodes if _MARK in node.metadata)
            names = trace.tb_frame.f_code.co_varnames[: trace.tb_frame.f_code.co_argcount]
            given = {name: trace.tb_frame.f_locals.get(name) for name in names}
            gradients = [f"{n}: {_lies(x)}" for n, x in given.items() if isinstance(x, torch.Tensor)]
        trace = trace.tb_next
    return found, gradients


def _line(application: Application) -> str:
    """The rule, and the placements that it expects."""
    expected, rule = "; ".join(_expected(application)), application.rule
    text = f"  {place(rule.span)}: `{rule.key}: {application.style}`"
    return text + f" expects {expected}" * bool(expected)


def _expected(application: Application) -> Iterator[str]:
    for conversion in conversions(application):
        yield flow(conversion)
    for name, by_axis in {**application.params, **application.buffers}.items():
        axes = ", ".join(f"{placement} on {axis}" for axis, placement in by_axis.items())
        yield f"{name}: {axes or 'replicate'}"


def _received(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """The tensors among a call's arguments, by the names that forward has for them."""
    try:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {**{str(at): value for at, value in enumerate(args)}, **kwargs}
    for name, value in given.items():
        for at, tensor in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if isinstance(tensor, torch.Tensor):
                yield f"{name if tensor is value else f'{name}[{at}]'}: {_lies(tensor)}"


def _lies(tensor: torch.Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    kind = str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        return f"a plain tensor {shape}, {kind}"
    names = tensor.device_mesh.mesh_dim_names or [str(at) for at in range(tensor.device_mesh.ndim)]
    axes = ", ".join(f"{from_torch(p)} on {axis}" for axis, p in zip(names, tensor.placements, strict=True))
    local = "x".join(map(str, tensor.to_local().shape)) or "scalar"
    return f"a DTensor {shape}, {kind}, {axes}, here {local}"
