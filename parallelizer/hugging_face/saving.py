"""Weights saved as safetensors that `from_pretrained` loads: the files that a model was loaded from, byte for byte
where nothing was trained.

One rank writes. Parameters go to it part by part, each rank's share of a part as bytes, so that it never holds more than a
part. Everything is written into a folder beside the wanted one, which gets its name when it is whole.
"""

from __future__ import annotations

import copy
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.hugging_face import transformers_private
from parallelizer.hugging_face.model_tensors import ModelTensors, model_tensors
from parallelizer.hugging_face.placed import Placed, regions
from parallelizer.hugging_face.stored_files import Reader, Writer, described
from parallelizer.hugging_face.transformers_private import ConversionError
from parallelizer.hugging_face.weight_folder import INDEX, SINGLE, Checkpoint
from parallelizer.hugging_face.weights import (
    Pretrained,
    check_complete,
    conversion_failed,
    names_of_each,
    pretrained_of,
)
from parallelizer.runtime.fail_together import together
from parallelizer.runtime.held_indices import Share, holders, share
from parallelizer.runtime.state import device_of, reshard, restore_buffers, state_of, uncut
from parallelizer.runtime.state_dict import state_tensors
from parallelizer.styles.packing import Packing
from parallelizer.torch_private import in_written_classes

PART = 16 << 20
"""Bytes of a tensor that are sent and written at once: what the writing rank needs beside its own shards."""

LARGEST_FILE = 5 * 10**9
"""Bytes of a file of a model that came from none."""

Box = Sequence[tuple[int, int]]
"""(start, count) for each dimension."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def save_pretrained(model: nn.Module, folder: str | Path, *, replace: bool = False) -> None:
    """Write a transformers model, parallel or not, as a folder that `from_pretrained` loads.

    A model that was loaded from a folder is saved in the same form: the same files, keys, layout and
    dtypes, with copies of its other files (configuration, tokenizer) and of tensors that the model does not
    use. Another model is saved under transformers' own keys in files of up to 5 GB, in the dtype of its
    parameters, with its configuration.

    With `replace`, an existing folder that contains a model is replaced when the new one is complete.
    Collective if ranks are initialised. Raises PlanError on every rank if the folder exists already or
    cannot be written; no new files are left, and existing ones are unchanged.
    """
    target = Path(folder)
    restore_buffers(model)
    reshard(model)
    layout = together(
        lambda: check_savable(model_tensors(model), target, pretrained_of(model), replace=replace)
    )
    state = state_of(model)
    writer = int(state.mesh.mesh.min()) if state is not None else 0
    leads = not dist.is_initialized() or dist.get_rank() == writer
    with ExitStack() as cleaning:
        beside = together(lambda: _begin(model, layout, target, cleaning) if leads else None)
        files = None if beside is None else _Files(layout, beside, target)
        _stream(model, layout, writer, files)
        together(lambda: _finish(files, beside, target, replace) if files and beside else None)


@dataclass(frozen=True)
class Layout:
    """The files to write, and where the model's tensors go: the checkpoint's where there was one."""

    pretrained: Pretrained
    fresh: bool

    @property
    def checkpoint(self) -> Checkpoint:
        return self.pretrained.checkpoint


def check_savable(
    model: ModelTensors, folder: str | Path, pretrained: Pretrained | None, *, replace: bool = False
) -> Layout:
    """How a model will be saved. `pretrained` is what it was or will be loaded from, and
    with `replace` a model that lies there already is no hindrance.

    Raises PlanError when it cannot be: worth knowing before anything is trained for it.
    """
    target = Path(folder)
    _check_target(target, replace)
    if model.plain is None:
        message = f"{model.kind} is no model of transformers, and has no form that from_pretrained loads"
        raise PlanError([Diagnostic("weights-unwritable", message, Span(str(target)), "use model=hf")])
    if pretrained is not None:
        return Layout(pretrained, False)
    try:
        keys = transformers_private.written_keys(model.plain, model.tensors)
        found = transformers_private.weight_map(model.plain, keys, model.shapes)
    except ConversionError as error:
        raise PlanError([conversion_failed(error, Span(str(target)))]) from None
    made = Pretrained(_files_for(keys, target), found)
    check_complete(made)
    lost = [key for key in found.unused if key in keys]
    if lost:
        reason = f"transformers would save {lost[0]} and not load it"
        raise PlanError([conversion_failed(reason, Span(str(target)))])
    return Layout(made, True)


def _check_target(target: Path, replace: bool) -> None:
    """Raises PlanError when nothing can be saved under this name."""
    is_model_folder = (target / "config.json").is_file() and not target.is_symlink()
    if (target.exists() or target.is_symlink()) and not (replace and is_model_folder):
        raise _unwritable(target, "it exists already", "name a new folder, or remove this one")
    parent = next(p for p in target.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise _unwritable(target, f"{parent} cannot be written to", "name another folder")


def _files_for(keys: Mapping[str, Placed], folder: Path) -> Checkpoint:
    """As transformers names and fills them: in order of the keys, a new file when one is full."""
    groups: list[list[str]] = [[]]
    size = 0
    for key, tensor in keys.items():
        own = tensor.numel() * tensor.dtype.itemsize
        if groups[-1] and size + own > LARGEST_FILE:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += own
    many = len(groups) > 1
    names = [
        f"model-{i:05}-of-{len(groups):05}.safetensors" if many else SINGLE for i in range(1, len(groups) + 1)
    ]
    files = {
        name: described(((key, keys[key].dtype, tuple(keys[key].shape)) for key in group), folder / name)
        for name, group in zip(names, groups, strict=True)
    }
    if not many:
        return Checkpoint(folder, files, None)
    total = sum(t.numel() * t.dtype.itemsize for t in keys.values())
    placed = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    index = {
        "metadata": {"total_parameters": sum(t.numel() for t in keys.values()), "total_size": total},
        "weight_map": dict(sorted(placed.items())),
    }
    return Checkpoint(folder, files, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _begin(model: nn.Module, layout: Layout, target: Path, cleaning: ExitStack) -> Path:
    """A folder beside the target with all but the weights in it; it is removed at the end if it is still there."""
    with _in_words(target):
        parent = target.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        beside = parent / f".{target.name}.{secrets.token_hex(4)}.part"
        beside.mkdir()
        cleaning.callback(shutil.rmtree, beside, ignore_errors=True)
        if layout.fresh:
            _describe(model, beside)
        else:
            for path in sorted(layout.checkpoint.folder.iterdir()):
                if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS):
                    shutil.copyfile(path, beside / path.name)
        if layout.checkpoint.index is not None:
            (beside / INDEX).write_text(layout.checkpoint.index)
    return beside


def _describe(model: Any, folder: Path) -> None:
    """The configuration of a model that came from no folder."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(in_written_classes(model)).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


