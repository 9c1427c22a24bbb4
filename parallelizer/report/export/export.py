"""The compiled plan as plain Python on public torch names: `build_mesh` and `parallelize(model, mesh)`, to be
read and kept."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence

from torch import nn

from parallelizer.calls import Calls
from parallelizer.fold import fold_paths
from parallelizer.mesh import folded_name
from parallelizer.plan import AXES, Buffer
from parallelizer.program import Program
from parallelizer.show import export_calls, export_helpers, export_own
from parallelizer.show.export_loops import WIDTH, access, emit
from parallelizer.tied_parameters import tied_names

IMPORTS: Mapping[str, Sequence[str]] = {
    "collections.abc": ("Iterable", "Mapping", "Sequence"),
    "typing": ("Any",),
    "torch": ("nn",),
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.tensor": (
        "DTensor",
        "Partial",
        "Placement",
        "Replicate",
        "Shard",
        "distribute_tensor",
    ),
    "torch.distributed.tensor.parallel": (
        "ColwiseParallel",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "parallelize_module",
    ),
    "torch.utils.checkpoint": ("CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts"),
}
RUNTIME: Mapping[str, Sequence[str]] = {
    "parallelizer.context.buffers": ("LocalBuffers", "shard_batch"),
    "parallelizer.context.exported": ("buffers", "current_order"),
    "parallelizer.context.intercept": ("ContextOptions", "wrap"),
    "parallelizer.mesh": ("fsdp_mesh",),
    "parallelizer.plan": ("REPLICATE", "Flow", "shard"),
    "parallelizer.styles.io": ("Layouts", "SplitSequence"),
}
"""What context parallelism needs, and nothing else does."""

MODULES = {
    "copy": "copy",
    "functools": "functools",
    "inspect": "inspect",
    "torch": "torch",
    "dist": "torch.distributed as dist",
}


def export(program: Program, model: nn.Module, calls: Calls | None = None, command: str = "") -> str:
    """The program as the text of a Python file with `build_mesh()` and `parallelize(model, mesh)`.

    `model` is the one the program was compiled for. With `calls` (see `calls.observe`) inputs are laid out by
    torch's own PrepareModuleInput, which must know how a module is called; without, by a helper. `command` is
    what the file says it was written by. A style of the user's own is imported from where its class is;
    PlanError is raised for one that cannot be made anew from what it holds.
    """
    body = [*_parallelize(program, model, calls)]
    own = export_own.origins(export_calls.own_styles(program))
    mesh = _build_mesh(program)
    constants = _constants(program, "\n".join(body))
    extras = _batch_function(program)
    helpers = _helpers("\n".join([*body, *extras]))
    code = "\n".join([*constants, *mesh, *extras, *helpers, *body])
    parts = [
        _docstring(program, model, calls, command, code),
        "",
        *_imports(code, own),
        *constants,
        *mesh,
        *body,
        *extras,
        *helpers,
    ]
    return "\n".join(parts).rstrip() + "\n"


def _docstring(program: Program, model: nn.Module, calls: Calls | None, command: str, code: str) -> str:
    ranks = f"{program.mesh.world_size:,} rank{'s' if program.mesh.world_size > 1 else ''}"
    where = f"{program.mesh}, {ranks}" if program.mesh.world_size > 1 else ranks
    lines = _wrapped(
        f"The plan {program.plan.name} ({program.plan.file}) for {type(model).__name__} on {where}, as plain PyTorch."
    )
    lines += [""]
    lines += [f"Written by `{command}`.", ""] if command else []
    lines += [
        "    mesh = build_mesh()",
        '    with torch.device("meta"):',
        f"        model = {type(model).__name__}(...)",
        "    parallelize(model, mesh)",
        '    model.to_empty(device="cuda")  # then give its parameters values',
    ]
    notes = []
    if "sum_instead_of_average" in code:
        notes.append(
            "Gradients are summed over the data ranks: divide the loss by the tokens of the global batch, not of one rank's."
        )
    if leaves := _sharded_outputs(program, calls):
        notes.append(
            f"What {', '.join(leaves)} returns stays sharded, as a DTensor: `F.cross_entropy` takes it, with its backward, under "
            "`torch.distributed.tensor.parallel.loss_parallel()`; its `full_tensor()` is the whole."
        )
    packed = [f"{a.module}.{name}".lstrip(".") for a in program for name in a.packed]
    if packed:
        notes.append(
            f"Packed, so permute whole values before they are loaded: {', '.join(fold_paths(packed))}."
        )
    if _needs_runtime(program):
        notes.append(
            "Context parallelism, and nothing else, imports its runtime from the package parallelizer: torch's own is "
            "experimental."
        )
    own = export_own.origins(export_calls.own_styles(program))
    if own:
        notes.append(f"Imports styles of your own from {', '.join(own)}.")
    if any(map(export_own.imports_this_package, own)):
        notes.append("There they are registered with the package parallelizer, which that imports.")
    if program.redistribute != "greedy":
        notes.append(
            f"parallel.redistribute={program.redistribute} is left out, since torch has no public name for it: "
            "tensors on several axes move axis by axis here, and may send more."
        )
    for note in notes:
        lines += ["", *_wrapped(note)]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}\n"""'


