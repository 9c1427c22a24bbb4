"""`fsdp`: parameters, gradients and optimizer state sharded over the data axes, by torch's `fully_shard`.

Compilation determines which unit shards which parameter on which dimension. FSDP neither casts the parameters
that stay whole (too small, or no dimension divides) to the unit's dtype, nor sums their gradients over the
data ranks. This file does both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallelizer.language.plan import EXPERT, EXPERT_SHARDS, REPLICATE, Placement, shard
from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.registry import applies, exports, prepares
from parallelizer.styles.statements import MODULE, Statement, calls, dict_text, list_text

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from parallelizer.styles.application import Application, Exporting, Live

declare(
    StyleDeclaration(
        "fsdp",
        "fsdp",
        None,
        "shard parameters, gradients and optimizer state over the data axes",
        {
            "reshard_after_forward": OptionKind(
                "bool-or-int", "free gathered parameters after forward; or the size of a smaller group"
            ),
            "param_dtype": OptionKind("dtype", "the dtype of parameters in forward and backward"),
            "reduce_dtype": OptionKind("dtype", "the dtype in which gradients are reduced"),
            "gather": OptionKind(
                "choice", "the dtype in which the weights of linears in float8 are gathered", ("float8",)
            ),
            "cpu_offload": OptionKind("bool", "keep shards in host memory"),
            "min_params": OptionKind("int", "put a module with fewer parameters into its parent's unit"),
            "min_size": OptionKind(
                "int", "replicate a parameter with fewer elements, and reduce its gradient"
            ),
            "shard_dim": OptionKind("choice", "the dimension to shard", ("0", "largest")),
        },
        defaults={
            "reshard_after_forward": "true, false for the root",
            "param_dtype": "the parameters' own",
            "reduce_dtype": "param_dtype",
            "gather": "param_dtype",
            "cpu_offload": "false",
            "min_params": "0",
            "min_size": "0",
            "shard_dim": "0",
        },
    )
)


@dataclass(frozen=True)
class Assignment:
    """How one parameter is sharded over the folded data axis; `reason` says why it is not, where it is not."""

    placement: Placement
    reason: str | None = None


def units(
    model: nn.Module, options: Mapping[str, Mapping[str, Any]], without: Collection[str] = ()
) -> dict[str, list[str]]:
    """Which parameters each FSDP unit gathers, by the unit's path, innermost unit first.

    `options` are the fsdp options by module path. Parameters named in `without` belong to no unit. A module below its
    `min_params` is left to the next unit around it, unless there is none. So is a module that shares all its parameters with
    modules outside of it, such as an embedding and an output layer of one weight: one unit gathers a parameter for all modules
    that use it.
    """
    from parallelizer.styles.tied_parameters import tied_names

    # Stable: modules of one depth stay in the model's order.
    paths = sorted((name for name, _ in model.named_modules() if name in options), key=_depth, reverse=True)
    owned: dict[str, list[str]] = {}
    taken: set[str] = set(without)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    first_names = {name: group[0] for group in tied_names(model) for name in group}
    for path in paths:
        inside = [n for n in sizes if n not in taken and is_in(n, path)]
        outside = {first for name, first in first_names.items() if not is_in(name, path)}
        shared = {first for name, first in first_names.items() if is_in(name, path)} & outside
        small = sum(sizes[n] for n in inside) < options[path].get("min_params", 0)
        if (small or (shared and shared.issuperset(inside))) and _enclosed(path, paths):
            continue
        owned[path] = inside
        taken.update(inside)
    return owned


def changes_precision_or_place(options: Mapping[str, Any], params: Sequence[nn.Parameter]) -> bool:
    """Whether a unit has something to do on a single data rank too."""
    dtype = dtype_of(options.get("param_dtype"))
    return bool(options.get("cpu_offload")) or (dtype is not None and any(p.dtype != dtype for p in params))


def assign(
    param: nn.Parameter, options: Mapping[str, Any], tensor: Mapping[str, Placement], ranks: int
) -> Assignment:
    """The dimension of one parameter that is sharded over `ranks`, after tensor parallelism has taken its
    part.
    """
    if param.numel() < options.get("min_size", 0):
        return Assignment(REPLICATE, "too small")
    if param.ndim == 0:
        return Assignment(REPLICATE, "a scalar")
    if options.get("shard_dim", "0") != "largest":
        return Assignment(shard(0))
    used = {p.dim for p in tensor.values() if p.dim is not None}
    free = [d for d in range(param.ndim) if d not in used]
    if not free:
        return Assignment(REPLICATE, "every dimension is sharded already")
    even = [d for d in free if param.shape[d] % ranks == 0]
    if not even:
        return Assignment(REPLICATE, f"no dimension left divides by {ranks}")
    return Assignment(shard(max(even, key=lambda d: (param.shape[d], -d))))


def assign_expert(
    param: nn.Parameter, options: Mapping[str, Any], tensor: Mapping[str, Placement], ranks: int
) -> Assignment:
    """The dimension of a parameter of experts that is sharded over `ranks`, beside the one that counts experts: FSDP must
    not cut the experts of a rank in two, and cuts other dimensions than the first only evenly.
    """
    if param.numel() < options.get("min_size", 0):
        return Assignment(REPLICATE, "too small")
    used = {p.dim for p in tensor.values() if p.dim is not None}
    for dim in range(param.ndim):
        if dim not in used and param.shape[dim] % ranks == 0:
            return Assignment(shard(dim))
    return Assignment(REPLICATE, f"no dimension left divides by {ranks}")


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that an option names."""
    import torch

    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype


