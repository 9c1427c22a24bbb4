"""Each application of a program as a call on torch's public names, or on a helper where torch has no class
for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from parallelizer import torch_private
from parallelizer.calls import Calls
from parallelizer.compiled import compile_options
from parallelizer.diagnostics import Diagnostic, PlanError
from parallelizer.placement import to_torch
from parallelizer.plan import AXES, REPLICATE, Flow, Placement
from parallelizer.program import Application, Program
from parallelizer.show.export_loops import MODULE, Call, Item
from parallelizer.show.export_own import Unwritable, own_style
from parallelizer.styles.io import Layouts, PrepareIO, SplitSequence, makes_partial
from parallelizer.styles.kv_heads import ReplicatedHeads
from parallelizer.styles.tensor import ShardParams

FSDP_MESH = "fsdp"
"""The variable that holds the mesh of `fully_shard`."""


def comment(application: Application) -> str:
    """The rule that an application comes from, and where it is written."""
    rule = application.rule
    key = rule.key or '""'
    return f"{key}  ({rule.span.file if rule.span.file.startswith('<') else f'{rule.span.file}:{rule.span.line}'})"


def mesh_variable(axes: Sequence[str]) -> str:
    """The variable that holds the sub-mesh of some axes."""
    return "_".join(a for a in AXES if a in axes)


def tensor_items(program: Program, calls: Calls | None, names: Collection[str] = ()) -> list[Item]:
    """The tensor styles; `names` are those that the file may import. Raises PlanError for styles of the
    user's own that cannot be written as a call.
    """
    taken: dict[str, type | None] = dict.fromkeys(names)
    every = program.of_slot("params", "io")
    found: list[Diagnostic] = []
    items: list[Item] = []
    for application in every:
        hooked = [
            a for a in every if a.module == application.module and a is not application and _has_hooks(a)
        ]
        rule, mesh = comment(application), mesh_variable(application.axes)
        style = _style(application, None if hooked else calls)
        if style is not None:
            items.append(Item(application.module, rule, style, mesh))
        elif type(application.act) in (
            ShardParams,
            ReplicatedHeads,
            PrepareIO,
        ):  # and no class of the user's that builds on them
            items += [Item(application.module, rule, call) for call in _by_helpers(application, mesh)]
        elif application.act is not None:
            try:
                items.append(Item(application.module, rule, own_style(application.act, taken), mesh))
                taken[type(application.act).__name__] = type(application.act)
            except Unwritable as error:
                found.append(_unwritable(application, error))
    if found:
        raise PlanError(found)
    return items


def _unwritable(application: Application, error: Unwritable) -> Diagnostic:
    return Diagnostic(
        "export-style",
        f"{application.style} is a style of your own, which cannot be written out: {error}",
        application.rule.span,
        "let a module have its class, and the class keep its arguments as attributes of their names; or export "
        "without it, and apply it by hand",
    )


def own_styles(program: Program) -> list[ParallelStyle]:
    """The styles whose classes are the user's own."""
    acts = (a.act for a in program.of_slot("params", "io") if a.act is not None)
    return [a for a in acts if not type(a).__module__.startswith(("torch.", "parallelizer."))]


def _has_hooks(application: Application) -> bool:
    return not isinstance(application.act, ShardParams) or application.act.layouts is not None


def _style(application: Application, calls: Calls | None) -> Call | None:
    """A ParallelStyle of torch's own (or, over cp, of the runtime); None where there is none for it."""
    act = application.act
    if type(act) is ColwiseParallel or type(act) is RowwiseParallel:
        defaults = (
            (Replicate(), Shard(-1), True) if type(act) is ColwiseParallel else (Shard(-1), Replicate(), True)
        )
        (arrives,), (leaves,) = act.input_layouts, act.output_layouts
        given = zip(
            ("input_layouts", "output_layouts", "use_local_output"),
            (arrives, leaves, act.use_local_output),
            defaults,
            strict=True,
        )
        return Call(type(act).__name__, tuple(f"{k}={_text(v)}" for k, v, default in given if v != default))
    if type(act) is SequenceParallel:
        (sharding,) = act.sequence_sharding
        dim = () if sharding.dim == 1 else (f"sequence_dim={sharding.dim}",)
        return Call("SequenceParallel", (*dim, *(("use_local_output=True",) if act.use_local_output else ())))
    if type(act) is SplitSequence:
        sides = (("input", act.layouts.input), ("output", act.layouts.output))
        layouts = (
            f"{side}={_dict({n: _flow(f) for n, f in flows.items()})}" for side, flows in sides if flows
        )
        return Call("SplitSequence", (f"Layouts({', '.join(layouts)})", "sequence"))
    if type(act) is PrepareIO:
        return _prepare(application.module, act.layouts, calls)
    return None


