"""The line that a failure is told in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from parallelizer.runtime.launch.failures import first_line


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def fails(graph: Any, inputs: Any) -> Any:
    """A backend that cannot."""
    raise RecursionError("maximum recursion depth exceeded")


def added(x: Tensor) -> Tensor:
    return x + 1


def multiplied(x: Tensor) -> Tensor:
    return x @ torch.ones(7, 7)


def refused(x: Tensor) -> Tensor:
    raise ValueError("six is too many")


@pytest.mark.parametrize(
    ("function", "options", "line"),
    [
        (added, {"backend": fails}, "RecursionError: maximum recursion depth exceeded (in torch.compile)"),
        (
            multiplied,
            {"backend": "eager"},
            "RuntimeError: a and b must have same reduction dim, but got [3, 4] X [7, 7]. (in torch.compile)",
        ),
        (refused, {"backend": "eager", "fullgraph": True}, "ValueError: six is too many (in torch.compile)"),
        (refused, {"backend": "eager"}, "ValueError: six is too many"),
    ],
)
def test_the_line_of_a_compile_error_is_what_was_raised(
    function: Callable[[Tensor], Tensor], options: dict[str, Any], line: str
) -> None:
    with pytest.raises(Exception) as caught:
        torch.compile(function, **options)(torch.ones(3, 4))
    assert first_line(caught.value) == line


def test_the_line_of_any_other_is_its_type_and_what_it_says_first() -> None:
    assert first_line(RuntimeError("one\ntwo")) == "RuntimeError: one"
    assert first_line(KeyError()) == "KeyError"
