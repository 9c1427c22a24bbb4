"""Applies and exports the styles of the slots `params` and `io`: by the ParallelStyle from their compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from parallelizer.styles.application import Application, Exporting, Live
from parallelizer.styles.context_parallel.split_sequence import SplitSequence
from parallelizer.styles.layouts import PrepareIO, lay_out_statement
from parallelizer.styles.own_output import OwnedRowwise, copy_output
from parallelizer.styles.own_rows import RowwiseEmbedding, look_up_own_rows
from parallelizer.styles.placed_parameters import ShardParams
from parallelizer.styles.statements import Statement, calls
from parallelizer.styles.torch_styles import native_statement, prepare_statement

_AFTERWARDS: Mapping[type[ParallelStyle], Callable[..., Any]] = {
    RowwiseEmbedding: look_up_own_rows,
    OwnedRowwise: copy_output,
}
"""What our classes do behind torch's."""


def apply_tensor_style(application: Application, module: nn.Module, live: Live) -> None:
    """Let the application's ParallelStyle change the module. Raises ValueError where there is none."""
    if application.act is None:
        raise ValueError(
            f"the application of {application.style} to {application.module} has no ParallelStyle"
        )
    act = application.act
    if isinstance(act, SplitSequence):
        act = SplitSequence(act.layouts, live.sequence)
    # Without values there is nothing to send; with values, rank 0's are everyone's, as in torch.
    source = None if live.meta else 0
    parallelize_module(module, live.submesh(application.axes), act, src_data_rank=source)


def tensor_style_statements(application: Application, exporting: Exporting) -> Sequence[Statement] | None:
    """The same as plain Python; None for a user's own style, which is not known here."""
    act, axes = application.act, application.axes
    if act is None:
        return ()
    native = native_statement(act)
    if native is not None:
        then = _AFTERWARDS.get(type(act))
        return [native] if then is None else [native, calls(then)]
    if type(act) is SplitSequence:
        return [act.statement()]
    if type(act) is PrepareIO:
        prepared = prepare_statement(act.layouts, exporting.called)
        return [prepared or lay_out_statement(act.layouts, axes, act.axis, exporting.mesh)]
    if type(act) is ShardParams:  # and no class of the user's that builds on it
        return list(act.statements(axes, exporting.mesh))
    return None


def has_hooks(application: Application) -> bool:
    """Whether the application hooks conversions onto its module, so that torch's classes cannot tell how it is called."""
    return not isinstance(application.act, ShardParams) or application.act.layouts is not None
