"""A backward in two parts, for zero-bubble schedules: first the gradients of inputs, which another stage waits for, later
those of the weights.

Gradients of inputs flow along the nodes of autograd's graph from which an input is reached, the trunk. The first part computes
these alone, and keeps the gradients that arrive at nodes of the trunk with a branch to a weight. The second part runs these
nodes once more, for their branches alone. As Qi et al., Zero Bubble Pipeline Parallelism, 2023, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


@dataclass
class Branches:
    """Weights whose branches leave the trunk at the same nodes. `arrived` are the gradients at each of these nodes, by the node's
    outputs. `begun` are what backward began at outside of the trunk, with the gradient there: no input is reached from it.
    """

    weights: list[torch.Tensor]
    nodes: set[Node]
    arrived: dict[Node, Gradients] = field(default_factory=dict)
    begun: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)


def backward_inputs(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Iterable[torch.Tensor],
) -> tuple[Gradients, list[Branches]]:
    """The gradients of `inputs`, None for one that no root depends on, and what `backward_weights` takes. `gradients` are
    those of the roots; without them each root is a scalar with the gradient 1.
    """
    given = [torch.ones_like(r) for r in roots] if gradients is None else list(gradients)
    begun = [get_gradient_edge(root) for root in roots]
    users = _users(edge.node for edge in begun)
    trunk = _reached_from([get_gradient_edge(one).node for one in inputs], users, frozenset())
    branches = _branches(weights, users, trunk, frozenset(edge.node for edge in begun))
    handles = [
        node.register_prehook(_keeping(one.arrived, node)) for one in branches for node in one.nodes & trunk
    ]
    try:
        found = torch.autograd.grad(roots, inputs, given, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for one in branches:
        outside = one.nodes - trunk
        one.begun = [(e, g) for e, g in zip(begun, given, strict=True) if e.node in outside]
    return found, branches


def backward_weights(branches: Sequence[Branches]) -> None:
    """Add the weights' gradients to their `grad`."""
    for one in branches:
        # A branch may lead into the trunk's nodes of another weight: what arrives there is what arrived.
        handles = [node.register_prehook(_instead(kept)) for node, kept in one.arrived.items()]
        starts = one.begun + [
            (GradientEdge(node, at), gradient)
            for node, kept in one.arrived.items()
            for at, gradient in enumerate(kept)
            if gradient is not None
        ]
        try:
            if starts:
                edges, given = zip(*starts, strict=True)
                # The nodes between two uses of a weight belong to other branches too.
                torch.autograd.backward(edges, given, retain_graph=True, inputs=one.weights)
        finally:
            for handle in handles:
                handle.remove()
            one.arrived.clear()


def _users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """All nodes below `roots`, each with those that pass a gradient to it."""
    users: dict[Node, list[Node]] = {node: [] for node in roots}
    waiting = list(users)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in users:
                users[below] = []
                waiting.append(below)
            users[below].append(node)
    return users


def _reached_from(
    nodes: Iterable[Node], users: Mapping[Node, Sequence[Node]], stop: frozenset[Node] | set[Node]
) -> set[Node]:
    """Those of `nodes` that are in the graph, and all above them, up to the first that are in `stop`."""
    found = {node for node in nodes if node in users}
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        if node in stop:
            continue
        for above in users[node]:
            if above not in found:
                found.add(above)
                waiting.append(above)
    return found


def _branches(
    weights: Iterable[torch.Tensor],
    users: Mapping[Node, Sequence[Node]],
    trunk: set[Node],
    roots: frozenset[Node],
) -> list[Branches]:
    """The weights that gradients reach. Those that share a node at which their branches begin are together."""
    of_node: dict[Node, Branches] = {}
    for weight in weights:
        above = _reached_from([get_gradient_edge(weight).node], users, trunk)
        nodes = above & (trunk | roots)
        if not nodes:
            continue
        together = Branches([weight], nodes)
        for other in {id(b): b for n in nodes if (b := of_node.get(n)) is not None}.values():
            together.weights += other.weights
            together.nodes |= other.nodes
        of_node.update(dict.fromkeys(together.nodes, together))
    return list({id(one): one for one in of_node.values()}.values())


def _keeping(kept: dict[Node, Gradients], node: Node) -> Callable[[Gradients], Gradients | None]:
    def hook(arriving: Gradients) -> None:
        kept[node] = arriving

    return hook


def _instead(kept: Gradients) -> Callable[[Gradients], Gradients | None]:
    return lambda _: kept
