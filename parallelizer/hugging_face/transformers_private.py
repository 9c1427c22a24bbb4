"""What is used of transformers beyond its public interface, each with its reason. Written for transformers 5.23.

`from_pretrained` and `save_pretrained` are public, and hold the whole model on a rank, or all of a sharded tensor. How
they rename and convert the tensors of a checkpoint (`conversion_mapping`, `core_model_loading`) has no public entrance,
and is different for every family, so that it is asked here and not written again. It waits for a public function
that gives the conversion of one model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from parallelizer.hugging_face.placed import NotPlaced, Placed, stored


class Sized(Protocol):
    """What of a stored tensor decides where its numbers go."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class ConversionError(Exception):
    """Tensors of a checkpoint that cannot be brought into the model's form slice by slice."""

    def __init__(self, keys: Iterable[str], target: str, reason: str) -> None:
        self.keys, self.target, self.reason = list(keys), target, reason
        super().__init__(self.keys, target, reason)

    def __str__(self) -> str:
        return f"{self.reason}, on the way from {self.keys[0]} to {self.target}"


@dataclass(frozen=True)
class WeightMap:
    """Where a model's tensors stand in a checkpoint, by name in the model, and the keys that nothing of it needs.

    `tolerated` are the unused keys that transformers ignores for this model.
    """

    sources: Mapping[str, Placed]
    unused: tuple[str, ...]
    tolerated: frozenset[str]


def weight_map(model: Any, checkpoint: Mapping[str, Sized], shapes: dict[str, torch.Size]) -> WeightMap:
    """What `convert_and_load_state_dict_in_model` does, on tensors without values.

    `model` is in the classes that it was written with, by whose names transformers looks conversions up; `shapes` has the
    entries of its state dict. Raises ConversionError.
    """
    leaves = {key: stored(key, one.shape, one.dtype) for key, one in checkpoint.items()}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, Placed] = {}
    conversions: dict[str, tuple[Any, list[str]]] = {}
    unused = []
    for key in sorted(leaves, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, shapes)
        if name not in shapes and key in shapes:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, shapes)
        if name not in shapes or (pattern is None and name in sources):
            unused.append(key)
        elif pattern is None:
            sources[name] = leaves[key]
        else:
            if name not in conversions:
                conversions[name] = copy.deepcopy(by_pattern[pattern]), []
            converter, keys = conversions[name]
            converter.add_tensor(name, key, pattern, leaves[key])
            keys.append(key)
    for first, (converter, keys) in conversions.items():
        sources.update(_converted(converter, keys, first, model))
    return WeightMap(sources, tuple(unused), frozenset(filter(_ignored(model), unused)))


def _converted(converter: Any, keys: list[str], name: str, model: Any) -> dict[str, Placed]:
    try:
        made = converter.convert(name, model=model, config=model.config)
    except NotPlaced as error:
        doing = ", ".join(type(op).__name__ for op in converter.operations)
        raise ConversionError(keys, name, f"{doing} needs whole tensors ({error})") from None
    except Exception as error:  # whatever transformers' operations raise for shapes that they did not expect
        doing = ", ".join(type(op).__name__ for op in converter.operations)
        raise ConversionError(keys, name, f"{doing} fails: {error}") from None
    found = {target: value[0] if isinstance(value, list) else value for target, value in made.items()}
    if not all(isinstance(value, Placed) for value in found.values()):
        raise ConversionError(keys, name, "the conversion makes numbers of its own")
    return found


def _ignored(model: Any) -> Callable[[str], bool]:
    """As `_adjust_missing_and_unexpected_keys` of a model chooses: old buffers, and what a family names itself."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return lambda key: any(re.search(pattern, key) for pattern in patterns)


def written_keys(model: Any, tensors: Mapping[str, Sized]) -> dict[str, Placed]:
    """The keys and shapes under which transformers saves a model that came from no checkpoint, `tensors` being its
    state dict. Raises ConversionError.
    """
    from transformers.core_model_loading import revert_weight_conversion

    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    kept: dict[str, Any] = {
        name: stored(name, one.shape, one.dtype)
        for name, one in tensors.items()
        if name not in ignored and name not in tied
    }
    try:
        found: dict[str, Any] = revert_weight_conversion(model, kept)
    except NotPlaced as error:
        raise ConversionError(
            kept, type(model).__name__, f"its conversion needs whole tensors ({error})"
        ) from None
    return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


def fill_own_buffers(module: nn.Module, inside: Any) -> None:
    """Let transformers compute what a module keeps in no checkpoint, as rotary frequencies, in place.

    It does that in `_init_weights`, together with the random values of parameters; those of `module` should be on
    meta, where that costs nothing. `inside` is the innermost transformers model around the module.
    """
    with torch.no_grad():
        inside._init_weights(module)


def routers(model: Any) -> list[tuple[str, nn.Module, int]]:
    """The path of each router of a model, itself, and where in its output the logits stand. `_can_record_outputs` of an
    architecture is the only place that says which modules `output_router_logits` collects.
    """
    found: dict[str, tuple[str, nn.Module, int]] = {}
    for path, inside in model.named_modules():
        named = getattr(type(inside), "_can_record_outputs", None)
        recorded = named.get("router_logits") if isinstance(named, dict) else None
        target: Any = getattr(recorded, "target_class", None)
        if recorded is None or target is None:
            continue
        name = str(recorded.layer_name or "").strip(".")
        within = f".{name}." if name else "."
        for inner, module in inside.named_modules():
            if isinstance(module, target) and within in f".{inner}.":
                where = f"{path}.{inner}" if path else inner
                found[where] = where, module, int(recorded.index)
    return list(found.values())
