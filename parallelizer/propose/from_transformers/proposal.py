"""The plan that a transformers model's own entries come to: its lines, in sections, each with where it came from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import full_name
from parallelizer.propose.from_transformers.tp_plan import (
    DISPATCH,
    TpPlanEntry,
    read_ep_plan,
    read_fsdp_plan,
    read_layer_lists,
    read_tp_plan,
    read_whole_inside,
    with_wildcards,
)
from parallelizer.propose.from_transformers.translate import Inexpressible, TranslatedRule, translate
from parallelizer.propose.globs import ends_in_common, globs_for
from parallelizer.propose.plan_text import PlanLine
from parallelizer.styles.experts.find import NAMES
from parallelizer.styles.target import forward_names
from parallelizer.styles.tied_parameters import parameter_names, tied_names

TRANSLATED, SPLIT, WHOLE, SUMMED = "tp_plan", "split", "whole", "summed"
CONTEXT, EXPERTS, DATA = "context", "ep_plan", "fsdp_plan"
"""The sections of a plan, in their order."""

OWN = "{style: rowwise, own: true}"
"""The style of a linear whose output the forward changes in place."""


@dataclass(frozen=True)
class Proposal:
    """What is to be written: lines by section. `unmatched` are entries that name nothing in this model, `needless` those that
    need no rule, with the reason; `plain` are globs of parameters that no rule may place; `batch` are the plan's batch
    buffers.
    """

    sections: Mapping[str, tuple[PlanLine, ...]]
    unmatched: tuple[TpPlanEntry, ...] = ()
    needless: tuple[TranslatedRule, ...] = ()
    plain: tuple[str, ...] = ()
    batch: dict[str, str] = field(default_factory=dict)


def propose(
    model: nn.Module,
    summed: Collection[str] = (),
    called: Collection[str] | None = None,
    split: Mapping[str, int] | None = None,
    changed: Collection[str] = (),
) -> Proposal:
    """The plan of a transformers model. `summed` are the parameters that no entry names and whose gradients differ from
    rank to rank all the same, so that they must be summed. `called` are the modules whose forward runs, None for all: a
    parameter that only others read must stay the plain tensor that they take it for. `split` are parameters that meet what
    is split, with the dimension along which: those that no entry places are split too. `changed` are linears whose output the
    forward changes in place.

    Raises PlanError for a model without a `tp_plan`, and for every entry that cannot be expressed.
    """
    entries = read_tp_plan(model)
    rules, failed = translate(model, entries)
    if failed:
        raise PlanError(inexpressible(failed))
    said = [rule for rule in rules if rule.style is not None]
    placed = _placed(said, dict(model.named_modules()))
    met = {name: dim for name, dim in (split or {}).items() if name not in placed}
    placed |= met.keys()
    plain = _plain(model, placed, called)
    whole = _whole(model, placed | plain, summed)
    lines = {
        TRANSLATED: _translated(model, said, changed),
        SPLIT: _split(model, met),
        **whole,
        CONTEXT: _context(model),
        EXPERTS: _experts(model),
        DATA: _data(model),
    }
    return Proposal(
        _merged(lines),
        tuple(entry for entry in entries if not entry.matches),
        tuple(rule for rule in rules if rule.style is None),
        tuple(plan_globs(sorted(plain), model)),
        _batch(model),
    )


def _split(model: nn.Module, met: Mapping[str, int]) -> Iterator[PlanLine]:
    for dim in dict.fromkeys(met.values()):
        names = [name for name, own in met.items() if own == dim]
        style = f"{{style: shard-params, params: shard({dim})}}"
        yield from (PlanLine(glob, (style,)) for glob in plan_globs(names, model))


def every_name(model: nn.Module) -> list[str]:
    """All modules and parameters, as a plan's globs name them."""
    return [*(path for path, _ in model.named_modules()), *parameter_names(model)]


def plan_globs(names: Sequence[str], model: nn.Module) -> list[str]:
    """Globs for some modules and parameters of a model, what names end in written once. None has alternatives of both kinds:
    a glob that matches modules is no glob of parameters.
    """
    every, modules = every_name(model), {path for path, _ in model.named_modules()}
    kinds = [n for n in names if n in modules], [n for n in names if n not in modules]
    return [ends_in_common(glob) for kind in kinds for glob in globs_for(kind, every)]


