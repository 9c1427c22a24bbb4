"""The place of the model's argument that an exception of its constructor names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from parallelizer.configuration.origins import Origins
from parallelizer.diagnostics.diagnostic import Span


def places(
    origins: Origins, model: Mapping[str, Any], reason: str, without: Collection[str]
) -> tuple[Span | None, tuple[Span, ...]]:
    """Where the argument stands that `reason` names, and the other arguments that overrides set. `without` are keys that are no
    arguments.

    A name in quotes that is a key of the model's is the place of the key, such as a misspelt one. Other names count where an
    override sets them. Then comes the first override of an argument, then the model's own config.
    """
    arguments = {path: path.rpartition(".")[2] for path in _paths("model", model, (*without, "_target_"))}
    given = origins.set_inside("model", without)
    words = re.findall(r"\w+", reason)
    quoted = [
        path for name in re.findall(r"'(\w+)'", reason) for path in arguments if arguments[path] == name
    ]
    for path in quoted:
        span = origins.key_span(path)
        if span is not None:
            return span, ()
    named = [path for name in words for path in arguments if arguments[path] == name]
    first = next((path for path in (*named, *given) if path in given), None)
    if first is not None:
        return given[first], tuple(span for path, span in given.items() if path != first)
    for path in named:
        span = origins.key_span(path)
        if span is not None:
            return span, ()
    return own_place(origins), ()


def own_place(origins: Origins) -> Span | None:
    """The model's `_target_`, or the user's own config of the model where that inherits its `_target_` from another file."""
    target, own = origins.span("model._target_"), origins.file_of("model")
    return own if target and own and not target.file.startswith("<") and own.file != target.file else target


def _paths(key: str, value: Mapping[str, Any], without: Collection[str] = ()) -> Iterator[str]:
    for name, below in value.items():
        if name not in without:
            yield f"{key}.{name}"
            if isinstance(below, Mapping):
                yield from _paths(f"{key}.{name}", below)
