"""Checks that float8 computes what its rule names, and that the kernels for float8 can compute it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.language.glob import parse_glob
from parallelizer.language.plan import BATCH_AXES, Placement, full_name
from parallelizer.styles.application import Application, tensor_placements
from parallelizer.styles.float8.recipes import DIVISOR, rows_matter
from parallelizer.styles.placed_parameters import ShardParams

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Span


def float8_linears(state: Compilation) -> Iterator[Diagnostic]:
    """No linear is computed in float8 by accident, in sizes that kernels do not have, or with scales of a part of a tensor."""
    by_rule: dict[Span, list[Application]] = {}
    for application in state.applications:
        if application.slot == "precision":
            by_rule.setdefault(application.rule.span, []).append(application)
    for applications in by_rule.values():
        yield from _caught(state, applications)
        applications = [a for a in applications if not a.stacked]
        if not applications:
            continue
        yield from _split_scales(state, applications)
        if not applications[0].options.get("emulate"):
            yield from _sizes(state, applications)
            yield from _tokens(state, applications)


def _caught(state: Compilation, applications: list[Application]) -> Iterator[Diagnostic]:
    """A head or a router that a glob for the layers' linears matches too."""
    rule, paths = applications[0].rule, [a.module for a in applications]
    for alternative in rule.glob.alternatives:
        found = parse_glob(alternative).select(paths)
        for what, special in (
            ("outside of the repeated layers", [p for p in found if not _is_repeated(state.modules, p)]),
            ("a router, which scores experts", [p for p in found if _is_router(state.modules, p)]),
        ):
            if not special or len(special) == len(found):
                continue  # it names nothing else: on purpose
            others = ", ".join(fold_paths([p for p in found if p not in special])[:2])
            shown = ", ".join(fold_paths(special)[:3])
            yield Diagnostic(
                "precision-caught",
                f"`{rule.key}` puts {shown} in float8 too, which {'is' if len(special) == 1 else 'are'} {what}",
                rule.span,
                f"name the others: `{others}`; a rule that names {shown} alone puts it in float8 on purpose",
            )


def _is_repeated(modules: Mapping[str, nn.Module], path: str) -> bool:
    """Whether a module is in a list of layers, or in one of several equal blocks of an `nn.Sequential`. A head may be an
    `nn.Sequential` too, of a few linears and activations.
    """
    segments = path.split(".")
    for at, segment in enumerate(segments):
        if not segment.isdigit():
            continue
        parent = modules.get(".".join(segments[:at]))
        if not isinstance(parent, nn.Sequential):
            return True
        kind = type(parent[int(segment)])
        if kind is not nn.Linear and sum(type(m) is kind for m in parent) > 1:
            return True
    return False


def _is_router(modules: Mapping[str, nn.Module], path: str) -> bool:
    """Whether a linear has as many outputs as there are experts beside it."""
    linear = modules[path]
    if not isinstance(linear, nn.Linear):
        return False
    outputs = linear.out_features
    parent = path.rpartition(".")[0]
    beside = [m for p, m in modules.items() if p != path and p.rpartition(".")[0] == parent and p != parent]
    for module in beside:
        if isinstance(module, nn.ModuleList) and len(module) == outputs > 1:
            return True
        if any(p.ndim == 3 and p.shape[0] == outputs for p in module.parameters(recurse=False)):
            return True
    return False


def _split_scales(state: Compilation, applications: list[Application]) -> Iterator[Diagnostic]:
    """A forward that sees the local shard of its weight would scale it, and its gradients, by local largest values."""
    local = {
        a.module: a
        for a in state.applications
        if isinstance(a.act, ShardParams)
        and (a.act.heads is not None or (_is_split(a) and a.act.layouts is None))
    }
    found = [a for a in applications if a.module in local]
    if found:
        other = local[found[0].module]
        yield Diagnostic(
            "precision-local-scale",
            f"{other.style} shows the forward of {found[0].module} the shard of its weight alone, "
            f"whose largest value is not the weight's{_more(found)}",
            found[0].rule.span,
            "use colwise or rowwise without `replicate_kv` there, or leave these modules out of float8",
        )


def _is_split(application: Application) -> bool:
    return any(p.dim is not None for by_axis in application.params.values() for p in by_axis.values())


def _sizes(state: Compilation, applications: list[Application]) -> Iterator[Diagnostic]:
    """Both dimensions of a rank's weight are multiples of what the kernels ask for."""
    placements = tensor_placements(state.applications)
    local = [(a, _local(state, a, placements)) for a in applications]
    wrong = [(a, shape) for a, shape in local if any(size % DIVISOR for size in shape)]
    if wrong:
        application, shape = wrong[0]
        whole = tuple(_weight(state, application).shape)
        split = f", {'x'.join(map(str, shape))} of it on a rank" if shape != whole else ""
        yield Diagnostic(
            "precision-size",
            f"the weight of {application.module} is {'x'.join(map(str, whole))}{split}: float8 kernels need multiples of "
            f"{DIVISOR}{_more([a for a, _ in wrong])}",
            application.rule.span,
            "leave these modules out of the glob, or write `emulate: true`",
        )


def _weight(state: Compilation, application: Application) -> nn.Parameter:
    return state.modules[application.module].get_parameter("weight")


def _local(
    state: Compilation, application: Application, placements: Mapping[str, Mapping[str, Placement]]
) -> tuple[int, ...]:
    """The shape of a rank's part of the weight."""
    shape = list(_weight(state, application).shape)
    for axis, placement in placements.get(full_name(application.module, "weight"), {}).items():
        if placement.dim is not None:
            shape[placement.dim] //= state.mesh.sizes[axis]
    return tuple(shape)


def _tokens(state: Compilation, applications: list[Application]) -> Iterator[Diagnostic]:
    """The tokens are a dimension of the product that gives the weight's gradient. Where all entries of the batch are of one
    sequence, their number is known before a step is traced.
    """
    work, application = state.workload, applications[0]
    if work is None or not rows_matter(application):
        return
    if any(entry.sequence_dim() is None for entry in work.entries.values()):
        return
    parts = state.mesh.size(*BATCH_AXES) * work.accumulate
    if state.pipeline is not None and state.stages is not None:
        parts *= state.pipeline.microbatches or 1
    tokens = work.batch_size // parts * work.seq_len // state.mesh.sizes["cp"]
    if tokens % DIVISOR:
        yield Diagnostic(
            "precision-size",
            f"a rank computes {tokens} tokens at once: float8 kernels need a multiple of {DIVISOR}",
            application.rule.span,
            "change train.batch_size or train.seq_len, write `pad: true`, or use the recipe rowwise-gw-hp",
        )


def _more(applications: list[Application]) -> str:
    return f" ({len(applications) - 1} more like it)" if len(applications) > 1 else ""