@torch.no_grad()
def _stream(model: nn.Module, layout: Layout, writer: int, files: _Files | None) -> None:
    """Every tensor of the model, part by part; `files` are the writing rank's."""
    sources, entries = layout.pretrained.map.sources, layout.checkpoint.entries
    every = state_tensors(uncut(model))
    own = {name: one for name, one in state_tensors(model).items() if name == one.first}
    for name, (first, *others) in names_of_each(model, sources).items():
        places = [sources[first], *(sources[n] for n in others if sources[n].pieces != sources[first].pieces)]
        dtypes = {entries[piece.name].dtype for place in places for piece in place.pieces}
        wire = dtypes.pop() if len(dtypes) == 1 else every[name].dtype
        gatherer = _gatherer(model, name, every[name].tensor, writer)
        for box in parts(every[name].shape, wire.itemsize):
            block = None
            if name in own:
                block = _gather(own[name].tensor, own[name].packing, box, wire, gatherer)
            block = _handed_on(block, box, wire, gatherer, writer, device_of(model))
            if files is not None and block is not None:
                files.write(places, box, block)


def _gatherer(model: nn.Module, name: str, tensor: torch.Tensor, writer: int) -> int:
    """The rank that gathers a tensor: the writer, or the rank in its place among those that have the tensor's stage."""
    state = state_of(model)
    if state is None or state.pipeline is None:
        return writer
    holders = state.pipeline.holders(name, buffer=not isinstance(tensor, nn.Parameter))
    at = (state.mesh.mesh_dim_names or ()).index("pp")
    line = state.mesh.mesh.movedim(at, 0).flatten(1)[:, 0]  # the writer has the least number of all ranks
    return int(line[holders[0]])


def _handed_on(
    block: torch.Tensor | None, box: Box, wire: torch.dtype, gatherer: int, writer: int, device: torch.device
) -> torch.Tensor | None:
    """The block that another rank has gathered, on the writing rank; None on the others."""
    if gatherer == writer or dist.get_rank() not in (gatherer, writer):
        return block
    if block is not None:
        dist.send(block.to(device).view(-1).view(torch.uint8), writer)
        return None
    sent = torch.empty([count for _, count in box], dtype=wire, device=device)
    dist.recv(sent.view(-1).view(torch.uint8), gatherer)
    return sent.to("cpu")


