"""`compile`: `torch.compile` around one module's forward.

The compiled function is the module's `forward` after the other styles: tensor styles, context parallelism,
recomputation. The module's own hooks stay outside, especially FSDP's, which gather before the compiled code
runs and free after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.registry import applies, exports
from parallelizer.styles.statements import Statement, calls

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.styles.application import Application, Exporting, Live

declare(
    StyleDeclaration(
        "compile",
        "compile",
        None,
        "compile forward and backward by torch.compile",
        {
            "backend": OptionKind(
                "choice",
                "the backend of torch.compile; eager and aot_eager need no C++ compiler",
                ("inductor", "aot_eager", "eager"),
            ),
            "mode": OptionKind(
                "choice", "the mode of torch.compile", ("default", "max-autotune-no-cudagraphs")
            ),
            "dynamic": OptionKind(
                "bool",
                "true: one code for all sizes; false: code for each size, as under tensor parallelism; by default torch decides",
            ),
            "fullgraph": OptionKind("bool", "raise an error for a graph break"),
        },
        defaults={"backend": "inductor", "mode": "default", "fullgraph": "false"},
    )
)


@applies("compile")
def apply(application: Application, module: nn.Module, live: Live) -> None:
    """From now on the module's forward runs compiled, from its first call on."""
    from parallelizer.styles.compiled_forward import compile_forward, mark_compiled

    compile_forward(module, **compile_options(application.options))
    mark_compiled(module)


@exports("compile")
def export(application: Application, exporting: Exporting) -> Iterator[Statement]:
    """The same call."""
    from parallelizer.styles.compiled_forward import compile_forward

    options = compile_options(application.options)
    given = (
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        for name, value in options.items()
    )
    yield calls(compile_forward, *given)


def compile_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `torch.compile` is given: the style's options that were written; a mode is inductor's alone."""
    given = {
        name: options[name]
        for name in ("backend", "mode", "dynamic", "fullgraph")
        if options.get(name) is not None
    }
    if given.get("backend", "inductor") != "inductor":
        given.pop("mode", None)
    return given
