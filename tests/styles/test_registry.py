"""Styles that users register, and how inputs are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

import parallelizer as pz
from parallelizer.language.plan import REPLICATE, Flow, shard
from parallelizer.language.styles import STYLES, OptionKind, StyleDeclaration, declare
from parallelizer.styles.placed_parameters import ShardParams
from parallelizer.styles.registry import FUNCTIONS
from parallelizer.styles.target import Sharding, StyleError, Target, forward_names, named_inputs
from tests.findings import compiled, finding, marked, mesh_of
from tests.parity import Case, assert_exact, compare, plan
from tests.styles.models import Mlp, around


@pytest.fixture
def registry() -> Iterator[None]:
    """Styles registered by a test are gone after it."""
    styles, functions = dict(STYLES), dict(FUNCTIONS)
    yield
    for now, before in ((STYLES, styles), (FUNCTIONS, functions)):
        now.clear()
        now.update(before)


class Scaled(ParallelStyle):
    """Multiplies a module's output."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, args, output: output * self.by)
        return module


@pytest.mark.ranks
def test_a_registered_style_runs(registry: None) -> None:
    @pz.style("halves", options={"dim": OptionKind("int", "the dimension")})
    def halves(target: Target) -> Sharding:
        """Shards every parameter and runs on local shards."""
        params = {n: {target.axis: shard(0)} for n, _ in target.module.named_parameters(recurse=False)}
        return Sharding(ShardParams(params, axis=target.axis), (target.axis,), params)

    @pz.style("twice", slot="io")
    def twice(target: Target) -> ParallelStyle:
        return Scaled(2)

    @pz.style("half", slot="io")
    def half(target: Target) -> ParallelStyle:
        return Scaled(1)

    text = """
        rules:
          inner: {style: prepare-input, input: replicate, local: true, grad: partial}
          inner.up: {style: halves, dim: 0}
          inner.down: {style: rowwise, input: shard(-1)}
          after: half
    """
    spoilt = text.replace("after: half", "after: twice")
    results = compare(
        [
            Case("right", plan(text), {"tp": 2}, around(Mlp)),
            Case("wrong", plan(spoilt), {"tp": 2}, around(Mlp)),
        ]
    )
    assert_exact(results["right"])
    assert not isinstance(results["wrong"], str) and results["wrong"]["logits"] > 0.1


def test_options_reach_the_style_and_are_checked(registry: None) -> None:
    seen: list[Target] = []

    @pz.style(
        "noted",
        options={"by": OptionKind("int", "the factor"), "lies": OptionKind("placement", "how")},
        axis="tp_outer",
    )
    def noted(target: Target) -> ParallelStyle:
        seen.append(target)
        return Scaled(1)

    text = "layouts: {stream: shard(1)}\nrules:\n  inner.up: {style: noted, by: 3, lies: stream}"
    (one,) = compiled(
        text, around(Mlp), mesh_of(tp_outer=2), options={"noted": {"by": 4, "axis": "tp_outer"}}
    )
    assert one.axes == ("tp_outer",)
    assert (seen[0].path, seen[0].degree, seen[0].options["by"]) == ("inner.up", 2, 3)
    assert seen[0].options["lies"] == shard(1)
    text = text.replace("by: 3", "by: x")
    with pytest.raises(pz.PlanError, match="not a whole number"):
        plan(text)


def test_what_a_registered_style_refuses_is_a_diagnostic(registry: None) -> None:
    @pz.style("never", options={"by": OptionKind("int", "the factor")})
    def never(target: Target) -> ParallelStyle:
        raise StyleError("my-code", f"not {target.path}", "use another", "by")

    text = "rules:\n  inner.*: {style: never, by: 3}"
    found = finding(text, around(Mlp), mesh_of(tp=2))
    assert (found.code, found.message, found.help) == (
        "my-code",
        "not inner.up (1 more like it)",
        "use another",
    )
    assert marked(text, found) == "by"


def test_a_name_is_given_once_and_a_slot_must_be_open(registry: None) -> None:
    for wrong in ({"name": "colwise"}, {"name": "mine", "slot": "fsdp"}, {"name": "mine", "slot": "nowhere"}):
        with pytest.raises(ValueError):
            pz.style(**wrong)(lambda target: Scaled(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown slot"):
        declare(StyleDeclaration("mine", "nowhere", "tp", ""))


# Names of inputs


class Forward:
    """Modules by the signature of their forward."""

    class Plain(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x

    class Star(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return xs[0]

    class Keywords(nn.Module):
        def forward(self, x: Tensor, **others: Tensor) -> Tensor:
            return x

    class Nothing(nn.Module):
        def forward(self) -> None:
            return None


def target(module: nn.Module, flows: dict[str, Flow]) -> Target:
    return Target(module, "m", None, {"input": flows}, "tp", {})


FLOW = Flow(REPLICATE)


@pytest.mark.parametrize(
    ("module", "names", "first"),
    [
        (Forward.Plain(), ("x", "mask"), "x"),
        (Forward.Star(), None, ""),
        (Forward.Keywords(), None, "x"),
        (nn.Linear(1, 1), ("input",), "input"),
        (Forward.Nothing(), (), ""),
    ],
)
def test_a_bare_placement_means_the_first_parameter(module: nn.Module, names: Any, first: str) -> None:
    assert forward_names(module) == names
    assert named_inputs(target(module, {"": FLOW})) == {first: FLOW}
    assert named_inputs(target(module, {})) == {}


def test_names_that_forward_cannot_take_are_refused() -> None:
    with pytest.raises(StyleError, match="has no parameter 'y'") as caught:
        named_inputs(target(Forward.Plain(), {"y": FLOW}))
    assert caught.value.help == "it takes x, mask"
    assert named_inputs(target(Forward.Keywords(), {"y": FLOW})) == {"y": FLOW}
