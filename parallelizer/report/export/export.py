"""The compiled plan as plain Python on public torch names: `build_mesh` and `parallelize(model, mesh)`, to be read and kept.

Each style says its own lines; what they call of this package is copied into the file, source and all.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.compiler.observe.module_calls import Calls
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import AXES, Buffer, folded_name
from parallelizer.report.export import own_styles
from parallelizer.report.export import stages as exported_stages
from parallelizer.report.export.copied import Copied, copied
from parallelizer.report.export.exported_stage import PlainStage, SharedGradients
from parallelizer.report.export.loops import Item, access, emit
from parallelizer.styles import fsdp
from parallelizer.styles.application import Application, Exporting, Program
from parallelizer.styles.checkpoint import kept_operators
from parallelizer.styles.float8.recipes import weights_in_float8
from parallelizer.styles.registry import EXPORT
from parallelizer.styles.statements import WIDTH, Statement
from parallelizer.styles.tensor_styles import has_hooks, tensor_style_statements
from parallelizer.styles.tied_parameters import tied_names

IMPORTS: Mapping[str, Sequence[str]] = {
    "collections.abc": ("Callable", "Mapping"),
    "torch": ("nn",),
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.pipelining": ("PipelineStage", *exported_stages.SCHEDULES.values()),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.tensor": ("Partial", "Replicate", "Shard"),
    "torch.distributed.tensor.parallel": (
        "ColwiseParallel",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "parallelize_module",
    ),
}
"""What the lines of styles may name of torch. Copies bring their own imports."""

RUNTIME: Mapping[str, Sequence[str]] = {
    "parallelizer.styles.context_parallel.buffers": ("LocalBuffers", "shard_tokens"),
    "parallelizer.styles.context_parallel.exported": ("buffers", "current_order"),
    "parallelizer.styles.context_parallel.intercept": ("ContextOptions", "wrap"),
    "parallelizer.styles.context_parallel.split_sequence": ("SplitSequence",),
    "parallelizer.mesh": ("fsdp_mesh",),
    "parallelizer.language.plan": ("REPLICATE", "Flow", "shard"),
    "parallelizer.styles.layouts": ("Layouts",),
}
"""What context parallelism needs, and nothing else does."""

FSDP_MESH = "fsdp"
"""The variable that holds the mesh of `fully_shard`."""

HEADINGS = {
    "random": "Random numbers of each rank's own, for dropout of what is split.",
    "attention": "Context parallelism: attention over the whole sequence. This is the runtime of parallelizer.",
    "checkpoint": "Activations that are computed again in backward.",
    "compile": "Compiled, around all of that.",
}
"""What the file says above the lines of a slot, for those that need no more words."""


def export(program: Program, model: nn.Module, calls: Calls | None = None, command: str = "") -> str:
    """The program as the text of a Python file with `build_mesh()` and `parallelize(model, mesh)`.

    `model` is the one the program was compiled for. With `calls` (see `module_calls.observe`) inputs are laid out by
    torch's own PrepareModuleInput, which must know how a module is called; without, by a function that is copied. `command`
    is what the file says it was written by. A program with stages becomes `build_stages` and `build_schedule` on
    torch.distributed.pipelining too. A style of the user's own is imported from where its class is; PlanError is raised for one
    that cannot be made anew from what it holds, and for stages that torch cannot run.
    """
    _refuse_experts(program)
    exported_stages.refuse_what_torch_cannot_run(program, calls)
    lines = _Lines.of(program, calls)
    body = _parallelize(program, model, lines)
    more: list[object] = [PlainStage] if program.stages is not None else []
    if program.stages is not None and program.stages.shared:
        more.append(SharedGradients)
    copies = copied([*lines.copies, *more])
    own = own_styles.origins(_own_acts(program))
    mesh, extras = _build_mesh(program), _batch_function(program)
    constants = [*(line for source in copies.constants.values() for line in (*source.splitlines(), ""))]
    constants += _constants(program, "\n".join(body))
    if program.stages is not None:
        constants += exported_stages.constants(program.stages, calls)
        units = lines.slots.get("fsdp", ())
        body += exported_stages.functions(program.stages, units, _fsdp_lines(program, lines), model)
    helpers = [line for source in copies.sources.values() for line in ("", *source.splitlines(), "")]
    code = "\n".join([*constants, *mesh, *extras, *helpers, *body])
    parts = [
        _docstring(program, model, calls, command, code),
        "",
        *_imports(code, own, copies),
        *constants,
        *mesh,
        *body,
        *extras,
        *helpers,
    ]
    return "\n".join(parts).rstrip() + "\n"


def _refuse_experts(program: Program) -> None:
    """Raise PlanError for experts that are shared out: their ranks are a mesh that no public name of torch's makes."""
    for application in program.of_slot("experts"):
        message = "experts that are shared out over ep cannot be written out: torch has no public name that folds their mesh"
        help_text = "export a mesh with ep=1, or call parallelizer.parallelize on the one with ep"
        raise PlanError([Diagnostic("export-style", message, application.rule.span, help_text)])


