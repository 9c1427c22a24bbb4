"""Inputs and outputs laid out anew, by name, index and key; over cp they are split and gathered with the
right gradients.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.language.plan import Mesh
from tests.findings import compiled, finding, marked, mesh_of, on_meta
from tests.parity import Case, Errors, assert_exact, compare, plan
from tests.ranks import run_ranks
from tests.styles.models import WIDTH, Mlp, around


class Named(nn.Module):
    """Calls an inner block by position, by name and by keyword arguments that it does not declare."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.keyword, self.open, self.star = Block(), Block(), OpenBlock(), StarBlock()

    def forward(self, x: Tensor) -> Tensor:
        y = self.position(x, x * 2)
        y = y + self.keyword(shift=x * 2, x=x)
        y = y + self.open(x, shift=x * 2)
        z: Tensor = y + self.star(x, x * 2)
        return z


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor, mask: Tensor | None = None, scale: float = 3.0) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x)) * scale + shift
        return y if mask is None else y * mask


class OpenBlock(Block):
    def forward(self, x: Tensor, **others: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, others["shift"])


class StarBlock(Block):
    def forward(self, *both: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*both)


Pair = namedtuple("Pair", ["hidden", "other"])


class Several(nn.Module):
    """Blocks that return a tuple, a named tuple and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tuple, self.named, self.dict = (
            Returns(lambda a, b: (b, a)),
            Returns(Pair),
            Returns(lambda a, b: OrderedDict(h=a, o=b)),
        )

    def forward(self, x: Tensor) -> Tensor:
        other, hidden = self.tuple(x)
        named, found = self.named(x), self.dict(x)
        if not (isinstance(named, Pair) and isinstance(found, OrderedDict)):
            raise TypeError("the container was not kept")
        total: Tensor = hidden + other + named.hidden + named.other + found["h"] + found["o"]
        return total


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.make = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.down(torch.tanh(self.up(x))), x * 2)


class Mixing(nn.Module):
    """Every row sees the mean of all rows: right only on whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x.mean(1, keepdim=True)