def _translated(
    model: nn.Module, rules: Sequence[TranslatedRule], changed: Collection[str]
) -> Iterator[PlanLine]:
    every = every_name(model)
    place = {name: i for i, name in enumerate(every)}
    alike: dict[tuple[str, str, str], list[str]] = {}
    for rule in rules:
        parent = rule.entry.key.rpartition(".")[0]
        for name in rule.names:
            style = OWN if rule.style == "rowwise" and name in changed else str(rule.style)
            alike.setdefault((parent, style, _origin(rule.entry)), []).append(name)
    lines = []
    for (_, style, origin), names in alike.items():
        names.sort(key=place.__getitem__)
        lines += [(place[names[0]], PlanLine(glob, (style,), origin)) for glob in plan_globs(names, model)]
    modules = len(list(model.named_modules()))

    def order(item: tuple[int, PlanLine]) -> tuple[int, int]:
        at = item[0]  # a parameter stands behind its module
        owner = place[every[at].rpartition(".")[0]] if at >= modules else at
        return owner, at

    return (line for _, line in sorted(lines, key=order))


def _origin(entry: TpPlanEntry) -> str:
    return f"{entry.string} (added)" if entry.added else entry.string


def _plain(model: nn.Module, placed: Collection[str], called: Collection[str] | None) -> set[str]:
    """The parameters, not placed, that other modules than their own read: they would meet a DTensor.

    Those are the parameters of modules that are never called, as far as somebody could see, and those that the forward of
    the module around names, as in `self.classifier.weight`.
    """
    found = set()
    for path, module in model.named_modules():
        found |= _read(path, module)
        if called is not None and path not in called:
            found |= {full_name(path, name) for name, _ in module.named_parameters(recurse=False)}
    return found.difference(placed)


def _read(path: str, module: nn.Module) -> set[str]:
    """The parameters of its children that a module's own forward names."""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):  # a class without a file
        return set()
    children = dict(module.named_children())
    return {
        full_name(path, f"{child}.{name}")
        for child, name in _READ.findall(source)
        if child in children and name in dict(children[child].named_parameters(recurse=False))
    }


_READ = re.compile(r"\bself\.(\w+)\.(weight|bias)\b(?!\.(?:dtype|device|shape|ndim|size))")


def _whole(
    model: nn.Module, placed: Collection[str], summed: Collection[str]
) -> dict[str, Iterable[PlanLine]]:
    """What no entry places: whole on every rank, and DTensors all the same, for clipping and the optimizer."""
    modules = dict(model.named_modules())
    tied = {name: group for group in tied_names(model) for name in group}
    found: dict[str, Iterable[PlanLine]] = {}
    for section, style in ((WHOLE, "{style: replicate, grad: replicate}"), (SUMMED, "replicate")):
        targets: list[str] = []
        for path, module in modules.items():
            own = [full_name(path, n) for n, _ in module.named_parameters(recurse=False)]
            free = [n for n in own if not any(name in placed for name in tied.get(n, (n,)))]
            mine = [n for n in free if (n in summed) == (section == SUMMED)]
            if mine and len(mine) == len(own) and path:
                targets.append(path)
            else:
                targets += mine
        found[section] = [PlanLine(glob, (style,)) for glob in plan_globs(targets, model)]
    return found


def _placed(rules: Sequence[TranslatedRule], modules: dict[str, nn.Module]) -> set[str]:
    """The parameters that rules place, by full name."""
    placed: set[str] = set()
    for rule in rules:
        for name in rule.names:
            if name not in modules:
                placed.add(name)
            elif not any(f"style: {io}" in str(rule.style) for io in ("prepare-", "none")):
                own = modules[name].named_parameters(recurse=False, remove_duplicate=False)
                placed |= {full_name(name, n) for n, _ in own}
    return placed


