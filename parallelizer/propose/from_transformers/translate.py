"""Strings of a `tp_plan` in the words of a plan, by what transformers does for each and not by what it is called.

The table of what each does is `transformers/distributed/tensor_parallel.py`. A module's entry changes its forward and
places its own parameters; a parameter's entry only places it, and the module's forward then sees its local shard, as
ours does under `shard-params`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from parallelizer.propose.from_transformers.tp_plan import TpPlanEntry
from parallelizer.styles.attributes import nearest_number
from parallelizer.styles.target import forward_names


@dataclass(frozen=True)
class TranslatedRule:
    """What a plan says of some modules or parameters: their full names, and the text of a style. A `style` of None is an
    entry that needs no rule, for the reason in `note`.
    """

    names: tuple[str, ...]
    style: str | None
    entry: TpPlanEntry
    note: str = ""


@dataclass(frozen=True)
class Inexpressible:
    """An entry, or what it says of one module, that no style of ours does."""

    entry: TpPlanEntry
    name: str
    reason: str


class _CannotSay(Exception):
    """Why a string cannot be said of a module or parameter."""


def translate(
    model: nn.Module, entries: list[TpPlanEntry]
) -> tuple[list[TranslatedRule], list[Inexpressible]]:
    """The rules of every entry that names something, and what cannot be expressed."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own = {name for entry in entries if entry.string not in WHOLE for name in entry.parameters}
    rules: list[TranslatedRule] = []
    failed: list[Inexpressible] = []
    for entry in entries:
        found: dict[tuple[str | None, str], list[str]] = {}
        for name, say in _each(entry, modules, parameters, own):
            try:
                found.setdefault(say(), []).append(name)
            except _CannotSay as error:
                failed.append(Inexpressible(entry, name, str(error)))
        rules += [TranslatedRule(tuple(names), style, entry, note) for (style, note), names in found.items()]
    return rules, failed


_Say = Callable[[], tuple[str | None, str]]


def _each(
    entry: TpPlanEntry, modules: dict[str, nn.Module], parameters: dict[str, nn.Parameter], placed: set[str]
) -> Iterator[tuple[str, _Say]]:
    """Everything that an entry names, with what finds the words for it."""
    for path in entry.modules:
        context = _Named(path, modules[path], modules, placed)
        yield path, lambda context=context: _of_module(entry.string, context)  # type: ignore[misc]
    for name in entry.parameters:
        if name.rpartition(".")[0] not in entry.modules:
            param = parameters[name]
            leaf = name.rpartition(".")[2]
            yield name, lambda leaf=leaf, param=param: (_of_parameter(entry.string, leaf, param), "")  # type: ignore[misc]


@dataclass(frozen=True)
class _Named:
    """A module that an entry names; `placed` are the full names of all parameters that any entry places."""

    path: str
    module: nn.Module
    modules: dict[str, nn.Module]
    placed: set[str]

    @property
    def own(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(recurse=False))

    def around(self) -> Iterator[nn.Module]:
        """The module and those around it, innermost first."""
        path = self.path
        while path:
            yield self.modules[path]
            path = path.rpartition(".")[0]
        yield self.modules[""]


SAME = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
"""Names of earlier releases that transformers still knows, by those of today."""


WHOLE = frozenset(
    {
        "all_reduce",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
    }
)
"""Strings that leave the parameters of their modules whole."""


def _of_module(string: str, named: _Named) -> tuple[str | None, str]:
    """The style that does to a module what the string does, and why there is none where none is needed."""
    match SAME.get(string, string):
        case "colwise":
            return _linear(named, "colwise", "out_features"), ""
        case "colwise_gather_output":
            return _linear(named, "colwise", "out_features", "output: replicate"), ""
        case "rowwise":
            return _linear(named, "rowwise", "in_features"), ""
        case "rowwise_split_input":
            return _linear(named, "rowwise", "in_features", "input: replicate"), ""
        case "embedding_rowwise":
            return _embedding(named, "rowwise", 0), ""
        case "embedding_colwise":
            return _embedding(named, "{style: colwise, output: replicate}", 1), ""
        case "sequence_parallel":
            return "{style: sequence, local: true}", ""
        case "replicate":
            return ("{style: replicate, grad: replicate}", "") if named.own else (None, "nothing to place")
        case "replicated_with_grad_allreduce":
            if named.own:
                return "replicate", ""
            return None, "no parameters here, so no gradients to sum"
        case "packed_colwise":
            return _packed_linear(named), ""
        case "mla_kv_a_proj":
            return _rope_slice(named)
        case "moe_tp_experts":
            return _experts(named), ""
        case "moe_identity_expert":
            return _identity(named), ""
        case "all_reduce":
            return _all_reduce(named), ""
        case "local_params":
            return None, "shard-params shows a module its local shards anyway"
    raise _CannotSay("no style does what it does")


