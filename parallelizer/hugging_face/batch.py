"""The batch of a transformers model whose inputs are not the tokens that its config names: the entries and the loss, from
the sizes in the model's configuration.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from parallelizer.compiler.observe.calling import inputs_of, logits_of
from parallelizer.losses import features_of
from parallelizer.runtime.eval_mode import eval_mode

CROSS_ENTROPY = "parallelizer.losses.cross_entropy"
CLASSIFICATION = "parallelizer.losses.classification"
SQUARED_ERROR = "parallelizer.losses.squared_error"

ROWS, TOKENS = 2, 24
"""Sizes of the batch that shows which inputs a model takes, and what it returns."""

Entry = dict[str, Any]


def derived(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Entry], str | None]:
    """The batch entries of a model on meta, and its loss; the loss is None where `batch` fits the model already.

    The model's first input is derived if `batch` lacks it, and `decoder_input_ids` of an encoder with a decoder. Of several
    shapes that an input may have, it is the first with which forward runs. Where labels of the tokens do not fit what
    the model returns, so are `labels`: of whole rows, or the features of a model without a head.
    """
    known: Any = model
    names = inspect.signature(model.forward).parameters
    first = str(known.main_input_name)
    kept = {name: dict(entry) for name, entry in batch.items() if name in names or name == "labels"}
    tokens = {"shape": ["batch", "sequence"], "dtype": "int64", "range": [0, 2]}
    tokens = dict(batch.get("input_ids") or tokens)
    if getattr(known.config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        kept.setdefault("decoder_input_ids", tokens)
    kept.pop("labels", None)
    shapes = _shapes(first, known.config) if first not in kept else [[]]
    for shape in shapes:
        entries = {first: {"shape": shape, "dtype": "float32"}, **kept} if shape else kept
        output = _output(model, entries)
        if output is not None:
            labels, loss = _labels(output, batch.get("labels"))
            return {**entries, "labels": labels}, loss
    return {name: dict(entry) for name, entry in batch.items()}, None


def _shapes(name: str, config: Any) -> Iterator[list[Any]]:
    """The shapes that an input of this name may have, by the sizes that configurations of transformers call so."""
    channels = _size(config, "num_channels", "in_channels", "in_chans") or [3]
    image = _size(config, "image_size", "input_size")
    frames = _size(config, "num_frames", "frames_per_clip")
    if name.startswith("pixel_values") and image:
        height, width = image if len(image) == 2 else image * 2
        yield ["batch", *channels, height, width]
        if frames:
            yield ["batch", *frames, *channels, height, width]
    bins = _size(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "num_mels")
    positions = _size(config, "max_source_positions")
    lengths = [[n * 2 for n in positions], _size(config, "max_length"), [64]]
    for length in lengths if bins else ():
        if length:
            yield ["batch", *length, *bins]
            yield ["batch", *bins, *length]
    strides = _sizes(config, "conv_stride")
    if strides:  # samples of sound
        yield ["batch", math.prod(strides) * (TOKENS + 2)]


def _sizes(config: Any, *names: str) -> list[int]:
    """The first of some numbers, or lists of numbers, that a configuration or one inside of it has."""
    inner = [getattr(config, part, None) for part in ("vision_config", "audio_config", "backbone_config")]
    for each in (config, *filter(None, inner)):
        for name in names:
            value = getattr(each, name, None)
            if isinstance(value, int):
                return [value]
            if isinstance(value, list | tuple) and value and all(isinstance(n, int) for n in value):
                return list(value)
    return []


def _size(config: Any, *names: str) -> list[int]:
    return _sizes(config, *names)[:2]


@torch.no_grad()
def _output(model: nn.Module, entries: Mapping[str, Entry]) -> Any:
    """What the model returns for such a batch, on meta; None where its forward fails."""
    words = {"batch": ROWS, "sequence": TOKENS}
    batch = {
        name: torch.empty(
            [words.get(n, n) for n in entry["shape"]],
            dtype=getattr(torch, entry.get("dtype", "int64")),
            device="meta",
        )
        for name, entry in entries.items()
    }
    try:
        with eval_mode(model):
            return model(**inputs_of(model, batch))
    except Exception:  # whatever the forward of a model raises
        return None


def _labels(output: Any, written: Mapping[str, Any] | None) -> tuple[Entry, str]:
    """The labels that fit what the model returns, and their loss; those of the batch, as far as they fit."""
    found = logits_of(output)
    if not isinstance(found, torch.Tensor):
        features = features_of(output)
        return {"shape": [_word(at, n) for at, n in enumerate(features.shape)], "dtype": "float32"}, (
            SQUARED_ERROR
        )
    *lead, classes = found.shape
    most = min(classes, (written or {}).get("range", [0, classes])[1])
    labels = {
        "shape": [_word(at, n) for at, n in enumerate(lead)], "dtype": "int64", "range": [0, most], "ignore": -100,
    }  # fmt: skip
    return labels, CLASSIFICATION if len(lead) == 1 else CROSS_ENTROPY


def _word(at: int, size: int) -> str | int:
    return "batch" if at == 0 else "sequence" if size == TOKENS else size
