"""Pretrained weights: from a folder of safetensors straight into each rank's slices.

Every rank reads the headers of all files, works out where the numbers of its own shards stand, and reads these. No rank
ever holds the model, or more of a tensor than its slice and one block. `saving` goes the same way back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.diagnostics.diagnostic import Diagnostic, Findings, PlanError, Span
from parallelizer.hugging_face import transformers_private
from parallelizer.hugging_face.buffers import compute_buffers
from parallelizer.hugging_face.model_tensors import ModelTensors, model_tensors
from parallelizer.hugging_face.placed import Placed, regions
from parallelizer.hugging_face.stored_files import Reader, StoredFile, StoredTensor
from parallelizer.hugging_face.transformers_private import ConversionError, WeightMap
from parallelizer.hugging_face.weight_folder import Checkpoint, open_checkpoint
from parallelizer.runtime.fail_together import together
from parallelizer.runtime.held_indices import share
from parallelizer.runtime.initialize import allocate
from parallelizer.runtime.state import reshard, restore_buffers, uncut
from parallelizer.runtime.state_dict import StateTensor, state_tensors
from parallelizer.styles.packing import Packing

T = TypeVar("T")

_ATTRIBUTE = "_parallelizer_pretrained"


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint, and where in it the tensors of one model stand."""

    checkpoint: Checkpoint
    map: WeightMap


def load_pretrained(model: nn.Module, folder: str | Path, *, device: str | torch.device) -> nn.Module:
    """Allocate a meta model's local shards on `device` and fill them from a folder of safetensors. Returns
    the model.

    It replaces `materialize` for a transformers model, parallel or not. Parameters keep the dtype of the
    model: a bfloat16 checkpoint is read into float32 masters exactly. Values that checkpoints do not
    contain, such as rotary frequencies, are computed by transformers' rules.

    Collective if ranks are initialised. Raises PlanError on every rank if the folder is wrong on any of
    them: with the model still on meta if the headers show the error, otherwise with values that must not be
    used.
    """
    pretrained = together(lambda: look_up(model_tensors(model), folder))
    allocate(model, device)
    together(lambda: _fill(model, pretrained))
    remember(model, pretrained)
    return model


