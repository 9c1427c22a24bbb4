"""The plan as text: the mesh, what a rank holds, what is done to which module, the buffers."""

from __future__ import annotations

import io
import math
from functools import cache

import pytest
from torch import nn

from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.units import size
from parallelizer.language.glob import parse_glob
from parallelizer.report.text.plan import write
from parallelizer.styles.application import Program

BIG = ("model=llama3_405b", "parallel=fsdp1024_cp2_tp8", "train.seq_len=8192", "train.batch_size=1024")


@cache
def compiled(overrides: tuple[str, ...]) -> tuple[Program, nn.Module]:
    setup = from_config(*compose_config(overrides))
    model = setup.build_model()
    return setup.compile(model), model


def shown(*overrides: str, width: int | None = None, rank: int = 0) -> str:
    stream = io.StringIO()
    program, model = compiled(overrides)
    write(program, parameter_shards(program, model, rank), stream, rank=rank, width=width)
    return stream.getvalue()


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The cells of a table's lines by their first one."""
    lines = text.partition(f"\n{title}")[2].partition("\n\n")[0].splitlines()[2:]
    return {line.split()[0]: line.split()[1:] for line in lines if "this rank holds" not in line}


def test_the_mesh_says_how_ranks_lie() -> None:
    lines = shown(*BIG).splitlines()
    assert lines[0].startswith("plan  llama, ") and lines[0].endswith("llama.yaml")
    assert lines[1] == "mesh  16,384 ranks: dp_shard=1024 x cp=2 x tp=8"
    for line, parts in zip(lines[2:5], (("dp_shard", "1,024", "ranks 16 apart"), ("cp", "2", "ranks 8 apart"),
                                        ("tp", "8", "neighbouring ranks")), strict=True):  # fmt: skip
        assert all(part in line for part in parts)
    assert "fsdp shards over dp_shard and cp folded: 2,048 ranks" in lines[5]
    assert "mesh  1 rank\n" in shown()


def test_parameters_are_what_a_rank_holds() -> None:
    """The debug model on cp 2 x tp 8: sharded sixteenfold, norms over cp alone."""
    table = rows(shown("parallel=tp8_cp2"), "parameters")
    assert table["tok_embeddings.weight"] == ["1", "rowwise", "0", "0", "256x256", "16x256", "16.0", "KiB"]
    assert table["layers.{0,1}.attention.wo.weight"] == [
        "2", "rowwise", "0", "1", "256x256", "128x32", "32.0", "KiB",
    ]  # fmt: skip
    assert table["layers.{0,1}.{attention_norm,ffn_norm}.weight"][:4] == ["5", "sequence", "0", "-"]
    assert "1,606,912 parameters; this rank holds 100,992 of them, 394.5 KiB" in shown("parallel=tp8_cp2")


def test_the_total_is_the_model_s() -> None:
    text, (_, model) = shown(*BIG), compiled(BIG)
    count = sum(math.prod(p.shape) for p in model.parameters())
    assert f"{count:,} parameters; " in text
    assert len(text.splitlines()) < 60  # 126 layers are folded


def test_axes_over_which_nothing_is_sharded_have_no_column() -> None:
    header = shown("parallel=hsdp2x2").partition("parameters of")[2].splitlines()[1]
    assert "dp_shard" in header and "dp_replicate" not in header
    assert "stands the dimension" not in shown()


def test_modules_name_the_rule_and_the_flow() -> None:
    text = shown("parallel=tp2", 'rules=["layers.0: checkpoint"]')
    lines = [line.split() for line in text.partition("\nmodules")[2].splitlines()]
    assert ["layers.0", "checkpoint", "command", "line"] in lines
    prepared = "layers.{0,1}.attention prepare-input tp input x: shard(1) -> replicate llama.yaml:9"
    assert prepared.split() in lines


def test_why_a_parameter_stays_whole_is_said() -> None:
    text = shown("parallel=fsdp2", "++parallel.styles.fsdp.min_size=1000")
    assert "(too small)" in text


def test_buffers_are_shown_where_the_sequence_is_split() -> None:
    text = shown("parallel=cp2")
    assert "buffers  split over cp=2\n  order  head and tail chunks paired" in text
    assert "  batch  input_ids (dimension 1), labels (dimension 1)" in text
    assert "  model  rope.* (dimension 0)" in text
    assert "buffers" not in shown("parallel=tp2")


@pytest.mark.parametrize("width", [140, 100, 80, 60])
@pytest.mark.parametrize("overrides", [("parallel=tp8_cp2",), BIG])
def test_every_line_fits(width: int, overrides: tuple[str, ...]) -> None:
    for line in shown(*overrides, width=width).splitlines()[1:]:
        assert len(line) <= width and line == line.rstrip()


def test_no_path_is_cut_inside_a_name_at_the_usual_width() -> None:
    names = {"layers", "attention", "feed_forward", "attention_norm", "ffn_norm", "tok_embeddings", "weight"}
    for overrides in (("parallel=tp8_cp2",), BIG):
        for width in (60, 100):
            words = set(
                "".join(c if c.isalpha() or c == "_" else " " for c in shown(*overrides, width=width)).split()
            )
            assert names <= words


def test_a_file_gets_plain_text_of_100_columns() -> None:
    assert "\x1b" not in shown(*BIG)
    assert max(map(len, shown(*BIG).splitlines()[1:])) <= 100


def test_folded_names_are_accepted_back() -> None:
    """What stands in the table is a glob that matches just the parameters it stands for."""
    _, model = compiled(("parallel=tp8_cp2",))
    names = [name for name, _ in model.named_parameters()]
    matched = [
        n
        for glob in rows(shown("parallel=tp8_cp2", width=200), "parameters")
        for n in parse_glob(glob).select(names)
    ]
    assert sorted(matched) == sorted(names)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text