def _sharded_outputs(program: Program, calls: Calls | None) -> list[str]:
    """The modules that hand on a DTensor, which is then what the model returns."""
    returned = calls.returned_by if calls is not None else ()
    found = [a.module for a in program.of_slot("params", "io") if a.options.get("local") is False]
    return list(dict.fromkeys(module or "the model" for module in found if module in returned))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 3, break_long_words=False, break_on_hyphens=False)  # three quotes


def _needs_runtime(program: Program) -> bool:
    return program.mesh.sizes["cp"] > 1


def _build_mesh(program: Program) -> list[str]:
    mesh = program.mesh
    names = [a for a in AXES if mesh.sizes[a] > 1]
    if (program.of_slot("fsdp") and not mesh.fsdp_axes) or not names:
        names = [a for a in AXES if a in names or a == "dp_shard"]  # fully_shard wants an axis to shard over
    sizes = "".join(f"{mesh.sizes[a]}, " for a in names).rstrip(" " if len(names) == 1 else ", ")
    listed = "".join(f'"{a}", ' for a in names).rstrip(" " if len(names) == 1 else ", ")
    return [
        "",
        'def build_mesh(device_type: str = "cuda") -> DeviceMesh:',
        '    """The mesh over all ranks, outermost axis first: neighbouring ranks differ in the last one."""',
        f"    return init_device_mesh(device_type, ({sizes}), mesh_dim_names=({listed}))",
        "",
    ]


def _parallelize(program: Program, model: nn.Module, calls: Calls | None) -> list[str]:
    mesh = program.mesh
    casts, sums = export_calls.whole_parameter_items(program)
    tensor = export_calls.tensor_items(program, calls, _own_names())
    attention, checkpoints, compiled, units = (
        f(program)
        for f in (
            export_calls.attention_items,
            export_calls.checkpoint_items,
            export_calls.compile_items,
            export_calls.unit_items,
        )
    )
    lines = ["", "def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:"]
    lines += [
        '    """Make the model parallel in place; every rank calls it, with the model on meta or with values."""'
    ]
    used = {tuple(a.axes) for a in program if a.slot in ("params", "io", "attention")}
    for axes in sorted(used, key=lambda axes: [AXES.index(a) for a in axes]):
        names = ", ".join(f'"{a}"' for a in AXES if a in axes)
        lines.append(f"    {export_calls.mesh_variable(axes)} = mesh[{names}]")
    if units:
        lines += _fsdp_mesh(program)
    if _needs_runtime(program):
        lines.append(
            "    sequence = current_order(SEQUENCE, mesh)  # which rows of the sequence each rank has"
        )
    if casts:
        lines += ["", "    # What FSDP leaves whole is cast as what it shards.", *emit(casts, model)]
    if tensor:
        lines += [
            "",
            "    # Tensor parallelism: parameters, and how tensors arrive and leave.",
            *emit(tensor, model),
        ]
        for first, *others in tied_names(model):
            for name in others:
                lines += [
                    f"    # {name} is {first}, and became a tensor of its own.",
                    f"    {_owned(model, name)} = {_owned(model, first)}",
                ]
    if attention:
        lines += [
            "",
            "    # Context parallelism: attention over the whole sequence. This is the runtime of parallelizer.",
        ]
        lines += emit(attention, model)
    if checkpoints:
        lines += ["", "    # Activations that are computed again in backward.", *emit(checkpoints, model)]
    if compiled:
        lines += ["", "    # Compiled, around all of that.", *emit(compiled, model)]
    if units:
        lines += [
            "",
            f"    # FSDP over {folded_name(mesh)}{', replicated over dp_replicate' if mesh.sizes['dp_replicate'] > 1 else ''}.",
        ]
        policy = export_calls.precision(program)
        lines += [f"    precision = {policy}"] if policy else []
        lines += emit(units, model, inner_first=True)
        lines.append("    sum_instead_of_average(model)")
    if sums:
        lines += ["    # What FSDP leaves whole, it does not reduce either.", *emit(sums, model)]
    if _needs_runtime(program):
        lines += [
            "",
            "    # The model's positional buffers, seen as this rank's rows while the model runs.",
            "    LocalBuffers(model, SEQUENCE, mesh, sequence)",
        ]
    if len(lines) == 3:
        lines.append("    # One rank: nothing to do.")
    return [*lines, "    return model", ""]


