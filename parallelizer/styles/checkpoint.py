"""`checkpoint`: activations of a module that are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.registry import applies, exports
from parallelizer.styles.statements import Statement, calls

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.styles.application import Application, Exporting, Live

declare(
    StyleDeclaration(
        "checkpoint",
        "checkpoint",
        None,
        "recompute activations in backward",
        {
            "mode": OptionKind(
                "choice",
                "full; selective: keep the results of matmuls and attention; or alternate: of every other matmul, and attention",
                ("full", "selective", "alternate"),
            )
        },
        defaults={"mode": "full"},
    )
)


KEEPING = ("selective", "alternate")
"""The modes that keep the results of costly operators."""


@applies("checkpoint")
def apply(application: Application, module: nn.Module, live: Live) -> None:
    """Recompute what the module's forward computes, all of it or all but the costly operators' results."""
    mode = application.options.get("mode")
    recompute(module, kept_operators() if mode in KEEPING else (), alternate=mode == "alternate")


@exports("checkpoint")
def export(application: Application, exporting: Exporting) -> Iterator[Statement]:
    """The same call; the operators that are kept have a name in the file."""
    mode = application.options.get("mode")
    kept = ["KEPT"] if mode in KEEPING else []
    yield calls(recompute, *kept, *(["alternate=True"] if mode == "alternate" else []))


def kept_operators() -> tuple[str, ...]:
    """The names of the operators whose results selective checkpointing keeps."""
    from parallelizer import torch_private

    return torch_private.COSTLY_OPERATORS


def recompute(module: nn.Module, keep: Collection[str] = (), *, alternate: bool = False) -> None:
    """Recompute the module's activations in backward, but for the results of the operators named in `keep`; with `alternate`,
    of every second product of matrices they are recomputed too.
    """
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    from parallelizer.styles.wrap_forward import wrap_forward

    def contexts() -> Any:
        products = {False: 0, True: 0}  # of the forward, and of its recomputation, which have to agree

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = operator.name() in keep
            if kept and alternate and operator.name() in ("aten::mm", "aten::addmm", "aten::linear"):
                products[context.is_recompute] += 1
                kept = products[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    options: dict[str, Any] = {"use_reentrant": False}
    if keep:
        options["context_fn"] = contexts

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    wrap_forward(module, around)
