"""What operators return on meta, from memory."""

from __future__ import annotations

from typing import Any

import torch

from parallelizer.compiler.observe.remembered_results import RememberedResults
from parallelizer.torch_private import storage_key


class Counting(RememberedResults):
    """Counts the operators that really ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.counted: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            self.ran.append(func._schema.name.partition("::")[2])
            return func(*given, **named)

        run._schema = func._schema  # type: ignore[attr-defined]
        return self.result(self.counted.setdefault(func, run), args, kwargs or {})


def test_equal_calls_run_once_and_what_shares_memory_shares_it_every_time() -> None:
    with Counting() as mode:
        tensors = [torch.empty(4, 6, device="meta") for _ in range(3)]
        mode.ran.clear()
        products = [t @ t.t() for t in tensors]
        assert mode.ran.count("mm") == 1 and [p.shape for p in products] == [(4, 4)] * 3
        assert len({storage_key(p) for p in products}) == 3
        for tensor in tensors:
            assert storage_key(tensor.view(24)) == storage_key(tensor)
            assert storage_key(torch.ops.aten._unsafe_view(tensor, [24])) == storage_key(tensor)
            assert tensor.add_(1) is tensor
