"""A dispatch mode that remembers what operators return on the meta device.

Equal layers call them on equal shapes again, and torch works shapes out in Python. Results that share memory with an input
are not remembered: they share it every time.
"""

from __future__ import annotations

from typing import Any

import torch

from parallelizer.torch_private import TorchDispatchMode, storage_key, tree_leaves

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class RememberedResults(TorchDispatchMode):
    """For modes that watch a forward on meta: they call `result` where they would call the operator."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, list[_Form]] = {}

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator returns, from memory if it was run on tensors of these forms before."""
        leaves = tree_leaves((args, kwargs))
        key = (
            func,
            tuple(kwargs),
            *(_form(x) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves),
        )
        try:
            forms = self._known.get(key)
        except TypeError:  # an argument that has no hash
            return func(*args, **kwargs)
        if forms is not None:
            made = [
                torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                for shape, stride, dtype in forms
            ]
            return made[0] if len(func._schema.returns) == 1 else tuple(made)
        result = func(*args, **kwargs)
        returned = [result] if isinstance(result, torch.Tensor) else result
        plain = isinstance(returned, list | tuple) and all(type(t) is torch.Tensor for t in returned)
        lists = any(str(r.type) == "List[Tensor]" for r in func._schema.returns)
        given = {storage_key(x) for x in leaves if isinstance(x, torch.Tensor)}
        new = plain and all(t.is_meta and storage_key(t) not in given for t in returned)
        if new and not lists and not func._schema.is_mutable:
            self._known[key] = [_form(t) for t in returned]
        return result


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype
