"""Applications x live model x DeviceMesh -> parallel model: each style changes its modules, in the program's order."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.compiler.observe.families import family_of
from parallelizer.language.plan import full_name
from parallelizer.language.styles import STYLES
from parallelizer.mesh import data_groups, describe, with_shard_axis
from parallelizer.runtime.constructor_values import look
from parallelizer.runtime.exception_notes import add_notes
from parallelizer.runtime.state import ParallelState, remember
from parallelizer.styles.application import Application, Live, Program
from parallelizer.styles.context_parallel.buffers import LocalBuffers
from parallelizer.styles.context_parallel.order import static_order
from parallelizer.styles.context_parallel.sequence import CurrentOrder
from parallelizer.styles.registry import APPLY, PREPARE
from parallelizer.styles.tensor_styles import apply_tensor_style
from parallelizer.styles.tied_parameters import parameter_names, tie, tied_names


def apply(program: Program, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make a model parallel in place and return it.

    The model is the one for which the program was compiled. It is on meta (then call `materialize`), or has
    the same values on every rank. Collective: every rank calls it. Raises ValueError, with the model
    unchanged, if the sizes of the mesh are not those of the program. After any other error the model is
    only partly changed: discard it.
    """
    if describe(mesh) != program.mesh:
        raise ValueError(
            f"the program was compiled for {program.mesh}, but the DeviceMesh is {describe(mesh)}"
        )
    if program.of_slot("fsdp"):
        mesh = with_shard_axis(mesh)
        # The logits leave as a view of a DTensor's local tensor, which nothing changes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    STYLES.load()
    look(model)
    modules = dict(model.named_modules())
    tied, frozen = tied_names(model), [n for n, p in parameter_names(model).items() if not p.requires_grad]
    sequence = CurrentOrder(static_order(program.plan.balance, program.mesh.sizes["cp"]))
    live = Live(model, mesh, sequence, meta=any(p.is_meta for p in model.parameters()))
    for application in program:
        if (prepare := PREPARE.get(application.style)) is not None:
            prepare(application, modules[application.module], live)
    for application in program.of_slot("params", "io"):
        _apply(application, modules, live)
    tie(model, tied)  # each name has got a DTensor of its own
    for name in frozen:  # which torch's SequenceParallel forgets
        model.get_parameter(name).requires_grad_(False)
    for application in program:
        if application.slot not in ("params", "io"):
            _apply(application, modules, live)
    add_notes(program, model)
    packed = {full_name(a.module, n): p for a in program for n, p in a.packed.items()}
    buffers = LocalBuffers(model, program.plan, mesh, sequence)
    family = family_of(model)
    if family is not None:
        family.after_apply(model, program, mesh, sequence)
    names = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
    remember(model, ParallelState(program, mesh, packed, buffers, tuple(data_groups(mesh)), names))
    return model


def _apply(application: Application, modules: Mapping[str, nn.Module], live: Live) -> None:
    """Let the application's style change its module."""
    APPLY.get(application.style, apply_tensor_style)(application, modules[application.module], live)
