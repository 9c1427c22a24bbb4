"""Lines of exported code as data: a style in plain Python on torch's public names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

MODULE = "<module>"
"""Stands for the module in a statement's text."""

WIDTH = 110
"""The longest line of exported code."""


@dataclass(frozen=True)
class Statement:
    """`name(arguments)` as text; without arguments as None, `name` is the whole text.

    With `parallel_style` it makes a ParallelStyle of torch's, and goes into a call of `parallelize_module`. `copies` are the
    functions and classes of this package that the text names: the file gets their sources.
    """

    name: str
    arguments: tuple[str, ...] | None = ()
    parallel_style: bool = False
    copies: tuple[Any, ...] = ()

    def text(self, module: str = "") -> str:
        """On one line."""
        arguments = "" if self.arguments is None else f"({', '.join(self.arguments)})"
        return f"{self.name}{arguments}".replace(MODULE, module)

    def lines(self, indent: str, module: str = "", before: str = "", after: str = "") -> list[str]:
        """On one line where it fits, else an argument a line."""
        line = f"{indent}{before}{self.text(module)}{after}"
        if len(line) <= WIDTH or not self.arguments:
            return [line]
        name, arguments = self.name, [a.replace(MODULE, module) for a in self.arguments]
        inside = f"{indent}    {', '.join(arguments)}"
        if len(inside) <= WIDTH and "=" not in arguments[-1]:
            return [f"{indent}{before}{name}(", inside, f"{indent}){after}"]
        return [f"{indent}{before}{name}(", *(f"{indent}    {a}," for a in arguments), f"{indent}){after}"]


def calls(function: Any, *arguments: str) -> Statement:
    """A call of one of our own functions on the module; the file gets the function's source."""
    return Statement(function.__name__, (MODULE, *arguments), copies=(function,))


def placement_text(value: Any) -> str:
    """A placement of torch's as an expression; anything else as its `repr`."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(value, Shard):
        return f"Shard({value.dim})"
    if isinstance(value, Replicate | Partial):
        return f"{type(value).__name__}()"
    return repr(value)


def placements_text(placements: Iterable[TorchPlacement]) -> str:
    """A list of placements."""
    return f"[{', '.join(map(placement_text, placements))}]"


def by_name_text(placements: Mapping[str, Sequence[TorchPlacement]]) -> str:
    """A dictionary of lists of placements."""
    return dict_text({name: placements_text(each) for name, each in placements.items()})


def dict_text(items: Mapping[str, str]) -> str:
    """A dictionary whose values are expressions already."""
    return "{" + ", ".join(f'"{key}": {value}' for key, value in items.items()) + "}"


def list_text(texts: Sequence[str]) -> str:
    """A list of strings."""
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"


def tuple_text(texts: Sequence[str]) -> str:
    """A tuple of expressions; one alone stands without parentheses."""
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
