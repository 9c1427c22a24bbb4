"""What the style `experts` needs of a module: the arguments of its forward, and parameters that count experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language.plan import EXPERT, Placement, full_name, shard
from parallelizer.styles.attributes import is_writable, numbers, read
from parallelizer.styles.experts.expert_list import ExpertList, check_equal
from parallelizer.styles.sizes import uneven
from parallelizer.styles.target import StyleError

if TYPE_CHECKING:
    from parallelizer.styles.target import Target

NAMES = {"tokens": "hidden_states", "ids": "top_k_index", "weights": "top_k_weights"}
"""The arguments of the experts of transformers."""


def names_of(options: Mapping[str, Any]) -> tuple[str, str, str]:
    """The names of the arguments with the tokens, the numbers of their experts, and the weights."""
    tokens, ids, weights = (str(options.get(option) or default) for option, default in NAMES.items())
    return tokens, ids, weights


def argument_names(target: Target) -> None:
    """Forward has the three arguments. Raises StyleError."""
    taken = list(inspect.signature(target.module.forward).parameters)
    for option, name in zip(NAMES, names_of(target.options), strict=True):
        if name in taken:
            continue
        called = f"forward of {target.path or 'the root'} ({type(target.module).__name__})"
        written = option in target.options
        raise StyleError(
            "unknown-input",
            f"{called} has no parameter {name!r}, which `experts` needs as its {option}",
            did_you_mean(name, taken, "it takes")
            if written
            else f"it takes {', '.join(taken) or 'nothing'}: write {option}: with the name of the one that has them; a module "
            "that chooses the experts itself must be divided into a router and experts",
            option if written else None,
        )


def check_no_list(target: Target) -> None:
    """The module has a forward. Raises StyleError."""
    if isinstance(target.module, nn.ModuleList):
        raise StyleError(
            "experts-module",
            f"{target.path or 'the root'} is a list of modules: the loop over them lies in the module around it, together with "
            "the router, and tokens must travel in between",
            f"move the loop into the forward of a module that has the list and takes {', '.join(NAMES.values())}, and write the "
            "rule for that module. Or write parallelizer.ExpertList in place of nn.ModuleList, and call it once in place of the "
            "loop. Without ep, fsdp and tp take modules",
        )


def check_modules(target: Target) -> None:
    """All parameters are the module's own or those of lists of experts, beside those of modules that `whole` names: others
    would not be the experts'. Raises StyleError.
    """
    whole: tuple[str, ...] = target.options.get("whole") or ()
    inner = [name for name, _ in target.module.named_modules() if name]
    for name in whole:
        if name not in inner:
            raise StyleError(
                "experts-module",
                f"{target.path or 'the root'} ({type(target.module).__name__}) has no module {name!r} inside of it",
                did_you_mean(name, inner, "it has"),
                "whole",
            )
    experts = parameters_of_experts(target.module)
    inside = [
        name
        for name, _ in target.module.named_parameters()
        if name not in experts and not any(name.startswith(f"{one}.") for one in whole)
    ]
    if not inside:
        return
    called = f"{target.path or 'the root'} ({type(target.module).__name__})"
    listed = next((path for path, _ in lists_of(target.module) if inside[0].startswith(f"{path}.")), None)
    if listed is not None:
        raise StyleError(
            "experts-module",
            f"{called} has its experts in modules of their own ({inside[0]}), and `experts` takes them from parameters "
            "[experts, ...]",
            why_not(target.module.get_submodule(listed))
            or "call parallelizer.stack_experts(model, plan) before you compile the plan. It leaves experts out that share "
            "parameters with other modules",
        )
    inner_path = inside[0].rpartition(".")[0]
    vectors = all(p.ndim < 2 for p in target.module.get_submodule(inner_path).parameters())
    raise StyleError(
        "experts-module",
        f"{called} has parameters in modules inside of it ({inside[0]}), which are no experts",
        "write the rule for the module that has the experts' parameters alone; a router and shared experts must lie outside of "
        "it" + (f". If it is a norm of the experts' outputs, write whole: [{inner_path}]" if vectors else ""),
    )


def parameters_of_experts(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the module itself, and those of the lists of experts inside of it, by name."""
    return {
        full_name(path, name): param
        for path, owner in module.named_modules()
        if owner is module or isinstance(owner, ExpertList)
        for name, param in owner.named_parameters(recurse=False)
    }


