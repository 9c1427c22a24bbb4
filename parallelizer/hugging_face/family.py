"""Models of `transformers` as one family of models; `parallelizer/compiler/observe/families.py` says what is asked of one.

Nothing of transformers is imported until a model of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from parallelizer.hugging_face.architecture import is_model as is_model
from parallelizer.hugging_face.architecture import plan_name as plan_name
from parallelizer.hugging_face.architecture import why_no_plan as why_no_plan

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Diagnostic
    from parallelizer.styles.application import Program
    from parallelizer.styles.context_parallel.sequence import CurrentOrder


def inputs(model: nn.Module, taken: dict[str, Any]) -> dict[str, Any]:
    """On meta, where the model cannot guess documents from the values of positions, a mask of ones keeps it from trying."""
    import inspect

    import torch

    tokens = taken.get("input_ids")
    asked = {*inspect.signature(model.forward).parameters} - {*taken}
    if isinstance(tokens, torch.Tensor) and tokens.is_meta and "attention_mask" in asked:
        taken["attention_mask"] = torch.ones(tokens.shape, dtype=torch.bool, device="meta")
    return taken


def initializer(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """The model's `_init_weights`, which is transformers' name for it and which every architecture overrides."""
    owners: list[Any] = [m for m in model.modules() if is_model(m)]

    def fill(module: nn.Module) -> None:
        # The innermost model, which all that a causal model is made of belongs to, and whose classes share one method.
        owners[-1]._init_weights(module)

    return fill


def vocabulary(model: Any) -> int | None:
    """The rows of the model's input embeddings."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def longest(model: Any) -> int | None:
    """`max_position_embeddings` of the model's configuration."""
    length = getattr(model.config, "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def check(state: Compilation) -> Iterator[Diagnostic]:
    """Attention that knows the sequence's order, positions of the whole sequence, masks of whole columns."""
    from parallelizer.hugging_face.checks import pretrained

    return pretrained(state)


def checks_positions(state: Compilation) -> bool:
    """Whether `check` says that positions are missing, or that masks are made for a part of the sequence."""
    from parallelizer.hugging_face.checks import lacks_positions, masks_refused

    return lacks_positions(state) or masks_refused(state)


def after_apply(model: nn.Module, program: Program, mesh: DeviceMesh, sequence: CurrentOrder) -> None:
    """Attention and masks that know how the sequence is dealt out."""
    from parallelizer.hugging_face import layout, masks

    layout.switch(model, program)
    made = program.plan.batch.get("position_ids")
    masks.follow(
        model,
        sequence,
        mesh.get_local_rank("cp") if program.mesh.sizes["cp"] > 1 else 0,
        program.mesh.sizes["tp"],
        positions_made=made is not None and made.make is not None,
    )
