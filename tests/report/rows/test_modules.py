"""The rows of modules hold every application that places no parameter, once."""

from __future__ import annotations

from collections import Counter

from parallelizer.report.rows.modules import module_rows
from tests.report.rows.plans import compiled


def test_every_application_beside_parameters_is_in_one_row() -> None:
    program, _ = compiled("parallel=fsdp2_cp2_tp2")
    of = Counter((a.module, a.style, "+".join(a.axes), a.rule.span) for a in program if a.slot != "params")
    rows = module_rows(program)
    assert Counter((m, row.style, row.axis, row.span) for row in rows for m in row.modules) == of


def test_a_row_tells_what_happens_to_which_tensor() -> None:
    program, _ = compiled("parallel=tp2")
    [row] = [r for r in module_rows(program) if r.modules[0] == "layers.0.attention"]
    assert (row.paths, row.style, row.axis) == (["layers.{0,1}.attention"], "prepare-input", "tp")
    assert row.flows == (("input", ("x: shard(1) -> replicate",)),)


def test_rules_that_are_told_alike_share_a_row() -> None:
    program, _ = compiled("parallel=tp2", 'rules=["layers.0: checkpoint", "layers.1: checkpoint"]')
    apart = [r.modules for r in module_rows(program) if r.style == "checkpoint"]
    alike = [r.modules for r in module_rows(program, lambda span: span.file[:9]) if r.style == "checkpoint"]
    assert apart == [("layers.0",), ("layers.1",)] and alike == [("layers.0", "layers.1")]
