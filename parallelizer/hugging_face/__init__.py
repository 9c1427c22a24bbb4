"""Models of `transformers`, unmodified: how they are built, fed, initialised, and what their attention needs.

The rest of the package knows them as one of the families of parallelizer/compiler/observe/families.py. Nothing here
imports `transformers` until a model of it is asked for.
"""

from typing import Any

__all__ = ["causal_lm", "register"]


def __getattr__(
    name: str,
) -> Any:  # configurations name `parallelizer.hugging_face.causal_lm`; what it needs is torch
    if name in __all__:
        from parallelizer.hugging_face import build

        return getattr(build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