def _flow(flow: Flow) -> str:
    return f"Flow({_ours(flow.arrives)}, {_ours(flow.wanted)})"


def _ours(placement: Placement | None) -> str:
    if placement is None:
        return "None"
    return f"shard({placement.dim})" if placement.dim is not None else placement.kind.upper()


def _prepare(module: str, layouts: Layouts, calls: Calls | None) -> Call | None:
    """PrepareModuleInput and its relatives, which want every argument of a call spelled out."""
    call = calls.by_module.get(module) if calls else None
    if call is None or layouts.partial_gradients or layouts.partial_output_gradients:
        return None
    if any(map(makes_partial, layouts.input.values())):
        return None
    arguments: list[str] = []
    if layouts.input:
        tensors = {**dict(call.positional), **call.keywords}
        if not all(tensors.get(name) for name in layouts.input):
            return None
        by_position = [layouts.input.get(name) for name, _ in call.positional]
        by_keyword = {k: f for k in call.keywords if (f := layouts.input.get(k)) is not None}
        if any(by_position):
            arguments += _pairs("input_layouts", "desired_input_layouts", by_position)
        if by_keyword:
            for key, side in (("input_kwarg_layouts", _arrives), ("desired_input_kwarg_layouts", _wanted)):
                arguments.append(f"{key}={_dict({k: _text(side(f)) for k, f in by_keyword.items()})}")
        if layouts.local_input:
            arguments.append("use_local_input=True" if layouts.output else "use_local_output=True")
    if layouts.output:
        keys = {int(key or 0) if (key or "0").isdigit() else -1 for key in layouts.output}
        length = 1 if call.outputs is None else call.outputs
        if call.outputs == 1 or not all(0 <= key < length for key in keys):
            return None
        flows = {int(key or 0): flow for key, flow in layouts.output.items()}
        arguments += _pairs("output_layouts", "desired_output_layouts", [flows.get(i) for i in range(length)])
        if not layouts.local_output:
            arguments.append("use_local_output=False")
    name = (
        "PrepareModuleInputOutput"
        if layouts.input and layouts.output
        else "PrepareModule" + ("Input" if layouts.input else "Output")
    )
    return Call(name, tuple(arguments))


def _pairs(first: str, second: str, flows: Sequence[Flow | None]) -> list[str]:
    """Both sides of flows, as one placement or as a tuple with None where nothing is said."""
    sides = []
    for key, side in ((first, _arrives), (second, _wanted)):
        texts = ["None" if flow is None else _text(side(flow)) for flow in flows]
        sides.append(f"{key}={_tuple(texts)}")
    return sides


def _arrives(flow: Flow) -> TorchPlacement:
    return to_torch(flow.arrives or REPLICATE)


def _wanted(flow: Flow) -> TorchPlacement:
    return to_torch(flow.wanted or flow.arrives or REPLICATE)


def _text(value: Any) -> str:
    if isinstance(value, Shard):
        return f"Shard({value.dim})"
    if isinstance(value, Replicate | Partial):
        return f"{type(value).__name__}()"
    return repr(value)


