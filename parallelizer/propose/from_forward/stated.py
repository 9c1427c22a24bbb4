"""Whole numbers that know which attribute they were read from, so that a `view(b, s, self.heads, -1)` tells which one it
would have divided.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from parallelizer.styles.attributes import pairs


class Stated(int):
    """A number that is made of attributes alone, by products and sums: their values by (module, name). A size of a module's
    argument counts as an attribute, `x.shape[-1]`. `over` are those that it was divided by.
    """

    names: Mapping[tuple[str, str], int]
    over: Mapping[tuple[str, str], int]

    def __new__(
        cls,
        value: int,
        names: Mapping[tuple[str, str], int],
        over: Mapping[tuple[str, str], int] | None = None,
    ) -> Stated:
        number = super().__new__(cls, value)
        number.names, number.over = names, over or {}
        return number

    def __mul__(self, other: Any) -> Any:
        return self._with(int(self) * other, other)

    def __add__(self, other: Any) -> Any:
        value = int(self) + other
        # A quotient of two numbers stays as it is where both are divided, and so does this: `heads // groups + 2`.
        return (
            Stated(value, self.names, self.over)
            if self.over and type(other) is int
            else self._with(value, other)
        )

    __rmul__, __radd__ = __mul__, __add__

    def __floordiv__(self, other: Any) -> Any:
        value = int(self) // other
        if isinstance(other, Stated) and not self.over and not other.over:
            return Stated(value, self.names, other.names)
        if type(other) is int and other > 0 and not self.over:
            return Stated(value, {name: n // other for name, n in self.names.items() if n % other == 0})
        return value

    def _with(self, value: Any, other: Any) -> Any:
        # What comes from a tensor's shape is that of a rank's part already: of such a mixture nothing is known.
        if not isinstance(other, Stated) or self.over or other.over:
            return value
        return Stated(value, {**self.names, **other.names})

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)

    def __reduce__(self) -> Any:
        return int, (int(self),)


_EINOPS = "_reconstruct_from_shape"
"""What einops makes of a pattern and sizes, kept by their values."""


@contextmanager
def stated(model: nn.Module) -> Iterator[None]:
    """Let the whole numbers that modules hold know their names, and those of the objects called `config` that they hold."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    einops = vars(sys.modules.get("einops.einops", sys))
    cached = einops.get(_EINOPS)
    try:
        # What einops keeps would answer with the number of the first module that has as many.
        if cached is not None and hasattr(cached, "__wrapped__"):
            einops[_EINOPS] = cached.__wrapped__
        for path, module in model.named_modules():
            _name(vars(module), path, "", changed)
            for name, value in list(vars(module).items()):
                if (
                    hasattr(value, "__dict__")
                    and not isinstance(value, nn.Module | type)
                    and name == "config"
                ):
                    _name(vars(value), "", f"{name}.", changed)
        yield
    finally:
        for holder, name, value in changed:
            holder[name] = value
        if cached is not None:
            einops[_EINOPS] = cached


def _name(
    holder: dict[str, Any], path: str, prefix: str, changed: list[tuple[dict[str, Any], str, Any]]
) -> None:
    for name, value in list(holder.items()):
        if pairs(value) and not prefix:
            changed.append((holder, name, value))
            holder[name] = tuple(
                (word, Stated(n, {(path, f"{name}.{word}"): n}) if type(n) is int and n > 1 else n)
                for word, n in value
            )
        if type(value) is int and not name.startswith("_") and value > 1:
            changed.append((holder, name, value))
            holder[name] = Stated(value, {(path, f"{prefix}{name}"): value})


def names_in(value: Any) -> dict[tuple[str, str], int]:
    """The attributes in a number, a slice, or a sequence of them."""
    if isinstance(value, Stated):
        return {} if value.over else dict(value.names)
    if isinstance(value, slice):
        value = (value.start, value.stop)
    found: dict[tuple[str, str], int] = {}
    for each in value if isinstance(value, tuple | list) else ():
        found.update(names_in(each))
    return found
