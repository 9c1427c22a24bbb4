"""A causal language model of transformers, from a folder or hub id, or from an architecture and its sizes."""

from __future__ import annotations

import inspect
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import nn

from parallelizer.child import new_process
from parallelizer.diagnostics.nearest import nearest
from parallelizer.hugging_face.architecture import NOTHING, missing_folder
from parallelizer.hugging_face.extra import not_installed

IMPLEMENTATION = "parallelizer"
"""The name under which our attention and masks are registered with transformers."""

CLASSES = (
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification", "AutoModelForVideoClassification", "AutoModelForAudioClassification", "AutoModel",
)  # fmt: skip
"""The classes of transformers that choose a model, in the order in which one is advised."""


def causal_lm(
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    auto: str = "AutoModelForCausalLM",
    attention: str = IMPLEMENTATION,
    experts: str | None = None,
    dtype: str = "float32",
) -> nn.Module:
    """A transformers model without pretrained values, on the device that is the default, as on meta.

    `name` is a local folder or a hub id, of which the configuration alone is read; `config` says `model_type` and
    sizes, or changes those of `name`. `auto` is the class of transformers that chooses the model's. `attention` is an
    attention implementation; ours is transformers' sdpa with masks that know how context parallelism deals out a
    sequence. `experts` is how a mixture of experts computes: None leaves it to transformers, which takes `grouped_mm`;
    `batched_mm` copies the weights of an expert for every token, and `eager` reads values, so that it cannot be traced.
    The cache of keys and values, of no use in training, is switched off.

    Raises ValueError when neither or an unknown architecture is given, a folder or id that has no configuration, or
    an attention or class that the model does not have, and ImportError without transformers.
    """
    transformers = _transformers()
    register()
    with _quiet(transformers):
        return _build(transformers, name, dict(config or {}), auto, attention, experts, dtype)


def _build(
    transformers: Any,
    name: str | None,
    settings: dict[str, Any],
    auto: str,
    attention: str,
    experts: str | None,
    dtype: str,
) -> nn.Module:
    import torch

    built = _config(transformers, name, dict(settings))
    _check_settings(built, settings)
    if getattr(built, "use_cache", None):
        built.use_cache = False
    cls = getattr(transformers, auto, None)
    if cls is None or not hasattr(cls, "_model_mapping"):
        near = nearest(auto, [n for n in dir(transformers) if n.startswith("AutoModel")], 1)
        raise ValueError(f"transformers has no class {auto}" + (f"; did you mean {near[0]}?" if near else ""))
    if cls._model_mapping.get(type(built), None) is None:
        kind = getattr(built, "model_type", type(built).__name__)
        other = next((name for name in CLASSES if _has(transformers, name, built)), None)
        such = "" if other is None else f", for example {other}"
        raise ValueError(
            f"transformers has no {auto} for model_type {kind!r}; set another class with model.auto{such}"
        )
    if built.architectures is None and isinstance(several := cls._model_mapping[type(built)], tuple):
        built.architectures = [several[0].__name__]  # without it transformers cannot choose
    precision = getattr(torch, dtype, None)
    if not isinstance(precision, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype!r}")
    model: nn.Module = cls.from_config(
        built,
        attn_implementation=_attention(cls, built, attention),
        experts_implementation=experts,
        dtype=precision,
    )
    return model


def _has(transformers: Any, auto: str, config: Any) -> bool:
    return getattr(transformers, auto)._model_mapping.get(type(config), None) is not None


def _config(transformers: Any, name: str | None, settings: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        if name is not None:
            return _of_name(transformers, name, settings)
        kind = settings.pop("model_type", None)
        if kind is None:
            raise ValueError(NOTHING)
        return _of_type(transformers, str(kind), settings)
    except StrictDataclassError as error:
        text = " ".join(str(error).split())
        raise ValueError(f"model.config: {text}") from None


def _check_settings(built: Any, settings: Mapping[str, Any]) -> None:
    """A configuration of transformers keeps a name that it does not know, and nobody reads it. Raises ValueError."""
    try:
        usual = type(built)()
    except Exception:  # a configuration without usual values
        return
    for name in settings:
        if name in vars(built) and not _has_field(usual, name) and not _is_read(type(built), name):
            near = nearest(name, [n for n in vars(usual) if not n.startswith("_")], 1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{type(built).__name__} has no {name!r}{advice}")


def _has_field(config: Any, name: str) -> bool:
    """Whether a configuration has a name. One whose layers differ refuses to say what the value is for all of them."""
    try:
        return hasattr(config, name)
    except Exception:
        return True


def _is_read(config: type, name: str) -> bool:
    """Whether the architecture's own files have the name: some sizes are read where a configuration has them, and are no
    field of it.
    """
    folder = Path(inspect.getfile(config)).parent
    return any(re.search(rf"\b{re.escape(name)}\b", file.read_text()) for file in folder.glob("*.py"))


def _of_type(transformers: Any, kind: str, settings: Mapping[str, Any]) -> Any:
    known = list(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        near = nearest(kind, known, 1)
        message = f"transformers {transformers.__version__} has no model_type {kind!r}"
        raise ValueError(message + (f"; did you mean {near[0]}?" if near else ""))
    return transformers.AutoConfig.for_model(kind, **settings)


def _of_name(transformers: Any, name: str, settings: Mapping[str, Any]) -> Any:
    """The configuration in a folder, or of a hub id: of the copy that is here where the hub cannot be reached, so that
    nobody waits for it.
    """
    missing = missing_folder(name)
    if missing is not None:
        raise ValueError(missing)
    folder = Path(name)
    here = folder.is_dir() or not hub_answers()
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=here, **settings)
    except OSError as error:
        if folder.is_dir():
            raise ValueError(f"the config.json in {name} cannot be read: {_first_line(error)}") from None
        if here:
            message = (
                f"there is no folder {name}, no local copy of it exists, and the Hugging Face hub cannot be reached; copy its "
                "files to this machine, and give their folder as model.name"
            )
            raise ValueError(message) from None
        raise ValueError(f"there is no folder {name}, and the hub says: {_first_line(error)}") from None


def hub_answers() -> bool:
    """Whether the hub's name is known here, or a proxy's business; it is asked several times, with pauses, otherwise."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' remarks on configurations, about tokens that a small vocabulary does not have."""
    before = transformers.logging.get_verbosity()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _attention(auto: Any, config: Any, wanted: str) -> str:
    """Ours where the model's attention goes through scaled_dot_product_attention; else what it has."""
    if wanted != IMPLEMENTATION:
        return wanted
    from parallelizer.hugging_face import masks

    model_class = auto._model_mapping.get(type(config), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None or not model_class._can_set_attn_implementation():
        return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    return wanted if model_class._supports_sdpa or masks.written_out(config) else "eager"


def register() -> None:
    """Make our attention and masks known to transformers, here and in processes that this one starts. Doing it again changes
    nothing.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from parallelizer.hugging_face import attention, masks

    AttentionInterface.register(IMPLEMENTATION, attention.forward)
    AttentionMaskInterface.register(IMPLEMENTATION, masks.mask)
    new_process.prepare_by(register)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError(not_installed("transformers")) from None
    return transformers