@dataclass(frozen=True)
class _Lines:
    """What is to be written, by slot; `casts` come before everything else and `sums` behind it. `precision` is the one
    MixedPrecisionPolicy of all units.
    """

    slots: Mapping[str, Sequence[Item]]
    casts: Sequence[Item]
    sums: Sequence[Item]
    precision: str | None

    @classmethod
    def of(cls, program: Program, calls: Calls | None) -> _Lines:
        units = program.of_slot("fsdp")
        policies = {fsdp.precision_policy(unit) for unit in units}
        precision = policies.pop() if len(policies) == 1 and len(units) > 1 else None
        slots: dict[str, list[Item]] = {"tensor": _tensor_items(program, calls)}
        for application in program:
            if application.slot not in ("params", "io", "stage"):
                gathered = weights_in_float8(application, program)
                exporting = Exporting(_mesh_of(application), precision=precision, gathered=gathered)
                statements = EXPORT[application.style](application, exporting)
                slots.setdefault(application.slot, []).extend(_items(application, statements))
        casts = [
            Item(".".join(p for p in (unit.module, path) if p), comment(unit), statement)
            for unit in units
            for path, statement in fsdp.exported_casts(unit)
        ]
        sums = [item for unit in units for item in _items(unit, fsdp.exported_sums(unit, FSDP_MESH))]
        return cls(slots, casts, sums, precision)

    @property
    def copies(self) -> Iterator[object]:
        """What the lines call of this package, each once."""
        every = (*self.casts, *(i for items in self.slots.values() for i in items), *self.sums)
        found = dict.fromkeys(c for item in every for c in item.call.copies)
        yield from found
        if self.slots.get("fsdp"):
            yield fsdp.sum_instead_of_average


def comment(application: Application) -> str:
    """The rule that an application comes from, and where it is written."""
    rule = application.rule
    key = rule.key or '""'
    return f"{key}  ({rule.span.file if rule.span.file.startswith('<') else f'{rule.span.file}:{rule.span.line}'})"


def mesh_variable(axes: Sequence[str]) -> str:
    """The variable that holds the sub-mesh of some axes."""
    return "_".join(a for a in AXES if a in axes)


def _mesh_of(application: Application) -> str:
    return FSDP_MESH if application.slot == "fsdp" else mesh_variable(application.axes)


def _items(application: Application, statements: Iterable[Statement]) -> list[Item]:
    mesh = _mesh_of(application)
    return [
        Item(application.module, comment(application), s, mesh if s.parallel_style else None)
        for s in statements
    ]


def _tensor_items(program: Program, calls: Calls | None) -> list[Item]:
    """Styles of parameters, inputs and outputs. Raises PlanError for styles of the user's own that cannot be written as a
    call.
    """
    taken: dict[str, type | None] = dict.fromkeys(_torch_names())
    every = program.of_slot("params", "io")
    found: list[Diagnostic] = []
    items: list[Item] = []
    for application in every:
        others = (a for a in every if a.module == application.module and a is not application)
        known = calls is not None and not any(map(has_hooks, others))
        called = calls.by_module.get(application.module) if calls and known else None
        exporting = Exporting(_mesh_of(application), called)
        if (export_style := EXPORT.get(application.style)) is not None:
            items += _items(application, export_style(application, exporting))
            continue
        statements = tensor_style_statements(application, exporting)
        if statements is not None:
            items += _items(application, statements)
        elif application.act is not None:
            try:
                items += _items(application, [own_styles.own_style(application.act, taken)])
                taken[type(application.act).__name__] = type(application.act)
            except own_styles.Unwritable as error:
                found.append(_unwritable(application, error))
    if found:
        raise PlanError(found)
    return items


def _unwritable(application: Application, error: own_styles.Unwritable) -> Diagnostic:
    return Diagnostic(
        "export-style",
        f"{application.style} is a style of your own, which cannot be written out: {error}",
        application.rule.span,
        "let a module have its class, and the class keep its arguments as attributes of their names; or export "
        "without it, and apply it by hand",
    )


def _own_acts(program: Program) -> list[ParallelStyle]:
    """The styles whose classes are the user's own."""
    acts = (a.act for a in program.of_slot("params", "io") if a.act is not None)
    return [a for a in acts if not type(a).__module__.startswith(("torch.", "parallelizer."))]


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
    ]
    if program.stages is None:
        lines += [
            "    parallelize(model, mesh)",
            '    model.to_empty(device="cuda")  # then give its parameters values',
        ]
    else:
        lines += [
            "    stages = build_stages(model, mesh)",
            "    for stage in stages:",
            '        stage.to_empty(device="cuda")  # then give its parameters values',
            '    schedule = build_schedule(stages, mesh, loss_fn, torch.device("cuda"))',
        ]
        shared = bool(program.stages.shared)
        lines += ["    sum_shared = SharedGradients(stages, mesh, SHARED, PLACED)"] if shared else []
        lines += ["    schedule.step(target=labels, **inputs)"]
        lines += ["    sum_shared()"] if shared else []
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
    own = own_styles.origins(_own_acts(program))
    if own:
        notes.append(f"Imports styles of your own from {', '.join(own)}.")
    if any(map(own_styles.imports_this_package, own)):
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