def left_whole(unit: Application) -> list[str]:
    """The parameters that a unit leaves whole, by name inside it."""
    return [name for name in unit.params if unit.reasons.get(name)]


@prepares("fsdp")
def prepare(unit: Application, module: nn.Module, live: Live) -> None:
    """What FSDP's mixed precision does for its own parameters, for those that it leaves whole.

    Before a checkpoint is put around the modules that own them, or its recomputation would see them uncast.
    """
    dtype = dtype_of(unit.options.get("param_dtype"))
    if dtype is not None:
        for path, leaves in by_owner(left_whole(unit)).items():
            compute_in(module.get_submodule(path), leaves, dtype)


@applies("fsdp")
def apply(unit: Application, module: nn.Module, live: Live) -> None:
    """Shard the unit's parameters over the data axes; gradients are summed there, and not averaged."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from parallelizer.mesh import data_groups, expert_fsdp_mesh, fsdp_mesh
    from parallelizer.styles.fsdp_partial import keep_partial

    options, experts = unit.options, is_of_experts(unit)
    mesh = expert_fsdp_mesh(live.mesh) if experts else fsdp_mesh(live.mesh)
    groups = [g for g in mesh.get_all_groups() if g.size() > 1] if experts else data_groups(live.mesh)
    whole = {module.get_parameter(name) for name in left_whole(unit)}
    more: dict[str, Any] = {}
    if options.get("param_dtype") or options.get("reduce_dtype"):
        more["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype_of(options.get("param_dtype")),
            reduce_dtype=dtype_of(options.get("reduce_dtype")),
        )
    if options.get("cpu_offload"):
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=live.mesh.device_type != "cpu")
    if dims := _other_dims(unit):
        more["shard_placement_fn"] = shard_on(module, dims)
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=options.get("reshard_after_forward"),
        ignored_params=whole
        | live.others
        | (inside_of_experts(unit, module) if experts else shared_out(module))
        or None,
        **more,
    )
    if unit.options.get("gather") == "float8":
        from parallelizer.styles.float8.gathers import gather_in_float8

        gather_in_float8(module, [n for n in unit.params if n not in unit.reasons and _in_float8(module, n)])
    sum_instead_of_average(module)
    if not options.get("cpu_offload"):  # the sum of the shards, on the CPU, would have no backend
        keep_partial(module)
    sum_gradients_of(module, left_whole(unit), tuple(groups))


def _in_float8(module: nn.Module, name: str) -> bool:
    from parallelizer.styles.float8.linear import computes_in_float8

    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and computes_in_float8(module.get_submodule(path))


def is_of_experts(unit: Application) -> bool:
    """Whether a unit has the parameters of experts that are shared out over `ep`."""
    return any(EXPERT_SHARDS in by_axis for by_axis in unit.params.values())


def inside_of_experts(unit: Application, module: nn.Module) -> set[nn.Parameter]:
    """The parameters inside a module of experts that are none of theirs: the unit around sums their gradients."""
    return {param for name, param in module.named_parameters() if name not in unit.params}


def shared_out(module: nn.Module) -> set[nn.Parameter]:
    """The parameters inside a module that are shared out over `ep`: no unit around their own one gathers them."""
    from torch.distributed.tensor import DTensor

    return {
        param
        for param in module.parameters()
        if isinstance(param, DTensor) and EXPERT in (param.device_mesh.mesh_dim_names or ())
    }


@exports("fsdp")
def export(unit: Application, exporting: Exporting) -> Iterator[Statement]:
    """A call of `fully_shard`."""
    options, policy = unit.options, precision_policy(unit)
    arguments, copies = [MODULE, f"mesh={exporting.mesh}"], []
    if options.get("reshard_after_forward") is not None:
        arguments.append(f"reshard_after_forward={options['reshard_after_forward']}")
    if policy is not None:
        arguments.append(f"mp_policy={'precision' if policy == exporting.precision else policy}")
    if options.get("cpu_offload"):
        arguments.append('offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")')
    if dims := _other_dims(unit):
        copies.append(shard_on)
        texts = dict_text({n: str(d) for n, d in dims.items()})
        arguments.append(f"shard_placement_fn=shard_on({MODULE}, {texts})")
    whole = left_whole(unit)
    if len(whole) == 1:
        arguments.append(f'ignored_params={{{MODULE}.get_parameter("{whole[0]}")}}')
    elif whole:
        arguments.append(f"ignored_params={{{MODULE}.get_parameter(name) for name in {list_text(whole)}}}")
    yield Statement("fully_shard", tuple(arguments), copies=tuple(copies))
    if unit.options.get("gather") == "float8":
        from parallelizer.styles.float8.gathers import gather_in_float8

        yield calls(gather_in_float8, list_text(exporting.gathered))


def exported_casts(unit: Application) -> Iterator[tuple[str, Statement]]:
    """For what a unit leaves whole, what is done before anything else: modules inside it, and the statements."""
    if unit.options.get("param_dtype"):
        for path, leaves in by_owner(left_whole(unit)).items():
            yield path, calls(compute_in, list_text(leaves), f"torch.{unit.options['param_dtype']}")


def exported_sums(unit: Application, mesh: str) -> Iterator[Statement]:
    """For what a unit leaves whole, what is done behind everything else."""
    if unit.axes and (whole := left_whole(unit)):
        yield calls(sum_gradients_of, list_text(whole), f"{mesh}.get_all_groups()")


def precision_policy(unit: Application) -> str | None:
    """The unit's MixedPrecisionPolicy as an expression; None without one."""
    dtypes = [f"{k}=torch.{unit.options[k]}" for k in ("param_dtype", "reduce_dtype") if unit.options.get(k)]
    return f"MixedPrecisionPolicy({', '.join(dtypes)})" if dtypes else None


