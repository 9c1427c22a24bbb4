"""The fit and the command, on rows whose times are made by constants that are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.published import __main__ as command
from benchmarks.published import fit, show
from benchmarks.published.compose import Composed
from benchmarks.published.predictions import Prepared, predict_row
from benchmarks.published.rows import Row
from benchmarks.published.traces import Traced
from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.operators import Moment, Operator
from parallelizer.simulate.time.constants import FITTED_NAMES, Constants
from tests.simulate.time.lines import collective, machine, memory

TRUE = Constants(
    sustained=0.9, attention_backward=0.7, memory=0.7, contention=0.2, power=0.4, straggling=0.02
)


def prepared(at: int, source: str, peak: float | None = None) -> Prepared:
    """A row whose step has products, attention and memory in shares of its own."""
    gemm = Operator("forward", "layers.0", "gemm", "mm", "bfloat16", 0, (1, 1024 * (1 + at % 3), 1024, 1024))
    sizes = (1 + at % 2, 8, 8, 1024, 1024, 64)
    attention = [
        Operator("forward", "", "attention", "a", "bfloat16", 0, sizes, causal=True, backward=back)
        for back in (False, True) * (at % 4)
    ]
    line: list[Moment] = [gemm, *attention, *(memory(10_000_000 * (at % 5)) for _ in range(3))]
    mesh = Mesh({"dp_shard": 8 * 4 ** (at % 3)})
    measured = {"tokens_per_second_per_gpu": 1.0, "peak_memory_gib": peak}
    run = {"id": f"row-{at}", "source": {"repo": f"org/{source}"}, "model": "m", "gpu": "g", "precision": "bf16", "seq_len": 8,
           "ac": "none", "mesh": dict(mesh.sizes), "measured": measured}  # fmt: skip
    device = machine(power=0.5 + 0.25 * (at % 3))
    one = Prepared(
        Row(run, {}, {}), Composed((), "h100"), Traced(tuple(line), 2**30, mesh), (tuple(line),), device, 4096
    )
    found = predict_row(one, TRUE).predicted
    run = {**run, "measured": {**measured, "tokens_per_second_per_gpu": found}}
    return dataclasses.replace(one, row=dataclasses.replace(one.row, run=run))


ROWS = [prepared(at, f"source-{at % 4}") for at in range(24)]


def test_constants_that_made_the_times_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "NOISE", 0.005)  # these rows have none
    fitted = fit.fit(ROWS)
    found = fit.constants_of(fitted.solved())
    assert np.abs(fitted.errors).max() < 0.02
    for name in ("sustained", "attention_backward", "memory"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), abs=0.05), name


def test_a_source_s_rows_are_predicted_without_them() -> None:
    """A source that is half as fast as all others neither pulls its own constants nor hides its error."""
    odd = [dataclasses.replace(row, row=dataclasses.replace(row.row, run={
        **row.row.run, "source": {"repo": "org/odd"},
        "measured": {"tokens_per_second_per_gpu": row.row.run["measured"]["tokens_per_second_per_gpu"] / 2},
    })) for row in ROWS[:6]]  # fmt: skip
    predictions = fit.cross_validated([*ROWS[6:], *odd], fit.fit([*ROWS[6:], *odd]))
    errors = {p.prepared.row.source: p.error for p in predictions}
    assert errors["odd"] == pytest.approx(1.0, abs=0.1) and len(predictions) == 24
    assert show.spread(predictions) > 0.2


def test_the_reserved_share_is_that_of_other_sources_and_of_the_rehearsals() -> None:
    rows = [prepared(0, "a", 1.5), prepared(1, "a", 1.5), prepared(2, "b")]
    assert fit.reserved_share(rows) == pytest.approx((1.2295 + 1.5) / 2)
    assert fit.reserved_share(rows[2:]) == pytest.approx(1.2295)


def test_a_peak_of_what_was_allocated_is_that_of_what_is_in_use() -> None:
    reserved = prepared(0, "a", 1.5)
    allocated = dataclasses.replace(
        reserved,
        row=dataclasses.replace(reserved.row, run={**reserved.row.run, "note": "max_memory_allocated"}),
    )
    of = [predict_row(one) for one in (reserved, allocated)]
    assert of[0].predicted_memory == pytest.approx(of[0].share) and of[1].predicted_memory == pytest.approx(
        1.0
    )
    assert fit.reserved_share([allocated]) == pytest.approx(1.2295)


def test_what_is_fitted_are_constants_with_a_place_to_begin() -> None:
    assert set(FITTED_NAMES) == set(fit.PRIOR) < {f.name for f in dataclasses.fields(Constants)}
    assert collective("send", 1) is not None


def test_a_row_that_fails_in_any_way_is_named_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [
        {**ROWS[0].row.run, "id": "good"},
        {**ROWS[0].row.run, "id": "strange", "mesh": {"dp_shard": "many"}},
        {"id": "empty", "source": {}, "model": "m", "gpu": "g"},
        {**ROWS[0].row.run, "id": "no-gpu", "gpu": "abacus"},
    ]
    model = {"layers": 1, "hidden": 8, "ffn": 8, "heads": 1, "vocab": 8, "params": 100, "gated": True}
    file = tmp_path / "runs.yaml"
    runs = [*rows, "a remark"]
    file.write_text(yaml.safe_dump({"gpus": {"g": {"kind": "H100"}}, "models": {"m": model}, "runs": runs}))

    def made(row: Row, folder: Path | None) -> Prepared:
        if row.id == "good":
            return ROWS[0]
        from benchmarks.published.compose import compose

        raise AssertionError(compose(row))

    monkeypatch.setattr(command, "prepare", made)
    command.main([str(file)])
    out, err = capsys.readouterr()
    assert "strange: skipped: ValueError" in err and "row-0" in out
    assert "empty: left out: no throughput" in out and "no-gpu: left out: no such hardware" in out
    assert "row 4, which is no map: left out" in out
    assert "predicted: 1 of 5 rows" in out and "mean error: 0.0 %" not in out.splitlines()[0]
    assert out.splitlines()[-5].startswith("mean error: ") and out.splitlines()[-1].startswith(
        "peak memory within"
    )


def test_a_row_that_cannot_be_predicted_does_not_end_a_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line has an operator without a name that pricing knows."""
    broken = dataclasses.replace(ROWS[0], lines=((object(),),))  # type: ignore[arg-type]
    by_row = dict(zip("abcdefgh", [*ROWS[1:8], broken], strict=True))
    rows = [Row({"id": name}, {}, {}) for name in by_row]
    monkeypatch.setattr(command, "read", lambda file: rows)
    monkeypatch.setattr(command, "left_out", lambda row: None)
    monkeypatch.setattr(command, "prepare", lambda row, folder: by_row[row.id])
    command.main(["--fit"])
    out, err = capsys.readouterr()
    assert "row-0: skipped: " in err and "predicted: 7 of 8 rows" in out