class Three(nn.Module):
    """Rows by themselves, then mixed, then by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixing, self.last = Mlp(), Mixing(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.mixing(self.first(x)))
        return y


def rules(*lines: str, batch: str = "{}") -> str:
    return "rules:\n" + "\n".join(f"  {line}" for line in lines) + f"\nbuffers: {{batch: {batch}}}"


BOTH = "{x: replicate, shift: replicate}"
OF_2 = [
    ("inputs by name", Named, rules(
        '"inner.{position,keyword,open}.linear": {style: colwise, output: replicate, local: false}',
        "inner.star.linear: {style: colwise, output: replicate}",
        f"inner.{{position,keyword,open}}: {{style: prepare-io, input: {BOTH}, output: replicate}}",
        "inner.star: {style: prepare-io, input: replicate, local_input: true, output: replicate}",
    ), {"tp": 2}),
    ("one output of several", Several, rules(
        "inner.*.up: colwise", "inner.*.down: {style: rowwise, output: shard(1)}",
        "inner.tuple: {style: prepare-output, output: {1: shard(1) -> replicate}}",
        "inner.named: {style: prepare-output, output: {0: shard(1) -> replicate}}",
        "inner.dict: {style: prepare-output, output: {h: shard(1) -> replicate}}",
    ), {"tp": 2}),
    ("the first output of several", Several, rules(
        "inner.*.up: colwise", "inner.*.down: {style: rowwise, output: shard(0)}",
        "inner.tuple: {style: prepare-output, output: {1: shard(0) -> replicate}}",
        "inner.{named,dict}: {style: prepare-output, output: shard(0) -> replicate}",
    ), {"tp": 2}),
    ("a whole sequence split inside", Three, rules(
        "inner.first: {style: prepare-input, axis: cp, input: replicate -> shard(1)}",
        "inner.mixing: {style: prepare-input, axis: cp, input: shard(1) -> replicate}",
        "inner.last: {style: prepare-io, axis: cp, input: replicate -> shard(1), output: shard(1) -> replicate}", '"": fsdp',
    ), {"cp": 2}),
    ("a split sequence gathered inside", Three, rules(
        "inner.mixing: {style: prepare-io, axis: cp, input: {x: shard(1) -> replicate}, output: replicate -> shard(1)}",
        '"": fsdp',
        batch="{input_ids: 1, labels: 1}",
    ), {"cp": 2}),
]  # fmt: skip
OF_4 = [
    ("over cp outside tp", Three, rules(
        "inner.{first,last}.up: colwise", "inner.first.down: {style: rowwise, output: shard(1)}", "inner.last.down: rowwise",
        "inner.mixing: [{style: prepare-input, axis: cp, input: shard(1) -> replicate},"
        " {style: prepare-io, input: replicate, local_input: true, output: replicate}]",
        "inner.first: [{style: prepare-output, output: shard(1) -> replicate}]",
        "inner.last: [{style: prepare-input, axis: cp, input: replicate -> shard(1)}]", '"": fsdp',
        batch="{input_ids: 1, labels: 1}",
    ), {"cp": 2, "tp": 2}),
    ("cut over cp and then over tp", Mlp, rules(
        "inner.{up,down}: replicate",
        "inner: [{style: prepare-io, input: replicate -> shard(1), local_input: true, output: shard(1) -> replicate},"
        " {style: prepare-io, axis: cp, input: replicate -> shard(1), output: shard(1) -> replicate}]", '"": fsdp',
    ), {"cp": 2, "tp": 2}),
    ("outputs gathered from the inside out", Three, rules(
        "inner.{first,last}.up: colwise", "inner.first.down: {style: rowwise, output: shard(1)}", "inner.last.down: rowwise",
        "inner.first: [{style: prepare-output, axis: cp, output: shard(1) -> replicate},"
        " {style: prepare-output, output: shard(1) -> replicate}]",
        "inner.last: {style: prepare-input, axis: cp, input: replicate -> shard(1)}", '"": fsdp',
        batch="{input_ids: 1, labels: 1}",
    ), {"cp": 2, "tp": 2}),
]  # fmt: skip
CASES_OF_2 = [Case(name, plan(text), mesh, around(inner)) for name, inner, text, mesh in OF_2]
CASES_OF_4 = [Case(name, plan(text), mesh, around(inner)) for name, inner, text, mesh in OF_4]


@pytest.fixture(scope="module")
def results() -> dict[str, Errors | str]:
    return {**compare(CASES_OF_2), **compare(CASES_OF_4)}


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in CASES_OF_2 + CASES_OF_4])
def test_gradients_are_those_of_the_unsharded_module(name: str, results: dict[str, Errors | str]) -> None:
    assert_exact(results[name])


# What a call must look like


class Calls(nn.Module):
    """Calls its block as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.open = Block(), OpenBlock()

    def forward(self, call: Callable[[Any], Any]) -> Any:
        return call(self)


def applied(text: str) -> nn.Module:
    """Calls under a plan, on this rank of two, with a rule for `block` or `open`."""
    mesh = pz.build_mesh(Mesh({"tp": 2}), "cpu")
    model = on_meta(Calls)
    program = pz.compile(plan(text), model, mesh)
    return pz.materialize(pz.apply(program, model, mesh), device="cpu", seed=0)


