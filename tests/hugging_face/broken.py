"""Folders of weights that are broken in one way each, by the code that says so."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.hugging_face.saving import save_pretrained
from parallelizer.hugging_face.weight_folder import INDEX, SINGLE
from parallelizer.hugging_face.weights import load_pretrained
from tests.hugging_face.folders import config_of, on_meta, safetensors, write


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder's only file in place."""
    tensors = safetensors.load_file(folder / SINGLE)
    edit(tensors)
    safetensors.save_file(tensors, folder / SINGLE, {"format": "pt"})


def header_edited(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a folder's only file, and leave the numbers."""
    data = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def index_edited(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def cut(path: Path, to: int = -10) -> None:
    """Take the last bytes of a file away."""
    path.write_bytes(path.read_bytes()[:to])


def quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


def second(folder: Path) -> Path:
    [path] = folder.glob(f"{SECOND}*")
    return path


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
LLAMA = "llama", {}
MANY = "llama", {"file_size": "20KB"}
SECOND = "model-00002-of-"

BREAKS: dict[str, tuple[tuple[str, dict[str, Any]], Callable[[Path], Any], str, str]] = {
    "a key is gone": (LLAMA, lambda f: edited(f, lambda t: t.pop(NORM)), "weights-missing", NORM),
    "a key is left over": (
        LLAMA, lambda f: edited(f, lambda t: t.update(extra=torch.ones(2))), "weights-unexpected", "extra"
    ),
    "another shape": (
        LLAMA, lambda f: edited(f, lambda t: t.update({NORM: torch.ones(31)})), "weights-shape", f"{NORM} [31], wanted [32]"
    ),
    "an expert is gone": (
        ("mixtral", {}),
        lambda f: edited(f, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight")),
        "weights-shape", "model.layers.1.block_sparse_moe.experts.0.w2.weight and 2 more [3, 32, 48], wanted [4, 32, 48]",
    ),
    "an expert of another shape": (
        ("mixtral", {}),
        lambda f: edited(f, lambda t: t.update({"model.layers.1.block_sparse_moe.experts.3.w2.weight": torch.ones(32, 47)})),
        "weights-conversion", "MergeModulelist fails",
    ),
    "whole numbers": (
        LLAMA, lambda f: edited(f, lambda t: t.update({UP: t[UP].char()})), "weights-dtype", f"{UP} int8, wanted float32"
    ),
    "numbers of 8 bits": (
        LLAMA, lambda f: edited(f, lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)})), "weights-dtype", "float8_e4m3fn"
    ),
    "quantized": (LLAMA, quantized, "weights-dtype", "quantized (fp8)"),
    "no folder": (LLAMA, lambda f: f.rename(f.parent / "elsewhere"), "weights-not-found", "there is no folder"),
    "no weights": (
        LLAMA, lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), "weights-not-found", "it has pytorch_model.bin"
    ),
    "a file of several is gone": (MANY, lambda f: second(f).unlink(), "weights-not-found", SECOND),
    "cut off": (LLAMA, lambda f: cut(f / SINGLE), "weights-unreadable", f"{SINGLE} cannot be read: it has "),
    "too long": (LLAMA, lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"x"), "weights-unreadable", "it has"),
    "one of several is cut off": (MANY, lambda f: cut(second(f)), "weights-unreadable", SECOND),
    "cut off in its header": (LLAMA, lambda f: cut(f / SINGLE, to=100), "weights-unreadable", "cut off"),
    "empty": (LLAMA, lambda f: (f / SINGLE).write_bytes(b""), "weights-unreadable", "no header"),
    "a pointer of Git LFS": (
        LLAMA, lambda f: (f / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "weights-unreadable", "no header",
    ),
    "a header that is no JSON": (
        LLAMA, lambda f: (f / SINGLE).write_bytes(struct.pack("<Q", 9) + b"not json!"),
        "weights-unreadable", "none of safetensors",
    ),
    "a header without shapes": (
        LLAMA, lambda f: header_edited(f, lambda h: h[NORM].pop("shape")), "weights-unreadable", "none of safetensors"
    ),
    "numbers for two tensors": (
        LLAMA, lambda f: header_edited(f, lambda h: h[NORM].update(data_offsets=[0, 128])), "weights-unreadable", "does not begin"
    ),
    "a dtype of tomorrow": (
        LLAMA, lambda f: header_edited(f, lambda h: h[NORM].update(dtype="F4")), "weights-unreadable", "the dtype F4"
    ),
    "an index that is no JSON": (MANY, lambda f: (f / INDEX).write_text("{"), "weights-unreadable", "no index"),
    "an index without a map": (MANY, lambda f: (f / INDEX).write_text("{}"), "weights-unreadable", "no index"),
    "an index that points out of the folder": (
        MANY, lambda f: index_edited(f, lambda m: m.update({NORM: "../x.safetensors"})), "weights-unreadable", "no index"
    ),
    "an index that is wrong": (
        MANY, lambda f: index_edited(f, lambda m: m.update({"nowhere.weight": second(f).name})),
        "weights-unreadable", "has no nowhere.weight",
    ),
    "tied and not the same": (
        ("llama_tied", {}), lambda f: edited(f, lambda t: t.update({"lm_head.weight": torch.ones(96, 32)})),
        "weights-untied", "lm_head",
    ),
}  # fmt: skip
"""By what is wrong: the model and how it is written, what breaks it, the code, and words of the message."""


def broken_model(what: str, here: Path) -> tuple[nn.Module, Path]:
    """A model on meta, and the broken folder of its weights."""
    (name, options), harm, *_ = BREAKS[what]
    folder = write(here / "model", name, **options)
    harm(folder)
    return on_meta(config_of(name)), folder


def found(what: str, here: Path) -> tuple[Diagnostic, ...]:
    """What is said when the weights of a broken folder are loaded."""
    model, folder = broken_model(what, here)
    return raised(lambda: load_pretrained(model, folder, device="cpu"))


def raised(call: Callable[[], Any]) -> tuple[Diagnostic, ...]:
    try:
        call()
    except PlanError as error:
        return error.diagnostics
    return ()


def report(code: str, here: Path) -> tuple[Diagnostic, ...]:
    """What is said for one of the codes."""
    if code == "weights-unwritable":
        folder = write(here / "model", "llama")
        model = load_pretrained(on_meta(config_of("llama")), folder, device="cpu")
        return raised(lambda: save_pretrained(model, folder))
    return found(next(what for what, (*_, own, _) in BREAKS.items() if own == code), here)