def _by_helpers(application: Application, mesh: str) -> Iterator[Call]:
    act = application.act
    if isinstance(act, ShardParams):
        for name, packing in act.packed.items():
            yield Call(
                "pack",
                (
                    MODULE,
                    f'"{name}"',
                    f"dim={packing.dim}",
                    f"parts={packing.parts}",
                    f"ranks={packing.ranks}",
                ),
            )
        placements = {
            n: [to_torch(by_axis.get(a, REPLICATE)) for a in application.axes]
            for n, by_axis in act.params.items()
        }
        if placements:
            yield Call("place_parameters", (MODULE, mesh, _mapping(placements)))
        if act.buffers:
            slices = {
                n: [to_torch(by_axis.get(a, REPLICATE)) for a in application.axes]
                for n, by_axis in act.buffers.items()
            }
            kept = () if act.layouts is None else ("local=False",)
            yield Call("slice_buffers", (MODULE, mesh, _mapping(slices), *kept))
        if isinstance(act, ReplicatedHeads):
            dims = _dict({n: str(d) for n, d in act.dims.items()})
            yield Call("run_on_head", (MODULE, mesh, dims, f"heads={act.heads}"))
        for name, ranks in act.divide.items():
            if "." in name:
                yield Call("divide_own", (MODULE, f'"{name}"', str(ranks)))
            else:
                yield Call(f"{MODULE}.{name} //= {ranks}", None)
        if act.layouts is None and placements:
            gradients = {
                n: [act.gradients() if isinstance(p, Replicate) else p for p in ps]
                for n, ps in placements.items()
            }
            yield Call("run_on_local_parameters", (MODULE, _mapping(gradients)))
    layouts: Layouts | None = act.layouts  # type: ignore[union-attr]
    if layouts is not None:
        yield _lay_out(application, layouts, act.axis, mesh)  # type: ignore[union-attr]


def _lay_out(application: Application, layouts: Layouts, axis: str, mesh: str) -> Call:
    def place(placement: Placement | None) -> str:
        if placement is None:
            return "None"
        return _list([to_torch(placement) if a == axis else Replicate() for a in application.axes])

    def flows(named: Mapping[str, Flow]) -> str:
        return _dict({n: f"({place(f.arrives or REPLICATE)}, {place(f.wanted)})" for n, f in named.items()})

    sides = (("inputs", layouts.input), ("outputs", layouts.output))
    arguments = [MODULE, mesh, *(f"{side}={flows(named)}" for side, named in sides if named)]
    if layouts.local_input:
        arguments.append("local_inputs=True")
    if not layouts.local_output:
        arguments.append("local_outputs=False")
    if layouts.partial_gradients:
        arguments.append("partial_gradients=True")
    if layouts.partial_output_gradients:
        arguments.append(
            "partial_output_gradients=True" if layouts.last is None else f"partial_last={layouts.last}"
        )
    return Call("lay_out", tuple(arguments))


def _mapping(placements: Mapping[str, Sequence[TorchPlacement]]) -> str:
    return _dict({n: _list(ps) for n, ps in placements.items()})


def _dict(items: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in items.items()) + "}"


def _list(placements: Sequence[TorchPlacement]) -> str:
    return f"[{', '.join(map(_text, placements))}]"


