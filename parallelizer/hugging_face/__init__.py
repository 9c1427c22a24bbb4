"""Models of `transformers`, unmodified: how they are built, fed, initialised, and what their attention needs.

Nothing here imports `transformers` until a model of it is asked for; the rest of the package knows such a model by
`recognise.is_pretrained`.
"""

from parallelizer.hugging_face.build import causal_lm, register

__all__ = ["causal_lm", "register"]
