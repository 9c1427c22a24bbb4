"""Calls in children whose result several callers take: each is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallelizer.child.children import Children, WorldError
from parallelizer.diagnostics.diagnostic import PlanError


class SharedCalls:
    """Calls by key, each in a child of its own from the first `start` on. As a context it kills on leaving it the children whose
    result no caller has taken.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[object, _SharedCall]] = []

    def start(self, key: object, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Call `function(*args)` in a child, unless a call with an equal key was started before: that one is shared then. The
        function that is returned waits for the result and returns it. It raises what `Children.results` raises.
        """
        known = next((call for other, call in self._calls if other == key), None)
        if known is None:
            known = _SharedCall(Children([(function, *args)]))
            self._calls.append((key, known))
        return known.result

    def __enter__(self) -> SharedCalls:
        return self

    def __exit__(self, *error: object) -> None:
        calls, self._calls = self._calls, []
        for _, call in calls:
            call.children.__exit__()


class _SharedCall:
    """One child, and its result once it was taken."""

    def __init__(self, children: Children) -> None:
        self.children = children
        self._found: list[Any] | PlanError | WorldError | None = None

    def result(self) -> Any:
        if self._found is None:
            try:
                self._found = self.children.results()
            except (PlanError, WorldError) as error:
                self._found = error
        if isinstance(self._found, list):
            return self._found[0]
        raise self._found