def _own_names() -> set[str]:
    """Every name that the file may have for something of torch's or of its own."""
    imported = (n for names in (*IMPORTS.values(), *RUNTIME.values()) for n in names)
    helpers = (n for n, h in vars(export_helpers).items() if inspect.isfunction(h))
    return {*imported, *helpers, *MODULES, "build_mesh", "parallelize", "local_batch", "model", "mesh"}


def _owned(model: nn.Module, name: str) -> str:
    """The expression for a parameter."""
    *path, leaf = name.split(".")
    return f"{access(model, 'model', tuple(path))}.{leaf}"


def _fsdp_mesh(program: Program) -> list[str]:
    mesh = program.mesh
    if mesh.sizes["cp"] > 1 and (len(mesh.fsdp_axes) > 1 or mesh.sizes["dp_replicate"] > 1):
        return ["    fsdp = fsdp_mesh(mesh)  # folds dp_shard and cp, for which torch has no public name"]
    names = [
        *(["dp_replicate"] if mesh.sizes["dp_replicate"] > 1 else []),
        *(mesh.fsdp_axes or ("dp_shard",)),
    ]
    return [f"    {export_calls.FSDP_MESH} = mesh[{', '.join(f'{chr(34)}{a}{chr(34)}' for a in names)}]"]


def _constants(program: Program, body: str) -> list[str]:
    lines = []
    if "KEPT" in body:
        names = "".join(f'    "{name}",\n' for name in export_calls.kept_operators())
        lines += [
            "# Operators whose results are kept, since they cost most to compute again.",
            f"KEPT = (\n{names})",
            "",
        ]
    if _needs_runtime(program):
        plan = program.plan
        batch = {n: _written(b) for n, b in plan.batch.items()}
        model = {n: b.dim for n, b in plan.buffers.items()}
        balance = f', balance="{plan.balance}"' if plan.balance != "auto" else ""
        lines += [
            "# The dimension that is the sequence, of batch entries and of the model's buffers.",
            f"SEQUENCE = buffers(batch={_literal(batch)}, model={_literal(model)}{balance})",
            "",
        ]
    return lines


def _written(buffer: Buffer) -> object:
    """An entry of the batch as the plan has it."""
    if buffer.make is not None or (buffer.pad is None and not buffer.documents):
        return buffer.make or buffer.dim
    more = {"pad": buffer.pad} if buffer.pad is not None else {}
    return {"dim": buffer.dim, **more, **({"documents": True} if buffer.documents else {})}


def _literal(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{k}": {_literal(v)}' for k, v in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _batch_function(program: Program) -> list[str]:
    if not _needs_runtime(program):
        return []
    return [
        "",
        "def local_batch(batch: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:",
        '    """This rank\'s tokens of a batch of whole sequences."""',
        "    return shard_batch(batch, SEQUENCE, mesh)",
        "",
    ]


def _helpers(code: str) -> list[str]:
    """The sources of the helpers that the code calls."""
    lines: list[str] = []
    for name, helper in vars(export_helpers).items():
        if (
            inspect.isfunction(helper)
            and helper.__module__ == export_helpers.__name__
            and name in _names(code)
        ):
            lines += ["", *inspect.getsource(helper).splitlines(), ""]
    return lines


def _imports(code: str, own: Mapping[str, Sequence[str]]) -> list[str]:
    """Imports of what the code uses, in ruff's order; `own` are names of the user's by module."""
    used = _names(code)
    standard = [
        f"import {text}" for name, text in MODULES.items() if name in used and not text.startswith("torch")
    ]
    ours = [_from(module, used) for module in RUNTIME]
    lines = ["from __future__ import annotations", ""]
    lines += _block(standard + [_from(m, used) for m in IMPORTS if not m.startswith("torch")])
    torch_modules = [
        f"import {text}" for name, text in MODULES.items() if name in used and text.startswith("torch")
    ]
    third = torch_modules + [_from(m, used) for m in IMPORTS if m.startswith("torch")]
    lines += _block(third)
    if any(ours):
        lines += ["# The runtime of context parallelism.", *_block(ours)]
    if own:
        lines += ["# Styles of your own.", *_block([_line(module, names) for module, names in own.items()])]
    return lines


def _block(lines: Sequence[str]) -> list[str]:
    kept = [line for line in lines if line]
    return [*kept, ""] if kept else []


def _from(module: str, used: set[str]) -> str:
    return _line(module, [n for n in {**IMPORTS, **RUNTIME}[module] if n in used])


def _line(module: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {n},\n" for n in names) + ")"


def _names(code: str) -> set[str]:
    """Every name that a piece of code mentions, in annotations too."""
    tree = ast.parse("from __future__ import annotations\n" + textwrap.dedent(code))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
