"""What a method reads of its object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parallelizer.compiler.observe.attribute_reads import flowing_into, named_in


class Reader:
    def plain(self, x: Any) -> Any:
        return x.view(self.heads, self.size)

    def held(self, x: Any) -> Any:
        return x.split(self.config.text.heads)

    def by_another_name(self, x: Any) -> Any:
        config, half = self.config, 2
        text = config.text
        return x.view(text.heads, config.size, half)

    def nothing(self, x: Any) -> Any:
        heads = x.shape[0]
        return x.view(heads, x.self.size)

    def two_lines(self, x: Any) -> Any:
        x = x.view(self.heads)
        return x.view(
            self.size,
        )


class Flowing:
    """Not run: read."""

    def forward(self, x: Any) -> Any:
        assert len(x) <= self.block_size  # type: ignore[attr-defined]
        config, _ = self.config, self.other  # type: ignore[attr-defined]
        heads = config.heads * 2
        return x.view(heads, self.size)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (Reader.plain, ["heads", "size"]),
        (Reader.held, ["config.text.heads", "config.text", "config"]),
        (Reader.by_another_name, ["config", "config.text", "config.text.heads", "config.size"]),
        (Reader.nothing, []),
        (Reader.two_lines, ["heads", "size"]),
    ],
)
def test_names_are_dotted_and_followed_through_variables(
    method: Callable[..., Any], names: list[str]
) -> None:
    assert set(named_in(method.__code__)) == set(names)


def test_of_one_statement_though_it_has_several_lines() -> None:
    code = Reader.two_lines.__code__
    assert named_in(code, code.co_firstlineno + 1) == ["heads"]
    for line in (2, 3, 4):
        assert named_in(code, code.co_firstlineno + line) == ["size"]


def test_code_without_a_source_says_nothing() -> None:
    made: dict[str, Any] = {}
    exec("def plain(self):\n    return self.heads", made)
    assert named_in(made["plain"].__code__) == [] == named_in(made["plain"].__code__, 2)


def test_what_flows_into_a_statement_leaves_out_what_is_asserted() -> None:
    code = Flowing.forward.__code__
    flowing = flowing_into(code, code.co_firstlineno + 4)
    assert {"config.heads", "size"} < set(flowing)
    assert "block_size" not in {*flowing, *named_in(code)}