def lists_of(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """The lists inside of a module with their paths, without those inside of other lists."""
    found: list[str] = []
    for path, child in module.named_modules():
        if path and isinstance(child, nn.ModuleList) and not any(path.startswith(f"{one}.") for one in found):
            found.append(path)
            yield path, child


def why_not(experts: nn.Module) -> str | None:
    """Why the experts of a list cannot be stacked; None if they can."""
    try:
        check_equal(list(experts.children()))
    except ValueError as error:
        return str(error)
    return None


def placements(target: Target) -> dict[str, dict[str, Placement]]:
    """The placement of every parameter of the module on `ep`. Raises StyleError."""
    own = parameters_of_experts(target.module)
    written: Mapping[str, Mapping[str, Placement]] = target.options.get("params") or {"*": {"": shard(0)}}
    called = f"{target.path or 'the root'} ({type(target.module).__name__})"
    if not own:
        raise StyleError(
            "experts-module",
            f"{called} has no parameters, so it holds no experts",
            "write the rule for the module with the parameters [experts, ...]",
        )
    for name in written:
        if name not in own and name != "*":
            raise StyleError(
                "unknown-parameter",
                f"{called} has no parameter {name!r}",
                f"it has {', '.join(own)}",
                "params",
                name,
            )
    found: dict[str, dict[str, Placement]] = {}
    for name, param in own.items():
        # Those of a list are stacked along the first.
        by_axis = written.get(name) or ({"": shard(0)} if "." in name else written.get("*", {}))
        placement = next(iter(by_axis.values()), None)
        if placement is None or placement.dim is None or set(by_axis) != {""}:
            raise StyleError(
                "experts-module",
                f"{full_name(target.path, name)} is not split over the experts",
                'add "*": shard(0) for the parameters that `params` does not name'
                if written and "*" not in written
                else 'every parameter of the module is the experts\': write params: {"*": shard(0)}',
                "params" if target.options.get("params") else None,
                placement.span if placement is not None else None,
            )
        if not -param.ndim <= placement.dim < param.ndim:
            raise StyleError(
                "unknown-dim",
                f"{name} has {param.ndim} dimensions, not one of number {placement.dim}",
                f"its shape is {list(param.shape)}",
                "params" if target.options.get("params") else None,
                placement.span,
            )
        found[name] = {EXPERT: shard(placement.dim % param.ndim)}
    _check_count(target, {name: own[name].shape[by[EXPERT].dim or 0] for name, by in found.items()})
    return found


def _check_count(target: Target, counts: Mapping[str, int]) -> None:
    """All parameters count as many experts, which `ep` divides. Raises StyleError."""
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise StyleError(
            "experts-module",
            f"the parameters of {target.path or 'the root'} count different numbers of experts: {listed}",
            "each must have the experts along one dimension, which `params` names: params: "
            f"{{{next(iter(counts))}: shard(0), ...}}; a parameter that all experts share must lie outside of the module",
            "params" if target.options.get("params") else None,
        )
    count, ranks = next(iter(counts.values())), target.sizes[EXPERT]
    if count % ranks:
        raise uneven(
            target, f"the number of experts of {target.path or 'the root'}", count, ranks, None, EXPERT
        )


def counting_attributes(module: nn.Module, experts: int) -> tuple[str, ...]:
    """The attributes of the module that have the number of experts, which forward must see as that of this rank's."""
    return tuple(
        name
        for name in numbers(module)
        if "." not in name
        and "expert" in name.lower()
        and read(module, name) == experts
        and is_writable(module, name)
    )
