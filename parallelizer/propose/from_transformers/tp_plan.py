"""What a transformers model says of its own parallelism: its `tp_plan` and `fsdp_plan`, merged and prefixed, and what
each of their entries means in this model.

`model.tp_plan` is read and not `config.base_model_tp_plan`: the latter has keys relative to the base model, and lacks the
heads' entries and the embedding's, which transformers adds to every plan while the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.hugging_face.architecture import is_model
from parallelizer.language.plan import full_name
from parallelizer.styles.tied_parameters import parameter_names

DISPATCH, EXPERT_PARAMETER = "ep_dispatch_experts", "grouped_gemm"
"""The strings of an `ep_plan`: of a module of experts, and of its parameters, which are split along the first dimension."""

SUMMED_WHOLE = "replicated_with_grad_allreduce"
"""The string of parameters that lie whole on all ranks, which add their gradients up."""

ADDED = "embedding_rowwise"
"""The string that transformers adds for `embed_tokens` where a plan does not name it."""


@dataclass(frozen=True)
class TpPlanEntry:
    """One entry of a `tp_plan` and what it means here: the modules that it names, whose forward it changes, and the
    parameters that it places. `added` says that transformers put it there, and not the family's configuration.
    """

    key: str
    string: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    added: bool = False

    @property
    def matches(self) -> bool:
        """Whether it names anything in this model."""
        return bool(self.modules or self.parameters)


def read_tp_plan(model: nn.Module) -> list[TpPlanEntry]:
    """The entries of the model's merged plan, in its order, each with what it names.

    As transformers does it: a key names modules, or parameters, by paths in which numbers of layers are `*`; a parameter
    without an entry of its own has that of its module. Raises PlanError when there is none, and no `ep_plan` either.
    """
    plan: Mapping[str, str] = dict(getattr(model, "tp_plan", None) or {}) if is_model(model) else {}
    if not plan and not read_ep_plan(model):
        raise PlanError([_no_plan(model)])
    modules: dict[str, list[str]] = {key: [] for key in plan}
    parameters: dict[str, list[str]] = {key: [] for key in plan}
    names = dict(parameter_names(model))
    for path, module in model.named_modules():
        key = with_wildcards(path)
        if key in plan:
            modules[key].append(path)
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            full = full_name(path, name)
            own = with_wildcards(full)
            named = own if own in plan else own.rpartition(".")[0]
            if named in plan and full in names:
                parameters[named].append(full)
    written = _written(model)
    return [
        TpPlanEntry(
            key, string, tuple(modules[key]), tuple(parameters[key]), string == ADDED and key not in written
        )
        for key, string in plan.items()
    ]


def read_ep_plan(model: nn.Module) -> list[str]:
    """The modules of experts of the model's `ep_plan`."""
    plan: Mapping[str, str] = dict(getattr(model, "ep_plan", None) or {}) if is_model(model) else {}
    return [path for path, _ in model.named_modules() if plan.get(with_wildcards(path)) == DISPATCH]


def read_whole_inside(model: nn.Module, path: str) -> list[str]:
    """The modules inside of experts whose parameters the model's `ep_plan` leaves whole on every rank, by their names there."""
    plan: Mapping[str, str] = dict(getattr(model, "ep_plan", None) or {})
    inside = [name for name, _ in model.get_submodule(path).named_modules() if name]
    return [name for name in inside if plan.get(with_wildcards(f"{path}.{name}")) == SUMMED_WHOLE]


def read_fsdp_plan(model: nn.Module) -> dict[str, str]:
    """The entries of the model's `fsdp_plan` that name modules of it, outermost last."""
    plan: Mapping[str, str] = dict(getattr(model, "fsdp_plan", None) or {})
    known = {with_wildcards(path) for path, _ in model.named_modules()}
    return {key: string for key, string in plan.items() if key in known}


def read_layer_lists(model: nn.Module) -> set[str]:
    """The lists of layers that the model's `pp_plan` names: transformers cuts a model between the layers of a list."""
    plan: Mapping[str, Any] = dict(getattr(model, "pp_plan", None) or {})
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return lists & set(plan)


def with_wildcards(path: str) -> str:
    """The path as keys of a `tp_plan` have it: what stands between dots and is a number is `*`."""
    from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

    return str(replace_layer_number_by_wildcard(path))


def _written(model: nn.Module) -> set[str]:
    """The keys that configurations and classes wrote, from the root of the model."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if is_model(module):
            one: Any = module
            plans = [getattr(type(module), "_tp_plan", None), getattr(one.config, "base_model_tp_plan", None)]
            found |= {full_name(path, key) for plan in plans for key in plan or {}}
    return found


def _no_plan(model: nn.Module) -> Diagnostic:
    name = type(model).__name__
    reason = (
        "has no `tp_plan`: transformers knows no tensor parallelism for it"
        if is_model(model)
        else "is no model of transformers, and has no `tp_plan`"
    )
    help_text = "`python -m parallelizer init` proposes a plan by looking at what a model does"
    return Diagnostic("no-tp-plan", f"{name} {reason}", None, help_text)