def _parallelize(program: Program, model: nn.Module, lines: _Lines) -> list[str]:
    mesh = program.mesh
    units = lines.slots.get("fsdp", ())
    body = ["", "def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:"]
    body += [
        '    """Make the model parallel in place; every rank calls it, with the model on meta or with values."""'
    ]
    used = {tuple(a.axes) for a in program if a.slot in ("params", "io", "random", "attention")}
    for axes in sorted(used, key=lambda axes: [AXES.index(a) for a in axes]):
        names = ", ".join(f'"{a}"' for a in AXES if a in axes)
        body.append(f"    {mesh_variable(axes)} = mesh[{names}]")
    if units and program.stages is None:
        body += _fsdp_mesh(program)
    if _needs_runtime(program):
        body.append(
            "    sequence = current_order(SEQUENCE, mesh)  # which rows of the sequence each rank has"
        )
    if lines.slots.get("precision"):
        body += ["", "    # Linears in float8, emulated on CPUs.", *emit(lines.slots["precision"], model)]
    if lines.casts:
        body += ["", "    # What FSDP leaves whole is cast as what it shards.", *emit(lines.casts, model)]
    if lines.slots["tensor"]:
        body += [
            "",
            "    # Tensor parallelism: parameters, and how tensors arrive and leave.",
            *emit(lines.slots["tensor"], model),
        ]
        for first, *others in tied_names(model):
            for name in others:
                body += [
                    f"    # {name} is {first}, and became a tensor of its own.",
                    f"    {_owned(model, name)} = {_owned(model, first)}",
                ]
    for slot, items in lines.slots.items():
        if slot in HEADINGS:
            body += ["", f"    # {HEADINGS[slot]}", *emit(items, model)]
    if units and program.stages is None:
        body += [
            "",
            f"    # FSDP over {folded_name(mesh)}{', replicated over dp_replicate' if mesh.sizes['dp_replicate'] > 1 else ''}.",
        ]
        body += [f"    precision = {lines.precision}"] if lines.precision else []
        body += emit(units, model, inner_first=True)
        body.append("    sum_instead_of_average(model)")
    if lines.sums:
        body += ["    # What FSDP leaves whole, it does not reduce either.", *emit(lines.sums, model)]
    if _needs_runtime(program):
        body += [
            "",
            "    # The model's positional buffers, seen as this rank's rows while the model runs.",
            "    LocalBuffers(model, SEQUENCE, mesh, sequence)",
        ]
    if len(body) == 3:
        alone = (
            "One rank: nothing to do." if program.stages is None else "Nothing inside of a stage is divided."
        )
        body.append(f"    # {alone}")
    return [*body, "    return model", ""]


def _fsdp_lines(program: Program, lines: _Lines) -> list[str]:
    """What a function that shards the units begins with."""
    precision = [f"    precision = {lines.precision}"] if lines.precision else []
    return [*_fsdp_mesh(program), *precision]


def _torch_names() -> set[str]:
    """Every name that the lines of a file may take from torch or from this package."""
    imported = (n for names in (*IMPORTS.values(), *RUNTIME.values()) for n in names)
    return {*imported, "torch", "build_mesh", "parallelize", "local_batch", "model", "mesh"}


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
    return [f"    {FSDP_MESH} = mesh[{', '.join(f'{chr(34)}{a}{chr(34)}' for a in names)}]"]


def _constants(program: Program, body: str) -> list[str]:
    lines = []
    if "KEPT" in body:
        names = "".join(f'    "{name}",\n' for name in kept_operators())
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
        "    return shard_tokens(batch, SEQUENCE, mesh)",
        "",
    ]


def _imports(code: str, own: Mapping[str, Sequence[str]], copies: Copied) -> list[str]:
    """Imports of what the code uses, in ruff's order; `own` are names of the user's by module."""
    used = _names(code)
    wanted: dict[str, set[str]] = {module: set(names) for module, names in copies.names.items()}
    for module, names in IMPORTS.items():
        wanted.setdefault(module, set()).update(n for n in names if n in used)
    modules: dict[str, str] = {name: name for name in ("copy", "torch") if name in used}
    modules.update(copies.modules)
    plain = {f"import {m}" if n == m else f"import {m} as {n}": m for n, m in modules.items()}
    lines = ["from __future__ import annotations", ""]
    for torch_too in (False, True):
        block = sorted(line for line, m in plain.items() if m.startswith("torch") is torch_too)
        block += [
            _line(module, sorted(names, key=_order))
            for module, names in sorted(wanted.items())
            if module.startswith("torch") is torch_too and names
        ]
        lines += _block(block)
    runtime = [_line(module, [n for n in names if n in used]) for module, names in RUNTIME.items()]
    if any(runtime):
        lines += ["# The runtime of context parallelism.", *_block(runtime)]
    if own:
        lines += ["# Styles of your own.", *_block([_line(module, names) for module, names in own.items()])]
    return lines


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as ruff sorts names."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2), name


def _block(lines: Sequence[str]) -> list[str]:
    kept = [line for line in lines if line]
    return [*kept, ""] if kept else []


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