def _context(model: nn.Module) -> Iterator[PlanLine]:
    """The modules of the language model that call transformers' attention interface, which context parallelism takes over."""
    config: Any = model.config
    text = config.get_text_config()
    names = [
        path
        for path, module in model.named_modules()
        if calls_attention(module) and getattr(module, "config", text) is text
    ]
    yield from (PlanLine(glob, ("context-parallel",)) for glob in plan_globs(names, model))


def _experts(model: nn.Module) -> Iterator[PlanLine]:
    """The modules of experts that its `ep_plan` shares out, all of whose parameters it splits along the first dimension. A
    module that calls its arguments otherwise than most has them in the same order: tokens, experts, weights.
    """
    alike: dict[str, list[str]] = {}
    for path in read_ep_plan(model):
        module = model.get_submodule(path)
        alike.setdefault(_expert_style(module, read_whole_inside(model, path)), []).append(path)
    for style, paths in alike.items():
        yield from (PlanLine(glob, (style,), DISPATCH) for glob in plan_globs(paths, model))


def _expert_style(module: nn.Module, whole: Sequence[str]) -> str:
    called = list(forward_names(module) or ())[: len(NAMES)]
    written = [] if not whole else [f"whole: [{', '.join(whole)}]"]
    if len(called) == len(NAMES) and called != list(NAMES.values()):
        written += [f"{option}: {name}" for option, name in zip(NAMES, called, strict=True)]
    return f"{{{', '.join(['style: experts', *written])}}}" if written else "experts"


def calls_attention(module: nn.Module) -> bool:
    """Whether the module's own forward looks up an attention implementation in transformers' interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _data(model: nn.Module) -> Iterator[PlanLine]:
    """Repeated blocks and the embedding as units of their own, as transformers has them; what it keeps after forward is
    the root's, which is kept too. A tied embedding is gathered once, with the root. A cut into stages may fall before the
    layers of its `pp_plan`.
    """
    layers = {f"{path}.*" for path in read_layer_lists(model)}
    shared = {name for group in tied_names(model) for name in group}
    for key, string in read_fsdp_plan(model).items():
        names = [path for path, _ in model.named_modules() if with_wildcards(path) == key]
        tied = any(f"{name}.weight" in shared for name in names)
        if string == "free_full_weight" and not tied:
            for glob in plan_globs(names, model):
                if key in layers:
                    yield PlanLine(glob, ("fsdp", "stage"), f"{string}, in its pp_plan")
                else:
                    yield PlanLine(glob, ("fsdp",), string)
    yield PlanLine("", ("fsdp",), "the root: everything else, kept after forward")


def _batch(model: nn.Module) -> dict[str, str]:
    names = inspect.signature(model.forward).parameters
    positions = {"position_ids": "positions"} if "position_ids" in names else {}
    return {"input_ids": "1", "labels": "{dim: 1, pad: -100}", **positions}


def _merged(sections: Mapping[str, Iterable[PlanLine]]) -> dict[str, tuple[PlanLine, ...]]:
    """Lines of one glob as one, in the section of the first: a plan has each key once."""
    by_glob: dict[str, list[PlanLine]] = {}
    first_in: dict[str, str] = {}
    for section, lines in sections.items():
        for line in lines:
            by_glob.setdefault(line.glob, []).append(line)
            first_in.setdefault(line.glob, section)
    merged: dict[str, tuple[PlanLine, ...]] = dict.fromkeys(sections, ())
    for glob, some in by_glob.items():
        styles = tuple(style for line in some for style in line.styles)
        comments = ", ".join(line.comment for line in some if line.comment)
        merged[first_in[glob]] += (PlanLine(glob, styles, comments),)
    return merged


def inexpressible(failed: Sequence[Inexpressible]) -> Iterator[Diagnostic]:
    """One finding for each entry that no style says, with its key and string."""
    by_entry: dict[tuple[str, str, str], list[str]] = {}
    for one in failed:
        by_entry.setdefault((one.entry.key, one.entry.string, one.reason), []).append(one.name)
    for (key, string, reason), names in by_entry.items():
        what = f"the entry `{key}: {string}` of transformers' tp_plan cannot be expressed"
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        help_text = "write the plan by hand, or let `python -m parallelizer init` propose one"
        yield Diagnostic("tp-plan-string", f"{what}: {reason} ({names[0]}{more})", None, help_text)
