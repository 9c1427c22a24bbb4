"""Statements about many modules as the code that a person would write: repeated layers in loops, styles in
one dictionary a level."""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from parallelizer.styles.statements import Statement


@dataclass(frozen=True)
class Item:
    """One call about one module. `rule` is the comment that says where it comes from.

    With a `mesh`, `call` makes a ParallelStyle and goes into the dictionary of a `parallelize_module` on that
    mesh; without, it is a statement, in which MODULE stands for the module.
    """

    path: str
    rule: str
    call: Statement
    mesh: str | None = None


Tail = tuple[str, ...]
Placed = tuple[Tail, Item]


def emit(
    items: Iterable[Item], model: nn.Module, *, inner_first: bool = False, indent: str = "    "
) -> list[str]:
    """The statements as lines. `inner_first` puts loops over layers before what is said of the modules around
    them."""
    placed = [(tuple(i.path.split(".")) if i.path else (), i) for i in items]
    return _level(placed, model, "model", indent, inner_first, {"model"})


def _level(
    placed: Sequence[Placed], module: nn.Module, name: str, indent: str, inner_first: bool, taken: set[str]
) -> list[str]:
    direct: list[Placed] = []
    repeated: dict[Tail, dict[str, list[Placed]]] = {}
    for tail, item in placed:
        depth = _container_depth(module, tail)
        if depth is None:
            direct.append((tail, item))
        else:
            repeated.setdefault(tail[:depth], {}).setdefault(tail[depth], []).append(
                (tail[depth + 1 :], item)
            )
    here = _direct(direct, module, name, indent)
    loops: list[str] = []
    for container, by_index in repeated.items():
        loops += _loops(container, by_index, module, name, indent, inner_first, taken)
    return loops + here if inner_first else here + loops


def _container_depth(module: nn.Module, tail: Tail) -> int | None:
    """Where in a path the first index of a container of layers stands."""
    for depth, part in enumerate(tail):
        if part.isdigit():
            children = [n for n, _ in module.get_submodule(".".join(tail[:depth])).named_children()]
            if all(n.isdigit() for n in children):
                return depth
    return None


def _direct(placed: Sequence[Placed], module: nn.Module, name: str, indent: str) -> list[str]:
    """Styles in one dictionary for each mesh, then the statements."""
    lines: list[str] = []
    for mesh, group in itertools.groupby((p for p in placed if p[1].mesh), key=lambda p: p[1].mesh):
        styles = list(group)
        if len(styles) == 1:
            (tail, item) = styles[0]
            call = Statement("parallelize_module", (access(module, name, tail), str(mesh), item.call.text()))
            lines += [f"{indent}# {item.rule}", *call.lines(indent)]
            continue
        lines += [
            f"{indent}parallelize_module(",
            f"{indent}    {name},",
            f"{indent}    {mesh},",
            f"{indent}    {{",
        ]
        by_rule: dict[str, list[Placed]] = {}
        for tail, item in styles:
            by_rule.setdefault(item.rule, []).append((tail, item))
        for rule, members in by_rule.items():
            lines.append(f"{indent}        # {rule}")
            for tail, item in members:
                lines += item.call.lines(indent + " " * 8, before=f'"{".".join(tail)}": ', after=",")
        lines += [f"{indent}    }},", f"{indent})"]
    rule = ""
    for tail, item in placed:
        if item.mesh is None:
            lines += [f"{indent}# {item.rule}"] if item.rule != rule else []
            lines += item.call.lines(indent, access(module, name, tail))
            rule = item.rule
    return lines


def _loops(
    container: Tail,
    by_index: dict[str, list[Placed]],
    module: nn.Module,
    name: str,
    indent: str,
    inner_first: bool,
    taken: set[str],
) -> list[str]:
    """One loop for each class of layers about which the same is said."""
    layers = module.get_submodule(".".join(container))
    classes: dict[tuple[tuple[Tail, str, Statement, str | None], ...], list[str]] = {}
    for index, inside in by_index.items():
        classes.setdefault(tuple((t, i.rule, i.call, i.mesh) for t, i in inside), []).append(index)
    lines: list[str] = []
    for indices in classes.values():
        inside, first = by_index[indices[0]], layers.get_submodule(indices[0])
        if len(indices) == 1:
            lines += _level(
                inside, first, access(module, name, (*container, indices[0])), indent, inner_first, taken
            )
            continue
        variable = _variable(container, taken)
        header = _header(variable, layers, access(module, name, container), indices)
        lines += [f"{indent}{line}" for line in header]
        lines += _level(inside, first, variable, indent + "    ", inner_first, taken | {variable})
    return lines


def _header(variable: str, layers: nn.Module, name: str, indices: Sequence[str]) -> list[str]:
    children = [n for n, _ in layers.named_children()]
    listed = isinstance(layers, nn.ModuleList | nn.Sequential)
    numbers = [int(i) for i in indices]
    # A layer that stands at two places is one child and two elements: then elements are named one by one.
    if list(indices) == children and (not listed or len(layers) == len(children)):  # type: ignore[arg-type]
        every = (
            name
            if listed
            else f"{name}.values()"
            if isinstance(layers, nn.ModuleDict)
            else f"{name}.children()"
        )
        return [f"for {variable} in {every}:"]
    if listed and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return [f"for {variable} in {name}[{numbers[0] or ''}:{numbers[-1] + 1}]:"]
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    step = "" if steps == {1} else f", {numbers[1] - numbers[0]}"
    listing = (
        f"range({numbers[0]}, {numbers[-1] + 1}{step})"
        if len(numbers) > 2 and len(steps) == 1
        else str(tuple(numbers))
    )
    element = (
        f"{name}[i]"
        if listed
        else f"{name}[str(i)]"
        if isinstance(layers, nn.ModuleDict)
        else f"{name}.get_submodule(str(i))"
    )
    return [f"for i in {listing}:", f"    {variable} = {element}"]


def access(module: nn.Module, name: str, tail: Tail) -> str:
    """The expression for a submodule of `module`, which is called `name`."""
    for part in tail:
        if part.isdigit() and isinstance(module, nn.ModuleList | nn.Sequential):
            name += f"[{part}]"
        elif part.isdigit() and isinstance(module, nn.ModuleDict):
            name += f'["{part}"]'
        elif part.isidentifier() and not keyword.iskeyword(part):
            name += f".{part}"
        else:
            name += f'.get_submodule("{part}")'
        module = module.get_submodule(part)
    return name


def _variable(container: Tail, taken: set[str]) -> str:
    """`layer` for `layers`; `child` where the container has no name that a singular could be made of."""
    word = container[-1] if container else ""
    single = word[:-1] if word.endswith("s") and len(word) > 2 and word[:-1].isidentifier() else "child"
    return next(
        n for n in itertools.chain([single], (f"{single}{i}" for i in itertools.count(2))) if n not in taken
    )