def _strings(texts: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"


def _tuple(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def attention_items(program: Program) -> list[Item]:
    """The modules whose attention sees the whole sequence."""
    return [
        Item(
            a.module,
            comment(a),
            Call(
                "wrap",
                (
                    MODULE,
                    mesh_variable(a.axes),
                    *_context_options(a),
                    "sequence=sequence",
                ),
            ),
        )
        for a in program.of_slot("attention")
    ]


def _context_options(a: Application) -> tuple[str, ...]:
    given = []
    if a.options.get("keep_gathered"):
        given.append("keep_gathered=True")
    if a.options.get("method", "all-gather") != "all-gather":
        given.append(f'method="{a.options["method"]}"')
    if a.options.get("ulysses_degree"):
        given.append(f"ulysses_degree={a.options['ulysses_degree']}")
    return (f"ContextOptions({', '.join(given)})",) if given else ()


def checkpoint_items(program: Program) -> list[Item]:
    """The modules that are recomputed in backward."""
    return [
        Item(
            a.module,
            comment(a),
            Call("recompute_all_but", (MODULE, "KEPT"))
            if a.options.get("mode") == "selective"
            else Call("recompute", (MODULE,)),
        )
        for a in program.of_slot("checkpoint")
    ]


def compile_items(program: Program) -> list[Item]:
    """The modules that run compiled."""
    return [
        Item(a.module, comment(a), Call("compile_forward", (MODULE, *map("=".join, _compiling(a)))))
        for a in program.of_slot("compile")
    ]


def _compiling(application: Application) -> Iterator[tuple[str, str]]:
    for name, value in compile_options(application.options).items():
        yield name, f'"{value}"' if isinstance(value, str) else str(value)


def kept_operators() -> list[str]:
    """The names of the operators whose results selective checkpointing keeps."""
    return [operator.name() for operator in torch_private.costly_operators()]


def unit_items(program: Program) -> list[Item]:
    """FSDP's units, the innermost first."""
    shared = precision(program) is not None
    return [
        Item(a.module, comment(a), Call("fully_shard", tuple(_unit_arguments(a, shared))))
        for a in program.of_slot("fsdp")
    ]


def precision(program: Program) -> str | None:
    """The one mixed-precision policy of all units, to be given a name; None where they differ or there is one
    unit."""
    policies = {_policy(unit) for unit in program.of_slot("fsdp")}
    return policies.pop() if len(policies) == 1 and len(program.of_slot("fsdp")) > 1 else None


def _policy(unit: Application) -> str | None:
    dtypes = [f"{k}=torch.{unit.options[k]}" for k in ("param_dtype", "reduce_dtype") if unit.options.get(k)]
    return f"MixedPrecisionPolicy({', '.join(dtypes)})" if dtypes else None


def _unit_arguments(unit: Application, shared_policy: bool) -> Iterator[str]:
    options, policy = unit.options, _policy(unit)
    yield MODULE
    yield f"mesh={FSDP_MESH}"
    if options.get("reshard_after_forward") is not None:
        yield f"reshard_after_forward={options['reshard_after_forward']}"
    if policy is not None:
        yield f"mp_policy={'precision' if shared_policy else policy}"
    if options.get("cpu_offload"):
        yield 'offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")'
    dims = {name: p.dim for name, by_axis in unit.params.items() for p in by_axis.values() if p.dim}
    if dims:
        yield f"shard_placement_fn=shard_on({MODULE}, {_dict({n: str(d) for n, d in dims.items()})})"
    whole = _whole(unit)
    if whole:
        if len(whole) == 1:
            yield f'ignored_params={{{MODULE}.get_parameter("{whole[0]}")}}'
        else:
            yield f"ignored_params={{{MODULE}.get_parameter(name) for name in {_strings(whole)}}}"


def _whole(unit: Application) -> list[str]:
    """Parameters that a unit leaves whole, by name inside it."""
    return [name for name in unit.params if unit.reasons.get(name)]


def whole_parameter_items(program: Program) -> tuple[list[Item], list[Item]]:
    """For what FSDP leaves whole: the casts, before anything else is done, and the sums of gradients, after
    it."""
    casts, sums = [], []
    for unit in program.of_slot("fsdp"):
        whole = _whole(unit)
        if not whole:
            continue
        rule = comment(unit)
        if unit.axes:
            sums.append(
                Item(
                    unit.module,
                    rule,
                    Call("sum_gradients_of", (MODULE, _strings(whole), f"{FSDP_MESH}.get_all_groups()")),
                )
            )
        if unit.options.get("param_dtype"):
            by_owner: dict[str, list[str]] = {}
            for name in whole:
                path, _, leaf = name.rpartition(".")
                by_owner.setdefault(".".join(p for p in (unit.module, path) if p), []).append(leaf)
            for path, leaves in by_owner.items():
                casts.append(
                    Item(
                        path,
                        rule,
                        Call(
                            "compute_in", (MODULE, _strings(leaves), f"torch.{unit.options['param_dtype']}")
                        ),
                    )
                )
    return casts, sums
