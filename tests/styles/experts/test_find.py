"""What `experts` takes of a module, and what it refuses where it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallelizer.language.plan import REPLICATE, shard
from parallelizer.styles.experts.find import counting_attributes
from tests.findings import compiled, finding, findings, marked, mesh_of
from tests.styles.experts.models import Batched, Mixture, Normed, Stacked
from tests.styles.models import WIDTH, Mlp, around


class Listed(nn.Module):
    """Each expert is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("it is only compiled")


class Unequal(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.empty(3, WIDTH))


class Gated(Stacked):
    """A module of matrices beside the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)


def text(rule: str) -> str:
    return f'rules:\n  {rule}\n  "": fsdp'


PLAIN = "inner.experts: experts"


def test_every_parameter_is_placed_and_sharded_by_what_ep_leaves() -> None:
    program = compiled(text(PLAIN), around(Mixture), mesh_of(dp_shard=4, ep=2))
    (experts,) = program.of_slot("experts")
    assert experts.axes == ("ep",)
    assert experts.params == {name: {"ep": shard(0)} for name in ("up", "bias", "down")}
    unit, root = program.of_slot("fsdp")
    assert (unit.module, unit.axes, root.module, root.axes) == (
        "inner.experts",
        ("efsdp",),
        "",
        ("dp_shard",),
    )
    assert unit.params == {name: {"efsdp": shard(1)} for name in ("up", "bias", "down")}
    assert not any("experts" in name for name in root.params)


def normed() -> nn.Module:
    return Mixture(Normed())


def test_a_norm_inside_lies_whole_and_the_unit_around_sums_its_gradients() -> None:
    rule = text("inner.experts: {style: experts, whole: [norm]}")
    program = compiled(rule, around(normed), mesh_of(dp_shard=4, ep=2))
    (experts,) = program.of_slot("experts")
    assert set(experts.params) == {"up", "bias", "down"}
    unit, root = program.of_slot("fsdp")
    assert set(unit.params) == {"up", "bias", "down"}
    for name in ("inner.experts.norm.weight", "inner.experts.norm.bias"):
        assert root.params[name] == {"dp_shard": REPLICATE} and root.reasons[name] == "inside of experts"


@pytest.mark.parametrize(
    ("rule", "found"), [("", True), ("replicate", False), ("{style: replicate, grad: replicate}", False)]
)
def test_a_norm_inside_needs_a_sum_over_tp(rule: str, found: bool) -> None:
    more = f"\n  inner.experts.norm: {rule}" if rule else ""
    lines = f"rules:\n  inner.experts: {{style: experts, whole: [norm]}}{more}"
    said = findings(lines, around(normed), mesh_of(tp=2, ep=2))
    sums = [one for one in said if one.code == "unreduced-gradients"]
    assert bool(sums) == found
    assert all("of inner.experts.norm over tp=2" in one.message for one in sums)


def test_a_norm_inside_is_named_and_there() -> None:
    found = finding(text(PLAIN), around(normed), mesh_of(dp_shard=2, ep=2))
    assert found.code == "experts-module" and "write whole: [norm]" in (found.help or "")
    gated = finding(text(PLAIN), around(lambda: Mixture(Gated())), mesh_of(dp_shard=2, ep=2))
    assert gated.code == "experts-module" and "whole" not in (gated.help or "")
    rule = text("inner.experts: {style: experts, whole: [nrom]}")
    found = finding(rule, around(normed), mesh_of(dp_shard=2, ep=2))
    assert found.code == "experts-module" and "has no module 'nrom' inside of it" in found.message
    assert "did you mean norm" in (found.help or "")


def test_what_ep_leaves_takes_the_first_dimension_that_divides() -> None:
    (unit, _) = compiled(text(PLAIN), around(Mixture), mesh_of(dp_shard=8, ep=2)).of_slot("fsdp")
    # [experts, 6, 8], [experts, 6] and [experts, 8, 6] over 4 ranks
    placed = {name: str(by_axis["efsdp"]) for name, by_axis in unit.params.items()}
    assert placed == {"up": "shard(2)", "bias": "replicate", "down": "shard(1)"}
    assert unit.reasons == {"bias": "no dimension left divides by 4"}


def test_without_ep_it_does_nothing() -> None:
    assert compiled(text(PLAIN), around(Mixture), mesh_of(dp_shard=2)).of_slot("experts") == []


@pytest.mark.parametrize(
    ("rule", "inner", "code", "mark"),
    [
        ("inner: experts", Mixture, "unknown-input", "experts"),
        ("inner.experts: {style: experts, tokens: x}", Mixture, "unknown-input", "tokens"),
        ("inner: {style: experts, tokens: x, ids: x, weights: x}", Mixture, "experts-module", "experts"),
        ("inner: experts", Listed, "experts-module", "experts"),
        ("inner: experts", Unequal, "experts-module", "experts"),
        (
            "inner.experts: {style: experts, params: {up: shard(1)}}",
            Mixture,
            "experts-module",
            "params",
        ),
        ('inner.experts: {style: experts, params: {"*": replicate}}', Mixture, "experts-module", "replicate"),
        ('inner.experts: {style: experts, params: {"*": shard(5)}}', Mixture, "unknown-dim", "shard(5)"),
        ("inner.experts: {style: experts, params: {out: shard(0)}}", Mixture, "unknown-parameter", "out"),
        (
            'inner.experts: {style: experts, params: {"*": {tp: shard(0)}}}',
            Mixture,
            "experts-module",
            "shard(0)",
        ),
        (
            "inner.experts: {style: experts, dispatch: nccl-switch}",
            Mixture,
            "dispatch-missing",
            "dispatch",
        ),
        ("inner.experts: {style: shard-params, params: {up: {ep: shard(0)}}}", Mixture, "folded-axis", "ep"),
        ("inner.experts: {style: replicate, axis: ep}", Mixture, "folded-axis", "ep"),
    ],
)
def test_what_it_refuses(rule: str, inner: Callable[[], nn.Module], code: str, mark: str) -> None:
    found = finding(text(rule), around(inner), mesh_of(dp_shard=2, ep=2))
    assert (found.code, marked(text(rule), found)) == (code, mark)


def test_the_number_of_experts_must_divide() -> None:
    found = finding(text(PLAIN), around(Mixture), mesh_of(dp_shard=3, ep=3))
    assert found.code == "not-divisible"
    assert found.message == "the number of experts of inner.experts is 4, which ep=3 does not divide"


def test_parameters_that_params_leaves_out_are_named() -> None:
    found = finding(
        text("inner.experts: {style: experts, params: {up: shard(0)}}"),
        around(Mixture),
        mesh_of(dp_shard=2, ep=2),
    )
    assert found.message.startswith("inner.experts.bias is not split over the experts")
    assert found.help == 'add "*": shard(0) for the parameters that `params` does not name'


def test_experts_that_nothing_sums_are_found() -> None:
    found = {
        f.code: f for f in findings("rules: {inner.experts: experts}", around(Mixture), mesh_of(tp=4, ep=2))
    }
    assert "over efsdp=2" in found["unreduced-gradients"].message


def test_an_ep_that_no_rule_uses_is_found() -> None:
    (found,) = findings('rules: {"": fsdp}', around(Mixture), mesh_of(dp_shard=2, ep=2))
    assert found.code == "unused-axis" and "ep=2" in found.message


def test_an_axis_whose_ranks_share_experts_out_is_used() -> None:
    mesh = mesh_of(tp=2, ep=2)
    assert "unused-axis" not in {f.code for f in findings(text(PLAIN), around(Mixture), mesh)}
    assert "unused-axis" in {f.code for f in findings('rules: {"": fsdp}', around(Mixture), mesh_of(tp=2))}


@pytest.mark.parametrize(("module", "names"), [(Stacked(), ("num_experts",)), (Batched(), ())])
def test_attributes_that_count_experts(module: Any, names: tuple[str, ...]) -> None:
    assert counting_attributes(module, 4) == names
    assert counting_attributes(module, 8) == ()
