"""A module with a list of experts and its author's loop: stacked by the rule, it computes what it did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.styles.experts.expert_list import ExpertList
from parallelizer.styles.experts.stack import stack_experts
from tests.findings import compiled, finding, mesh_of
from tests.parity import plan
from tests.styles.experts.models import EXPERTS, Lists, Loop, Looped, Mixture
from tests.styles.models import WIDTH, Mlp, around

LOOP = 'rules: {experts: experts, "": fsdp}'
LISTS = 'rules: {experts: {style: experts, tokens: x, ids: chosen, weights: shares}, "": fsdp}'

PLAIN = "inner.experts: experts"


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def filled(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        nn.init.normal_(param, std=0.5)
    return model


def grads(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the input and of the parameters, zeros where there is none."""
    x = x.clone().requires_grad_()
    made = model(x)
    made.square().sum().backward()
    assert x.grad is not None
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return made.detach(), x.grad, found


@pytest.mark.parametrize(
    ("text", "build"),
    [(LOOP, lambda: Mixture(Loop())), (LISTS, lambda: Mixture(Lists(), rows=True))],
    ids=["a loop", "lists of linears"],
)
def test_it_computes_what_its_author_wrote(text: str, build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    written = filled(build())
    model = stack_experts(copy.deepcopy(written), plan(text))
    assert {type(m) for m in model.modules()} > {ExpertList} and nn.ModuleList not in map(
        type, model.modules()
    )
    x = torch.randn(2, 5, WIDTH)
    made, of_x, expected = grads(written, x)
    also, of_x_too, found = grads(model, x)
    torch.testing.assert_close(also, made)
    torch.testing.assert_close(of_x_too, of_x)
    for name, gradient in found.items():
        path, _, leaf = name.rpartition(".")
        if isinstance(owner := model.get_submodule(path), ExpertList):
            every = [expected[f"{path}.{n}.{owner._leaves[leaf]}"] for n in range(EXPERTS)]
            torch.testing.assert_close(gradient, torch.stack(every))
        else:
            torch.testing.assert_close(gradient, expected[name])
    fresh = stack_experts(build(), plan(text))
    fresh.load_state_dict(written.state_dict())
    torch.testing.assert_close(fresh(x), made)


def test_a_second_call_and_a_plan_without_the_style_change_nothing() -> None:
    model = Mixture(Loop())
    stack_experts(model, plan('rules: {"": fsdp}'))
    stack_experts(model, plan("rules: {experts: experts, '*': {none: experts}}"))
    assert isinstance(model.experts.experts, nn.ModuleList)
    once = stack_experts(model, plan(LOOP))
    names = [name for name, _ in once.named_parameters()]
    assert [name for name, _ in stack_experts(once, plan(LOOP)).named_parameters()] == names
    assert names[0] == "experts.experts.up_weight"


def test_a_loop_takes_the_weights_apart_once() -> None:
    """A slice by itself has a gradient as large as all weights."""
    model = stack_experts(filled(Mixture(Loop())), plan(LOOP))
    made, kinds = [model(torch.randn(4, 5, WIDTH)).sum().grad_fn], set()
    while made:
        node = made.pop()
        kinds.add(type(node).__name__)
        made += [before for before, _ in getattr(node, "next_functions", ()) if before is not None]
    assert "UnbindBackward0" in kinds and "SelectBackward0" not in kinds


def test_its_parameters_are_placed_and_sharded_by_what_ep_leaves() -> None:
    rules = 'rules: {inner.experts: experts, "": fsdp}'
    model = lambda: stack_experts(around(lambda: Mixture(Loop()))(), plan(rules))  # noqa: E731
    program = compiled(rules, model, mesh_of(dp_shard=4, ep=2))
    (experts,) = program.of_slot("experts")
    (unit, root) = program.of_slot("fsdp")
    names = {f"experts.{one}_{kind}" for one in ("up", "down") for kind in ("weight", "bias")}
    assert (experts.module, set(experts.params), set(unit.params)) == ("inner.experts", names, names)
    assert (unit.axes, root.axes) == (("efsdp",), ("dp_shard",))


class Tied(Loop):
    """The second expert is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[1] = self.experts[0]


class Routed(Loop):
    """A router inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)


class Uneven(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.experts[2] = nn.Sequential(Mlp())


@pytest.mark.parametrize(
    ("rule", "inner", "message", "advice"),
    [
        (PLAIN, lambda: Mixture(Uneven()), "in modules of their own", "expert 2 is a Sequential and expert 0 a Mlp"),
        (PLAIN, lambda: Mixture(Tied()), "in modules of their own", "share parameters with other modules"),
        (PLAIN, lambda: Mixture(Routed()), "(gate.weight), which are no experts", "a router and shared experts"),
        (PLAIN, Looped, "is a list of modules", "move the loop into the forward of a module"),
        (
            f"{PLAIN}\n  inner.experts.experts: {{style: float8, recipe: rowwise}}",
            lambda: Mixture(Loop()),
            "inner.experts.experts is of the class ExpertList",
            "leave it out of the glob",
        ),
        ("inner: experts", Looped, "has no parameter 'hidden_states'", "divided into a router and experts"),
    ],
    ids=["unequal", "tied", "a router inside", "a list by itself", "float8", "a block"],
)  # fmt: skip
def test_what_stays_a_list_is_refused(
    rule: str, inner: Callable[[], nn.Module], message: str, advice: str
) -> None:
    text = f"rules:\n  {rule}\n  '': fsdp"
    found = finding(text, lambda: stack_experts(around(inner)(), plan(text)), mesh_of(dp_shard=2, ep=2))
    assert message in found.message and advice in (found.help or "")


def test_a_model_that_nobody_stacked_is_refused_with_the_call() -> None:
    with pytest.raises(pz.PlanError) as raised:
        pz.compile(plan(LOOP), Mixture(Loop()), mesh_of(dp_shard=2, ep=2))
    assert "call parallelizer.stack_experts(model, plan)" in (raised.value.diagnostics[0].help or "")