def read_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Fill a transformers model, parallel or not, whose memory is allocated, from a folder of safetensors. Collective if
    ranks are initialised.

    Raises PlanError on every rank if the folder is wrong on any of them: before it is read if the headers show the error.
    """
    restore_buffers(model)
    reshard(model)
    pretrained = together(lambda: look_up(model_tensors(model), folder))
    together(lambda: _fill(model, pretrained))


def look_up(model: ModelTensors, folder: str | Path) -> Pretrained:
    """Where the tensors of a model stand in a folder: from the headers of its files alone.

    Raises PlanError with all that is missing, left over, misshapen or of another kind.
    """
    if model.plain is None:
        message = f"{model.kind} is no model of transformers, which pretrained weights are loaded into"
        raise PlanError([Diagnostic("weights-not-found", message, Span(str(folder)), "use model=hf")])
    checkpoint = open_checkpoint(folder)
    try:
        found = transformers_private.weight_map(model.plain, checkpoint.entries, model.shapes)
    except ConversionError as error:
        raise PlanError([conversion_failed(error, checkpoint.place)]) from None
    pretrained = Pretrained(checkpoint, found)
    check_complete(pretrained)
    findings = Findings()
    _check_keys(model.tensors, pretrained, findings)
    _check_tensors(model.tensors, pretrained, findings)
    if findings.items:
        raise PlanError(findings.items)
    return pretrained


def pretrained_of(model: nn.Module) -> Pretrained | None:
    """What a model was loaded from."""
    return model.__dict__.get(_ATTRIBUTE)


def remember(model: nn.Module, pretrained: Pretrained) -> None:
    """Attach it to the model, outside its parameters, buffers and modules."""
    model.__dict__[_ATTRIBUTE] = pretrained


def conversion_failed(error: ConversionError | str, place: Span) -> Diagnostic:
    """A conversion that cannot be done slice by slice."""
    help_text = "load it with from_pretrained of transformers, and save it with save_original_format=False"
    return Diagnostic("weights-conversion", str(error), place, help_text)


def check_complete(pretrained: Pretrained) -> None:
    """Raises PlanError when a conversion takes some of the checkpoint's numbers twice or not at all: they would be
    saved as whatever came last, or as zeros.
    """
    entries, found = pretrained.checkpoint.entries, pretrained.map
    unused, taken = set(found.unused), dict[str, int]()
    for source in found.sources.values():
        for piece in source.pieces:
            taken[piece.name] = taken.get(piece.name, 0) + math.prod(axis.count for axis in piece.axes)
    wrong = [k for k, e in entries.items() if k not in unused and taken.get(k, 0) != math.prod(e.shape)]
    if wrong:
        reason = f"transformers' conversion does not take every number of {_some(wrong)} once"
        raise PlanError([conversion_failed(reason, pretrained.checkpoint.place)])


def _check_keys(tensors: Mapping[str, StateTensor], pretrained: Pretrained, findings: Findings) -> None:
    sources, checkpoint = pretrained.map.sources, pretrained.checkpoint
    there = {id(one.tensor) for name, one in tensors.items() if name in sources}  # under any of its names
    missing = [
        name
        for name, one in tensors.items()
        if id(one.tensor) not in there and isinstance(one.tensor, nn.Parameter)
    ]
    # A buffer that the checkpoint lacks is computed, or found to be uncomputable then.
    if missing:
        message = f"{checkpoint.folder} has no values for {_some(missing)}"
        findings.error(
            "weights-missing", message, checkpoint.place, "is this a checkpoint of another architecture?"
        )
    left = [key for key in pretrained.map.unused if key not in pretrained.map.tolerated]
    if left:
        where = Span(str(checkpoint.file_of()[left[0]].path))
        message = f"the model has no place for {_some(left)}"
        findings.error("weights-unexpected", message, where, "is this a checkpoint of another architecture?")


def _check_tensors(tensors: Mapping[str, StateTensor], pretrained: Pretrained, findings: Findings) -> None:
    """Report tensors of other shapes and of other kinds of numbers, one finding for each kind and file."""
    files, entries = pretrained.checkpoint.file_of(), pretrained.checkpoint.entries
    shape_wrong: dict[Path, list[str]] = {}
    kind_wrong: dict[Path, list[str]] = {}
    for name, source in pretrained.map.sources.items():
        key = source.pieces[0].name if source.pieces else name
        made = "" if len(source.pieces) == 1 else f" and {len(source.pieces) - 1} more"
        if tuple(source.shape) != tensors[name].shape:
            text = f"{key}{made} {list(source.shape)}, wanted {list(tensors[name].shape)}"
            shape_wrong.setdefault(files[key].path, []).append(text)
        odd = [p.name for p in source.pieces if _kind(entries[p.name].dtype) != _kind(tensors[name].dtype)]
        if odd:
            text = f"{odd[0]} {_called(entries[odd[0]].dtype)}, wanted {_called(tensors[name].dtype)}"
            kind_wrong.setdefault(files[odd[0]].path, []).append(text)
    for path, texts in shape_wrong.items():
        message = f"{path.name} has other shapes than the model: {_some(texts)}"
        help_text = "build the model from the config.json of this folder, without other sizes"
        findings.error("weights-shape", message, Span(str(path)), help_text)
    for path, texts in kind_wrong.items():
        message = f"{path.name} has another kind of numbers than the model: {_some(texts)}"
        findings.error("weights-dtype", message, Span(str(path)), "are they quantized? dequantize them first")


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return (
            "float" if dtype.itemsize > 1 else str(dtype)
        )  # numbers of 8 bits mean nothing without their scales
    return "complex" if dtype.is_complex else "whole"


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(texts: Iterable[str]) -> str:
    texts = list(texts)
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


@torch.no_grad()
def _fill(model: nn.Module, pretrained: Pretrained) -> None:
    sources, files = pretrained.map.sources, pretrained.checkpoint.file_of()
    groups = names_of_each(model, sources)
    tensors = {id(one.tensor): one for one in state_tensors(model).values() if one.first in groups}
    with Reader() as reader:

        def position(one: StateTensor) -> tuple[str, int]:
            key = sources[groups[one.first][0]].pieces[0].name
            return files[key].path.name, files[key].entries[key].offset

        for one in sorted(tensors.values(), key=position):
            first, *others = groups[one.first]
            tensor, packing = one.tensor, one.packing
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            _read(reader, files, sources[first], tensor, packing, local)
            for other in others:
                if sources[other].pieces != sources[first].pieces:
                    again = torch.empty_like(local)
                    _read(reader, files, sources[other], tensor, packing, again)
                    if not torch.equal(local, again):
                        raise PlanError([_untied(pretrained, first, other)])
    compute_buffers(model, sources)


def names_of_each(model: nn.Module, sources: Mapping[str, Placed]) -> dict[str, list[str]]:
    """The names in `sources` of each tensor of the model, by its first name. Of a model that is cut into stages all tensors,
    in the same order on every rank.
    """
    names: dict[str, list[str]] = {}
    for name, one in state_tensors(uncut(model)).items():
        if name in sources:
            names.setdefault(one.first, []).append(name)
    return names


def _read(
    reader: Reader,
    files: Mapping[str, StoredFile],
    source: Placed,
    tensor: torch.Tensor,
    packing: Packing | None,
    local: torch.Tensor,
) -> None:
    """Fill `local` with this rank's share of a tensor."""
    for runs, here, _ in share(tensor, packing).boxes():
        for region in regions(source, [(run.original, run.count) for run in runs]):
            part = local[here][tuple(slice(at, at + count) for at, count in region.box)]
            entry: StoredTensor = files[region.name].entries[region.name]
            reader.read(files[region.name].path, entry, region.indices, region.as_stored(part))


def _untied(pretrained: Pretrained, first: str, other: str) -> Diagnostic:
    key = pretrained.map.sources[other].pieces[0].name
    message = (
        f"{first} and {other} are one parameter of the model, and have different values in the checkpoint"
    )
    help_text = "if they should differ, set tie_word_embeddings to false in config.json"
    return Diagnostic(
        "weights-untied", message, Span(str(pretrained.checkpoint.file_of()[key].path)), help_text
    )