def parts(shape: Sequence[int], itemsize: int, most: int = PART) -> Iterator[Box]:
    """Boxes of at most `most` bytes, or of one number, that make up a tensor: whole rows as far as they go."""
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:]) * itemsize
    if row > most:
        for i in range(shape[0]):
            yield from (((i, 1), *inner) for inner in parts(shape[1:], itemsize, most))
    elif row:
        count = most // row
        for start in range(0, shape[0], count):
            yield ((start, min(count, shape[0] - start)), *((0, size) for size in shape[1:]))


def _gather(
    tensor: torch.Tensor, packing: Packing | None, box: Box, wire: torch.dtype, writer: int
) -> torch.Tensor | None:
    """A part of a tensor, in its original order, on the writing rank; None on the others. Every rank calls it."""
    me = dist.get_rank() if dist.is_initialized() else writer
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Offloaded parameters lie on the CPU, and NCCL takes no tensor from there.
    device = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else local.device
    block = torch.empty([count for _, count in box], dtype=wire) if me == writer else None
    for rank in holders(tensor, writer):
        if me not in (rank, writer):
            continue
        own = share(tensor, packing, rank if isinstance(tensor, DTensor) else None).within(box)
        if 0 in own.shape:
            continue
        if rank == writer:
            piece = _taken(local, own, wire)
        elif me == rank:
            dist.send(_taken(local, own, wire).to(device).reshape(-1).view(torch.uint8), writer)
            continue
        else:
            piece = torch.empty(own.shape, dtype=wire, device=device)
            dist.recv(piece.view(-1).view(torch.uint8), rank)
        if block is not None:
            for runs, _, beside in own.boxes():
                at = tuple(
                    slice(r.original - s, r.original - s + r.count)
                    for r, (s, _) in zip(runs, box, strict=True)
                )
                block[at] = piece[beside].to("cpu")
    return block


def _taken(local: torch.Tensor, own: Share, dtype: torch.dtype) -> torch.Tensor:
    """The runs of a share put side by side, contiguous."""
    taken = torch.empty(own.shape, dtype=dtype, device=local.device)
    for _, here, beside in own.boxes():
        taken[beside] = local[here]
    return taken


class _Files:
    """The files of the writing rank. After a failure it takes what comes and drops it, because the others go on
    sending; `close` raises what has failed, in words.
    """

    def __init__(self, layout: Layout, beside: Path, target: Path) -> None:
        self._files, self._target = layout.checkpoint.file_of(), target
        self._failure: PlanError | None = None
        self._closing = ExitStack()
        self._writer: Writer | None = None
        with self._kept():
            self._writer = self._closing.enter_context(Writer(layout.checkpoint.files.values(), beside))
            if not layout.fresh:
                _carry_over(layout, self._writer)

    def write(self, places: Sequence[Placed], box: Box, block: torch.Tensor) -> None:
        """Write a part of a tensor wherever it belongs."""
        with self._kept():
            for place in places:
                for region in regions(place, box):
                    if self._writer is None or self._failure is not None:
                        return
                    stored_file = self._files[region.name]
                    entry = stored_file.entries[region.name]
                    part = block[tuple(slice(at, at + count) for at, count in region.box)].to(entry.dtype)
                    self._writer.write(stored_file.path.name, entry, region.indices, region.as_stored(part))

    def close(self) -> None:
        """Close them, on the disk. Raises PlanError when this or anything before has failed."""
        with self._kept():
            self._closing.close()
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            with _in_words(self._target):
                yield
        except PlanError as error:
            self._failure = self._failure or error


def _carry_over(layout: Layout, writer: Writer) -> None:
    """Copy what the model does not use."""
    files = layout.checkpoint.file_of()
    with Reader() as reader:
        for key in layout.pretrained.map.unused:
            stored_file = files[key]
            entry = stored_file.entries[key]
            for box in parts(entry.shape, entry.dtype.itemsize):
                indices = [(start, count, 1) for start, count in box]
                block = torch.empty([count for _, count in box], dtype=entry.dtype)
                reader.read(stored_file.path, entry, indices, block)
                writer.write(stored_file.path.name, entry, indices, block)


def _finish(files: _Files, beside: Path, target: Path, replace: bool) -> None:
    files.close()
    with _in_words(target):
        _check_target(target, replace)
        if not target.exists():
            os.rename(beside, target)
            return
        old = beside.with_suffix(".old")
        os.rename(target, old)
        try:
            os.rename(beside, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _in_words(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        help_text = "nothing was left there; free space for it, or name another folder"
        raise _unwritable(target, reason, help_text) from None


def _unwritable(target: Path, reason: str, help_text: str) -> PlanError:
    message = f"the model cannot be saved as {target}: {reason}"
    return PlanError([Diagnostic("weights-unwritable", message, Span(str(target)), help_text)])
