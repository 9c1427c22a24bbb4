"""Modules that compute tokens with some of their experts each, by what they are given and what they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from parallelizer.propose.from_forward.seen import Seen, SeenCall
from parallelizer.styles.experts.find import NAMES


def experts(model: nn.Module, seen: Seen) -> dict[str, str]:
    """The style for each module of experts, by path. Such a module is given tokens [..., features], integers [..., k] and as many
    weights; all of its parameters are its own, and have the same size along one dimension, that of the experts.
    """
    found: dict[str, str] = {}
    for call in seen.calls:
        names = _arguments(call, seen)
        counted = _counted(model.get_submodule(call.module)) if names is not None else None
        if names is not None and counted is not None:
            found[call.module] = _style(names, counted)
    return found


def _arguments(call: SeenCall, seen: Seen) -> tuple[str, str, str] | None:
    """The arguments with the tokens, the numbers of their experts and the weights; None where it is not clear which they are."""
    shapes = {name: seen.shapes[given] for name, given in call.given.items() if given in seen.shapes}
    whole = [name for name in shapes if name not in call.floats and len(shapes[name]) > 1]
    if len(whole) != 1:
        return None
    ids = whole[0]
    rows = math.prod(shapes[ids][:-1])
    weights = [name for name in call.floats if name in shapes and shapes[name] == shapes[ids]]
    tokens = [
        name
        for name in call.floats
        if name in shapes and name not in weights and math.prod(shapes[name][:-1]) == rows
    ]
    return (tokens[0], ids, weights[0]) if len(tokens) == len(weights) == 1 else None


def _counted(module: nn.Module) -> Mapping[str, int] | None:
    """The dimension of every parameter that counts experts: the first along which all have the same size."""
    own = dict(module.named_parameters(recurse=False))
    if not own or len(own) != len(list(module.parameters())) or max(p.ndim for p in own.values()) < 3:
        return None
    for dim in range(min(p.ndim for p in own.values())):
        if len(sizes := {p.shape[dim] for p in own.values()}) == 1 and sizes != {1}:
            return dict.fromkeys(own, dim)
    return None


def _style(names: tuple[str, str, str], dims: Mapping[str, int]) -> str:
    said = [
        f"{option}: {name}"
        for (option, usual), name in zip(NAMES.items(), names, strict=True)
        if name != usual
    ]
    if any(dims.values()):
        said.append(f"params: {{{', '.join(f'{name}: shard({dim})' for name, dim in dims.items())}}}")
    return f"{{{', '.join(['style: experts', *said])}}}" if said else "experts"
