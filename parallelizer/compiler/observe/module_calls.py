"""How the modules of a model call each other, from one forward on the meta device: the arguments of each
call, its return values, and the flow of tensors between modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.calling import call
from parallelizer.compiler.observe.equal_layers import SHORT, Run, shortened_copy
from parallelizer.compiler.observe.remembered_results import RememberedResults
from parallelizer.compiler.observe.running_module import Running
from parallelizer.language.workload import Workload
from parallelizer.styles.application import ModuleCall
from parallelizer.torch_private import GroupedProducts, tree_leaves


@dataclass(frozen=True)
class Passage:
    """A tensor at a module's border: it leaves as an output or arrives as the input called `name`."""

    module: str
    leaves: bool
    name: str = ""


@dataclass(frozen=True)
class Journey:
    """The borders that one tensor crosses, in order, and the modules whose own code reads it in an
    operator.
    """

    passages: tuple[Passage, ...]
    read_in: frozenset[str]


@dataclass(frozen=True)
class Calls:
    """`by_module` has None for a module that is called in several ways; modules never called are missing.
    `returned_by` are the modules, outermost last, that return what the model returns."""

    by_module: Mapping[str, ModuleCall | None]
    journeys: tuple[Journey, ...]
    returned_by: tuple[str, ...]


def observe(model: nn.Module, workload: Workload, run: Run | None = None) -> Calls | None:
    """Run `model`, which is on meta and left as it is, once on two short rows in a child of this process. Of a run of
    layers that its forward is known to treat alike a few stand for all.

    None when it does not run so: values decide its course, or it has an operator without a meta kernel.
    """
    try:
        short = model if run is None else shortened_copy(model, run)
        (calls,) = in_children([(_observe, short, workload)])
    except WorldError:
        return None
    result: Calls = calls if run is None else _in_every_layer(calls, run)
    return result


def _in_every_layer(calls: Calls, run: Run) -> Calls:
    """What was seen of a model of SHORT layers, as it is in the whole one."""
    by_module = {path: call for short, call in calls.by_module.items() for path in run.stands_for(short)}
    journeys = [each for journey in calls.journeys for each in _journeys(journey, run)]
    returned = tuple(path for short in calls.returned_by for path in list(run.stands_for(short))[-1:])
    return Calls(by_module, tuple(journeys), returned)


def _journeys(journey: Journey, run: Run) -> Iterator[Journey]:
    """A journey between layers behind the first happens again from every one of them to the next; one through all
    layers goes through all of them.
    """
    paths = [*(p.module for p in journey.passages), *journey.read_in]
    indices = {index for path in paths if (index := run.split(path)[1]) is not None}
    if len(indices) == SHORT:
        passages = [replace(p, module=each) for p in journey.passages for each in run.stands_for(p.module)]
        order = {p.module: run.split(p.module)[1] or 0 for p in passages}
        passages.sort(key=lambda p: order[p.module])
        yield Journey(tuple(passages), frozenset(e for path in journey.read_in for e in run.stands_for(path)))
        return
    for more in range(run.count - SHORT + 1 if 1 in indices and 0 not in indices else 1):

        def moved(path: str, more: int = more) -> str:
            pattern, index = run.split(path)
            if index is None:
                return path
            last = index == SHORT - 1 and 1 not in indices
            return run.join(pattern, run.count - 1 if last else index + more)

        along = tuple(replace(p, module=moved(p.module)) for p in journey.passages)
        yield Journey(along, frozenset(moved(path) for path in journey.read_in))


def _observe(model: nn.Module, workload: Workload) -> Calls:
    watch = _CallWatch(model)
    with torch.no_grad(), GroupedProducts(), watch:
        output = call(model, workload.example(2, workload.seq_len, "meta"))
    return watch.calls(output)


@dataclass
class _Trail:
    tensor: torch.Tensor  # held, so that nothing else gets its id
    passages: list[Passage] = field(default_factory=list)
    read_in: set[str] = field(default_factory=set)


class _CallWatch(RememberedResults):
    """Notes calls and tensors while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: dict[str, list[ModuleCall]] = {}
        self.trails: dict[int, _Trail] = {}
        self.running = Running(model)
        for path, module in model.named_modules():
            signature = inspect.signature(module.forward)
            module.register_forward_pre_hook(self._enter(path, signature), with_kwargs=True)
            module.register_forward_hook(self._leave(path, _positional_names(signature)), with_kwargs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.trails:
                self.trails[id(leaf)].read_in.add(self.running.current)
        return self.result(func, args, kwargs or {})

    def calls(self, output: Any) -> Calls:
        by_module = {
            p: found[0] if all(c == found[0] for c in found) else None for p, found in self.seen.items()
        }
        last = self.trails.get(id(output))
        returned = tuple(p.module for p in last.passages if p.leaves) if last else ()
        journeys = tuple(Journey(tuple(t.passages), frozenset(t.read_in)) for t in self.trails.values())
        return Calls(by_module, journeys, returned)

    def _note(self, tensor: Any, passage: Passage) -> None:
        if isinstance(tensor, torch.Tensor):
            self.trails.setdefault(id(tensor), _Trail(tensor)).passages.append(passage)

    def _enter(self, path: str, signature: inspect.Signature) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                    name, value = "", next(iter(value), None)
                self._note(value, Passage(path, False, name))

        return hook

    def _leave(self, path: str, names: list[str]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs = (
                len(output) if isinstance(output, tuple) else None if isinstance(output, torch.Tensor) else -1
            )
            called = [*names, "", *"*" * len(args)][: len(args)]
            positional = tuple((n, isinstance(a, torch.Tensor)) for n, a in zip(called, args, strict=True))
            keywords = {k: isinstance(v, torch.Tensor) for k, v in kwargs.items()}
            self.seen.setdefault(path, []).append(ModuleCall(positional, keywords, outputs))
            if isinstance(output, tuple | list):
                for index, value in enumerate(output):
                    self._note(value, Passage(path, True, str(index)))
            elif isinstance(output, dict):
                for key, value in output.items():
                    self._note(value, Passage(path, True, str(key)))
            else:
                self._note(output, Passage(path, True))

        return hook


def _positional_names(signature: inspect.Signature) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]
