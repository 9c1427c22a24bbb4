"""Parameters that several modules share, such as an output layer that shares the embedding's weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from parallelizer.language.plan import full_name


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under each of its names. A module that stands at several places counts once."""
    return {
        full_name(path, name): param
        for path, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter that has several, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, param in parameter_names(model).items():
        names.setdefault(id(param), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def tie(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Make each group one parameter again: the one that has the first of the names."""
    for first, *others in groups:
        param = model.get_parameter(first)
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, param)
