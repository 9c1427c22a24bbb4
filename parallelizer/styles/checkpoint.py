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
                "full, or selective: keep the results of matmuls and attention",
                ("full", "selective"),
            )
        },
        defaults={"mode": "full"},
    )
)


@applies("checkpoint")
def apply(application: Application, module: nn.Module, live: Live) -> None:
    """Recompute what the module's forward computes, all of it or all but the costly operators' results."""
    recompute(module, kept_operators() if _is_selective(application) else ())


@exports("checkpoint")
def export(application: Application, exporting: Exporting) -> Iterator[Statement]:
    """The same call; the operators that are kept have a name in the file."""
    yield calls(recompute, *(["KEPT"] if _is_selective(application) else []))


def kept_operators() -> tuple[str, ...]:
    """The names of the operators whose results selective checkpointing keeps."""
    from parallelizer import torch_private

    return torch_private.COSTLY_OPERATORS


def recompute(module: nn.Module, keep: Collection[str] = ()) -> None:
    """Recompute the module's activations in backward, but for the results of the operators named in `keep`."""
    import functools

    import torch
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    from parallelizer.styles.wrap_forward import wrap_forward

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator.name() in keep else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if keep:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    wrap_forward(module, around)


def _is_selective(application: Application) -> bool:
    return application.options.get("mode") == "selective"