def by_owner(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters by the path of the module that owns them."""
    found: dict[str, list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        found.setdefault(path, []).append(leaf)
    return found


def compute_in(module: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
    """Let forward see these parameters of the module in `dtype`, as FSDP's mixed precision does for its own."""
    from parallelizer.styles.parameter_views import run_on_views

    run_on_views(module, {name: lambda param: param.to(dtype) for name in names})


def shard_on(module: nn.Module, dims: Mapping[str, int]) -> Any:
    """For `fully_shard`: which parameter is sharded on which dimension; the others on their first."""
    from torch.distributed.tensor import Shard

    return {module.get_parameter(name): Shard(dim) for name, dim in dims.items()}.get


def sum_instead_of_average(model: nn.Module) -> None:
    """Have FSDP sum gradients over the data ranks, where it would average them: what a token weighs is the loss's business."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def sum_gradients_of(unit: nn.Module, names: Sequence[str], groups: Sequence[dist.ProcessGroup]) -> None:
    """From the next forward of `unit` on, sum the gradients of parameters that FSDP leaves whole over these groups.

    The sum is a hook on the parameter itself, wherever it is used. Materialising a model replaces its parameters, so the
    hooks are looked after whenever the unit's forward begins.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    hooked: dict[str, nn.Parameter] = {}

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        # In float32 at least: sums in bfloat16 lose small addends, and gloo's differ from rank to rank.
        dtype = torch.promote_types(local.dtype, torch.float32)
        wide = local.to(dtype, memory_format=torch.contiguous_format, copy=True)
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(wide, group=group)
        total = wide.to(local.dtype)
        if not isinstance(gradient, DTensor):
            return total
        shape, stride = gradient.shape, gradient.stride()
        return DTensor.from_local(
            total, gradient.device_mesh, gradient.placements, run_check=False, shape=shape, stride=stride
        )

    def attach(*_: Any) -> None:
        for name in names:
            param = unit.get_parameter(name)
            if hooked.get(name) is not param and param.requires_grad:
                param.register_hook(summed)
                hooked[name] = param

    if names and groups:
        unit.register_forward_pre_hook(attach)


def _other_dims(unit: Application) -> dict[str, int]:
    """The dimensions of parameters that are not sharded on their first."""
    return {name: p.dim for name, by_axis in unit.params.items() for p in by_axis.values() if p.dim}


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _enclosed(path: str, paths: Sequence[str]) -> bool:
    return any(other != path and is_in(path, other) for other in paths)


def is_in(name: str, path: str) -> bool:
    """Whether a module or a parameter of that name is inside the module of that path."""
    return path == "" or name.startswith(path + ".")
