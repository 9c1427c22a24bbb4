"""Where a model's config asks for dropout, which a proof cannot run with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from parallelizer.configuration.setup import MODEL_KEYS, Setup
from parallelizer.diagnostics.diagnostic import Diagnostic

NO_RANDOM_NUMBERS = (
    "a proof needs a model without random numbers (dropout 0), that is not on the edge of overflow. Other causes are a power "
    "iteration (spectral_norm) that begins anew, statistics over few rows, a loss that compares rows by their order, and experts "
    "with a capacity, which drop tokens by their order: freeze them, or leave them out by the `tiny` arguments of the model's "
    "config"
)
"""The help of what a model that draws random numbers leads to."""


def place_dropout(setup: Setup, found: Diagnostic) -> Diagnostic:
    """A finding about random numbers, at the dropout of the model's config that causes them, where it has one. That of a model of
    transformers may be in the configuration that the model was built with, which the model carries.
    """
    if found.help != NO_RANDOM_NUMBERS:
        return found
    keys = list(_dropouts(setup.model))
    if not keys:
        carried = list(_dropouts(_carried(setup)))
        words = " ".join(f"++model.tiny.config.{key}=0" for key in carried)
        return dataclasses.replace(found, help=f"prove it without dropout: add {words}") if carried else found
    span, file = setup.origins.span(f"model.{keys[0]}"), setup.origins.file_of("model")
    wanted = [_as_yaml(key) for key in keys]
    if span is not None and span.file.startswith("<override"):
        help_text = "set " + " ".join(f"model.{key}=0" for key in keys)
    else:
        help_text = f"put `{'`, `'.join(wanted)}` into {file.file if file else 'the config of the model'}"
    help_text += f"; or `tiny: {{{', '.join(wanted)}}}` there, which proofs alone use"
    return dataclasses.replace(found, span=span, help=help_text)


def _carried(setup: Setup) -> Mapping[str, Any]:
    """The configuration that the model holds as `config`, if it is one of transformers."""
    made: Any = getattr(getattr(setup.build_model(), "config", None), "to_dict", dict)()
    return made if isinstance(made, Mapping) else {}


def _as_yaml(key: str) -> str:
    """A dotted key that is set to 0, as YAML writes it."""
    *around, last = key.split(".")
    text = f"{last}: 0"
    for name in reversed(around):
        text = f"{name}: {{{text}}}"
    return text


def _dropouts(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a model's arguments that are rates of dropout."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            if prefix or key not in MODEL_KEYS:
                yield from _dropouts(value, f"{prefix}{key}.")
        elif "drop" in str(key) and isinstance(value, int | float) and not isinstance(value, bool) and value:
            yield f"{prefix}{key}"
