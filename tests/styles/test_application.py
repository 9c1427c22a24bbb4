"""A program as it is printed."""

from __future__ import annotations

from tests.simulate.setups import llama


def test_a_program_prints_as_a_table_of_its_rules() -> None:
    setup = llama("parallel=fsdp2_tp2")
    program = setup.compile(setup.build_model())
    head, titles, *rows = str(program).splitlines()
    assert head.endswith("llama.yaml on dp_shard=2 x tp=2")
    assert titles.split() == ["modules", "style", "axes", "rule", "where"]
    cells = [row.split() for row in rows]
    assert [
        "layers.{0,1}.attention.{wq,wk,wv}",
        "colwise",
        "tp",
        "layers.*.attention.w[qkv]",
        "llama.yaml:10",
    ] in cells
    assert ["(root)", "fsdp", "dp_shard", '""', "llama.yaml:20"] in cells
    assert len(rows) < 14 and max(map(len, rows)) < 150