def _linear(named: _Named, style: str, width: str, *more: str) -> str:
    module = named.module
    if not hasattr(module, width):
        raise _CannotSay(f"a {type(module).__name__} has no `{width}`, and transformers refuses it")
    if isinstance(module, nn.Linear):
        return f"{{style: {style}, {', '.join(more)}}}" if more else style
    raise _CannotSay(f"{style} knows nn.Linear, not {type(module).__name__}")


def _embedding(named: _Named, style: str, dim: int) -> str:
    if not isinstance(named.module, nn.Embedding):
        raise _CannotSay(f"a {type(named.module).__name__} is no nn.Embedding")
    if named.own.keys() <= {"weight"}:
        return style
    # Parameters that a class adds: transformers splits them along the same dimension.
    params = ", ".join(f"{name}: shard({min(dim, p.ndim - 1)})" for name, p in named.own.items())
    return f"{{style: shard-params, params: {{{params}}}, input: replicate, output: replicate}}"


def _packed_linear(named: _Named) -> str:
    if not isinstance(named.module, nn.Linear):
        raise _CannotSay(f"a {type(named.module).__name__} is no nn.Linear")
    if named.module.bias is not None:
        raise _CannotSay("transformers splits its bias in one piece, and its weight part by part")
    return "{style: colwise, packed: [1, 1]}"


def _rope_slice(named: _Named) -> tuple[str | None, str]:
    """Multi-head latent attention: the features behind the latent, the rotary part of the key, go straight to attention
    over this rank's heads, and their gradient is a sum's term; the latent goes through kv_b_proj, which sums its own.
    """
    name = "qk_rope_head_dim"
    match nearest_number(named.around(), name):
        case None:
            raise _CannotSay(f"no module around it has a number `{name}`")
        case 0:
            return None, "it has no rotary part here"
    return f"{{style: prepare-output, output: replicate, grad: partial, grad_last: {name}}}", ""


def _experts(named: _Named) -> str:
    """Each rank has a slice of every expert: outputs are terms of a sum, and so are the gradients of what comes in. Of
    the three inputs the second is the experts' numbers, which have no gradient.
    """
    inputs = _inputs(named)
    wanted = [inputs[0], *inputs[2:3]]
    flows = ", ".join(f"{name}: replicate" for name in wanted)
    return f"{{style: prepare-io, input: {{{flows}}}, local_input: true, grad: partial, output: partial -> replicate}}"


def _identity(named: _Named) -> str:
    inputs = _inputs(named)
    return f"{{style: prepare-input, input: {{{inputs[0]}: replicate -> partial}}, local: true}}"


def _all_reduce(named: _Named) -> str:
    """The output is a sum's term. Where the module's own parameters are sharded so are the gradients of all that comes
    in, which transformers leaves to DTensor.
    """
    prefix = f"{named.path}."
    if not any(name.startswith(prefix) for name in named.placed):
        return "{style: prepare-output, output: partial -> replicate}"
    flows = ", ".join(f"{name}: replicate" for name in _inputs(named))
    return f"{{style: prepare-io, input: {{{flows}}}, local_input: true, grad: partial, output: partial -> replicate}}"


def _inputs(named: _Named) -> list[str]:
    names = forward_names(named.module)
    if not names:
        raise _CannotSay(f"forward of {type(named.module).__name__} does not say what it takes")
    return list(names)


def _of_parameter(string: str, name: str, param: torch.Tensor) -> str:
    """The style that places a parameter as the string does, whose module it leaves alone."""
    match SAME.get(string, string):
        case "colwise" | "colwise_gather_output":
            return _shard(max(param.ndim - 2, 0))
        case "rowwise" | "rowwise_split_input":
            return "{style: replicate, grad: replicate}" if name == "bias" else _shard(param.ndim - 1)
        case "embedding_rowwise":
            return _shard(0)
        case "embedding_colwise":
            return _shard(1)
        case "packed_colwise":
            return _shard(0) if param.ndim == 1 else _shard(param.ndim - 2, packed=True)
        case "packed_rowwise":
            one = param.ndim == 1
            return "{style: replicate, grad: replicate}" if one else _shard(param.ndim - 1, packed=True)
        case "replicate":
            return "{style: replicate, grad: replicate}"
    raise _CannotSay("it says nothing of a parameter")


def _shard(dim: int, packed: bool = False) -> str:
    return f"{{style: shard-params, params: shard({dim}){', packed: [1, 1]' if packed else ''}}}"
