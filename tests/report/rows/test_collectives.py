"""The rows of collectives are sums of the ledger by phase, axis and kind."""

from __future__ import annotations

from parallelizer.report.rows.collectives import collective_rows
from tests.report.rows.plans import collective


def test_sums_are_by_phase_axis_and_kind_in_order() -> None:
    ledger = [
        collective(payload=8),
        collective(payload=2, kind="all_reduce"),
        collective(payload=4),
        collective(payload=6, phase="backward"),
        collective(payload=10, axis="cp"),
    ]
    documents = [row.as_json() for row in collective_rows(ledger)]
    assert [tuple(document.values()) for document in documents] == [
        ("forward", "tp", "all_gather", 2, 12, 6),
        ("forward", "tp", "all_reduce", 1, 2, 1),
        ("backward", "tp", "all_gather", 1, 6, 3),
        ("forward", "cp", "all_gather", 1, 10, 5),
    ]
    assert list(documents[0]) == ["phase", "axis", "kind", "count", "payload_bytes", "wire_bytes"]


def test_what_is_issued_ahead_and_by_which_rules() -> None:
    one, other = ("a.*", "plan.yaml", 3), ("b", "plan.yaml", 4)
    ledger = [
        collective(payload=8, rule=one, ahead=True),
        collective(payload=4, rule=other, ahead=True),
        collective(payload=2, rule=one),
        collective(payload=2),
    ]
    [row] = collective_rows(ledger)
    assert (row.count, row.ahead, row.ahead_bytes, row.wire_bytes) == (4, 2, 6, 8)
    assert row.rules == {one: 2, other: 1}
    assert collective_rows([]) == []
