"""Around the forward of a module of experts: tokens go to the ranks of their experts, and results come back."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelizer.language.routing import Routing
from parallelizer.styles.experts.counts import exchanged_counts
from parallelizer.styles.experts.gathered import gathered
from parallelizer.styles.experts.stream import Stream
from parallelizer.styles.experts.travel import combine, exchange, spread
from parallelizer.styles.wrap_forward import wrap_forward

Tensor = torch.Tensor


class ExpertsError(RuntimeError):
    """A module of experts was given something else than tokens, the numbers of their experts and weights, or returned something
    else than a tensor: what it was, and what to do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def share_out(
    module: nn.Module,
    mesh: DeviceMesh,
    over: DeviceMesh | None,
    *,
    experts: int,
    names: tuple[str, str, str],
    attributes: Sequence[str],
    layout: str,
    routing: Routing,
    path: str = "",
    dispatch: str = "all-to-all",
) -> None:
    """From now on the module's forward computes the rows of this rank's experts, of `experts` on all ranks of `mesh`.

    `names` are the arguments with the tokens [..., features], their experts [..., k] and the weights [..., k]; `attributes`
    have the number of experts, which forward sees divided. `over` are the ranks of tp, and `layout` says how tokens lie over
    them (`stream.LAYOUTS`); `dispatch` is all-to-all or all-gather. The module's
    forward must take any number of tokens with k = 1, and compute each by itself. It raises ExpertsError for arguments that
    have other dtypes or sizes, and for another result than a tensor.
    """
    signature = inspect.signature(module.forward)
    streams = {} if over is None else {kind: Stream(over, kind) for kind in (layout, "equal")}
    group, calls = mesh.get_group(), itertools.count()
    travel = gathered if dispatch == "all-gather" else _travelled

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = signature.bind(*args, **kwargs)
        tokens, ids, weights = (given.arguments[name] for name in names)
        border = _Border.of(tokens, layout)
        stream = streams.get(border.layout) if border.layout != "split" else None

        def computed(rows: Tensor, numbers: Tensor, shares: Tensor) -> Tensor:
            # As many dimensions as the module expects.
            ahead = (1,) * (tokens.ndim - 2)
            inner = [rows.view(*ahead, *rows.shape), numbers.view(*ahead, -1, 1), shares.view(*ahead, -1, 1)]
            given.arguments.update(zip(names, inner, strict=True))
            with _divided(module, attributes, experts // group.size()):
                made = forward(*given.args, **given.kwargs)
            if not isinstance(made, Tensor):
                raise ExpertsError(
                    f"it returned a {type(made).__name__}, and experts return one tensor with a row for each token",
                    "compute anything else outside of the module",
                )
            return made.view(rows.size(0), -1)

        flat = [border.local(t) for t in (tokens, ids, weights)]
        _check(names, *flat)
        shape = flat[0].shape
        x, e, w = (t.reshape(-1, t.shape[-1]) for t in flat)
        length = x.size(0)
        if stream is not None:
            x, e, w = (stream.part(t) for t in (x, e, w))
        result = travel(x, e, w, experts, group, routing, path, next(calls), computed)
        if stream is not None:
            result = stream.joined(result, length)
        return border.back(result.view(*shape[:-1], -1))

    wrap_forward(module, around)


ARGUMENTS = "let `tokens`, `ids` and `weights` name the arguments of the module's forward"


def _check(names: tuple[str, str, str], tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
    """Raises ExpertsError unless the arguments can be what their names in the rule say."""
    if ids.dtype.is_floating_point or not weights.dtype.is_floating_point:
        raise ExpertsError(
            "the numbers of the experts of each token are integers and their weights are not, but "
            f"{_shown('ids', names[1], ids)} and {_shown('weights', names[2], weights)}",
            ARGUMENTS,
        )
    if ids.shape != weights.shape or ids.shape[:-1].numel() != tokens.shape[:-1].numel():
        raise ExpertsError(
            "each token has its features, and as many experts as weights, but "
            f"{_shown('tokens', names[0], tokens)}, {_shown('ids', names[1], ids)} and {_shown('weights', names[2], weights)}",
            ARGUMENTS,
        )


def _shown(option: str, name: str, tensor: Tensor) -> str:
    return f"`{option}: {name}` is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _travelled(
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: int,
    group: Any,
    routing: Routing,
    path: str,
    call: int,
    computed: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The weighted sum of its experts' results for each token: tokens [T, D], ids and weights [T, k]; [T, Dout]."""
    copies = ids.size(1)
    flat = ids.reshape(-1)
    # Rows in the order of their experts are in the order of the ranks that hold these.
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    counts = exchanged_counts(flat, experts, group, routing, path, call)
    rows = exchange(spread(tokens, order, inverse, copies), counts.send, counts.receive, group)
    shares = exchange(weights.reshape(-1).index_select(0, order), counts.send, counts.receive, group)
    numbers, arrived = counts.experts, rows.size(0)
    if not arrived:
        # The module runs all the same, so that its parameters have gradients: on one row without weight.
        rows = torch.cat([rows, rows.new_zeros(1, rows.size(1))])
        shares, numbers = torch.cat([shares, shares.new_zeros(1)]), numbers.new_zeros(1)
    results = computed(rows, numbers, shares).narrow(0, 0, arrived)
    return combine(exchange(results, counts.receive, counts.send, group), order, inverse, copies)


@dataclass(frozen=True)
class _Border:
    """How the tokens came in: the placements of a DTensor, None for a plain tensor."""

    layout: str
    mesh: DeviceMesh | None = None
    placements: tuple[Any, ...] = ()

    @staticmethod
    def of(tokens: Tensor, layout: str) -> _Border:
        if not isinstance(tokens, DTensor):
            return _Border(layout)
        split = any(isinstance(p, Shard) for p in tokens.placements)
        placements = tuple(p if isinstance(p, Shard) else Replicate() for p in tokens.placements)
        return _Border("split" if split else "equal", tokens.device_mesh, placements)

    def local(self, tensor: Tensor) -> Tensor:
        """A plain tensor, of what this rank has."""
        return (
            tensor.redistribute(self.mesh, self.placements).to_local()
            if isinstance(tensor, DTensor)
            else tensor
        )

    def back(self, tensor: Tensor) -> Tensor:
        """The output as the tokens came in."""
        return (
            tensor
            if self.mesh is None
            else DTensor.from_local(tensor, self.mesh, self.placements, run_check=False)
        )


@contextmanager
def _divided(module: nn.Module, names: Sequence[str], count: int) -> Iterator[None]:
    """Inside, these attributes of the module have another number."""
    kept = {name: getattr(module, name) for name in names}
    try:
        for name in names:
            setattr(module, name, count)
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
