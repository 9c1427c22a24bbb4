"""Lists of experts in the modules that rules `experts` name: their weights are stacked, and the module's own loop stays."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from parallelizer.language.parse_rule import slot_of
from parallelizer.language.plan import Plan, StyleUse
from parallelizer.styles.experts.expert_list import ExpertList, in_a_loop
from parallelizer.styles.experts.find import lists_of, names_of, why_not
from parallelizer.styles.wrap_forward import wrap_forward


def stack_experts(model: nn.Module, plan: Plan) -> nn.Module:
    """Replace every `nn.ModuleList` inside of the modules that have the style `experts` by an `ExpertList`, in place, and return
    the model. It computes the same. The parameters of the experts have other names afterwards, also on meshes without `ep`, so
    that checkpoints fit all meshes; a state dict from before can be loaded.

    `parallelize` and all commands call it. Before `compile`, call it yourself. A list whose experts cannot be stacked stays, and
    `compile` reports the reason. A second call changes nothing.
    """
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    for path, use in _with_experts(model, plan).items():
        module = model.get_submodule(path)
        names = names_of({name: option.value for name, option in use.options.items()})
        if not {*names} <= {*inspect.signature(module.forward).parameters}:
            continue
        lists = dict(lists_of(module))
        shared = any(uses[id(param)] > 1 for one in lists.values() for param in one.parameters())
        if lists and not shared and all(why_not(one) is None for one in lists.values()):
            _stack(module, lists)
    return model


def _with_experts(model: nn.Module, plan: Plan) -> dict[str, StyleUse]:
    """The modules that the plan gives the style, by path: the last rule counts."""
    paths = [path for path, _ in model.named_modules()]
    found: dict[str, StyleUse] = {}
    for rule in plan.rules:
        uses = [use for use in rule.uses if slot_of(use)[0] == "experts"]
        for path in rule.glob.select(paths) if uses or "experts" in rule.empties else ():
            found.pop(path, None)
            found.update((path, use) for use in uses)
    return found


def _stack(module: nn.Module, lists: Mapping[str, nn.ModuleList]) -> None:
    for path, experts in lists.items():
        around, _, name = path.rpartition(".")
        stacked = ExpertList(experts).train(experts.training)
        stacked.in_loop = True
        setattr(module.get_submodule(around), name, stacked)

    def around_loop(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with ExitStack() as stack:
            for inner in module.modules():
                if isinstance(inner, ExpertList):
                    stack.enter_context(in_a_loop(inner))
            return forward(*args, **kwargs)

    wrap_forward(module, around_loop)