@pytest.mark.ranks
def test_calls() -> None:
    x = torch.randn(2, 4, WIDTH)

    def worker() -> list[str]:
        done = []
        model = applied(
            rules("block: {style: prepare-input, input: {x: replicate, mask: replicate}, local: true}")
        )
        # A default is left to the module, and None to whoever passes it.
        plain = model.block.forward(x, x)
        torch.testing.assert_close(model(lambda m: m.block(x, x)), plain)
        torch.testing.assert_close(model(lambda m: m.block(x, shift=x, mask=None)), plain)
        torch.testing.assert_close(model(lambda m: m.block(x, x, mask=torch.ones(WIDTH), scale=3.0)), plain)
        done.append("optional inputs")

        with pytest.raises(RuntimeError, match="the input 'x' of Block is no tensor but a tuple"):
            model(lambda m: m.block((x, x), x))
        done.append("a tuple")

        model = applied(
            rules("block: {style: prepare-input, input: {x: replicate -> shard(1)}, local: true}")
        )
        with pytest.raises(
            RuntimeError, match=r"at Block cannot be split along dimension 1 into equal parts over tp=2"
        ):
            model(lambda m: m.block(torch.randn(2, 5, WIDTH), x))
        done.append("parts of unequal sizes")

        model = applied(rules("open: {style: prepare-input, input: {shift: replicate}, local: true}"))
        with pytest.raises(RuntimeError, match="a call of OpenBlock has no input 'shift'"):
            model(lambda m: m.open(x, other=x))
        done.append("an input that is missing")

        model = applied(rules("block: {style: prepare-input, input: {x: shard(1) -> replicate}}"))
        seen: list[Any] = []
        model.block.linear = nn.Identity()
        model.block.linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with pytest.raises(RuntimeError, match="mixed"):  # the block adds a plain tensor
            model(lambda m: m.block(x, x))
        assert isinstance(seen[0], DTensor) and seen[0].shape == (2, 8, WIDTH)
        done.append("DTensors unless local")

        for output, key in (("{1: replicate}", "'1'"), ("{h: replicate}", "'h'")):
            model = applied(rules(f"block: {{style: prepare-output, output: {output}}}"))
            with pytest.raises(RuntimeError, match=f"the output of Block .* has no tensor {key}"):
                model(lambda m: m.block(x, x))
        done.append("an output that is missing")
        return done

    first, second = run_ranks(worker, 2)
    assert first == second
    assert len(first) == 6


# What the compiler refuses


@pytest.mark.parametrize(
    ("rule", "code", "mark"),
    [
        ("block: {style: prepare-input, input: {y: replicate}}", "unknown-input", "y"),
        ("block: {style: prepare-input, input: {x: shard(1) -> partial}}", "unknown-placement", "partial"),
        ("block: {style: prepare-output, output: partial}", "unknown-placement", "partial"),
        ("block: prepare-input", "missing-option", "prepare-input"),
        ("block: prepare-io", "missing-option", "prepare-io"),
        ("block: {style: prepare-input, input: replicate, axis: pp}", "unknown-axis", "axis"),
        ("block: {style: prepare-output, output: replicate, axis: dp_shard}", "unknown-axis", "axis"),
        ("block: {style: prepare-input, axis: cp, input: replicate}", "wrong-layout", "replicate"),
        ("block: {style: prepare-input, axis: cp, input: shard(1) -> shard(2)}", "wrong-layout", "shard(1)"),
        ("block: {style: prepare-output, axis: cp, output: replicate}", "wrong-layout", "replicate"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_where_it_is_written(rule: str, code: str, mark: str) -> None:
    text = rules(rule, "block.linear: colwise")
    found = finding(text, Calls, mesh_of(tp=2))
    assert found.code == code
    assert marked(text, found) == mark


def test_an_input_that_only_keyword_arguments_can_take_is_let_through() -> None:
    text = rules("open: {style: prepare-input, input: {anything: replicate}}", "block.linear: colwise")
    assert len(compiled(text, Calls, mesh_of(tp=2))) == 2


def test_mistakes_are_found_where_the_axis_has_size_1_too() -> None:
    text = rules("block: {style: prepare-input, input: {y: replicate}}")
    assert finding(text, Calls).code == "unknown-input"


def test_axes_are_laid_out_from_the_inside_out() -> None:
    cp, tp = (f"{{style: prepare-input, {axis}input: replicate -> shard(1)}}" for axis in ("axis: cp, ", ""))
    for text in (rules(f"block: [{cp}, {tp}]", '"": fsdp'), rules(f"block: [{tp}, {cp}]", '"": fsdp')):
        assert [a.axes for a in compiled(text, Calls, mesh_of(cp=2, tp=2)).of_slot("io")] == [
            ("tp",),
            ("cp",),
        ]
