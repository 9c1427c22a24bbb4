"""How much may lie whole without a rule that says so."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Option
from tests.findings import findings, mesh_of
from tests.styles.models import Mlp, around

HERE = Span("preset", 7, 16, 20)
TP = mesh_of(tp=2)


def share(limit: float) -> Option:
    return Option(limit, HERE)


def test_what_no_rule_names_is_counted() -> None:
    plan = "rules:\n  inner.up: colwise\n  inner.down: rowwise"
    [found] = findings(plan, around(Mlp), TP, max_unsharded=share(0.1))
    # Of 756 parameters 544 lie in `before` and `after`; a bias that rowwise keeps whole has a rule.
    assert (found.code, found.span) == ("unsharded-parameters", HERE)
    assert found.message.startswith(
        "72.0% of the parameters are whole on every rank, and no rule asks for it: "
    )
    assert "before.weight" in found.message and "after" in found.message and "inner" not in found.message


@pytest.mark.parametrize("limit", [0.73, 1.0])
def test_a_share_within_the_limit_is_fine(limit: float) -> None:
    plan = "rules:\n  inner.up: colwise\n  inner.down: rowwise"
    assert findings(plan, around(Mlp), TP, max_unsharded=share(limit)) == ()


def test_what_is_whole_on_purpose_is_fine() -> None:
    plan = "rules:\n  inner.up: colwise\n  inner.down: rowwise\n  before: replicate\n  after: replicate"
    assert findings(plan, around(Mlp), TP, max_unsharded=share(0.0)) == ()


def test_fsdp_shards_too() -> None:
    assert findings('rules: {"": fsdp}', around(Mlp), mesh_of(dp_shard=2), max_unsharded=share(0.0)) == ()


def test_it_is_off_by_default_and_on_one_rank() -> None:
    plan = "rules: {inner.up: colwise}"
    assert findings(plan, around(Mlp), TP) == ()
    assert findings(plan, around(Mlp), max_unsharded=share(0.0)) == ()
