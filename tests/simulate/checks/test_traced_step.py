"""Each lint finds the waste that it is for, says what it costs and where it is written, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry as BatchEntry
from parallelizer.language.workload import Workload
from parallelizer.runtime.redistribution import wire_bytes
from parallelizer.simulate.all_checks import check_traced
from parallelizer.simulate.checks.traced_step import Traced
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.trace import Trace, trace
from tests.findings import compiled, marked

WORKLOAD = Workload({"x": BatchEntry(("batch", "sequence", 16), "float32")}, 2, 8)
MIB = 1 << 20
PRESETS = sorted(p.stem for p in (config_folder() / "parallel").glob("*.yaml") if p.stem != "base")
QUICK = {("single", "llama"), ("fsdp2_tp2", "llama_tp"), ("tp8_cp2", "llama")}


# --- the shipped plans
# ----------------------------------------------------------------------------------------


def linted(*overrides: str) -> tuple[Diagnostic, ...]:
    setup = from_config(*compose_config(list(overrides)))
    model = setup.build_model()
    program = setup.compile(model)
    step = trace(program, model, setup.recipe())
    return check_traced(Traced(program, model, step, setup.workload, setup.optim))


@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        pytest.param(p, name, marks=() if (p, name) in QUICK else pytest.mark.slow)
        for p in PRESETS
        for name in (("llama", "llama_tp") if "tp" in p else ("llama",))  # without tp the two are one
    ],
)
def test_the_shipped_plans_waste_nothing(preset: str, plan: str) -> None:
    setup = from_config(
        *compose_config([f"parallel={preset}", "train.batch_size=2048", "train.seq_len=2048"])
    )
    microbatches = setup.pipeline.microbatches if setup.pipeline is not None else 1
    rows = setup.mesh.size("dp_replicate", "dp_shard") * (microbatches or 1)
    sizes = [f"train.batch_size={rows}", "train.seq_len=64", "model.dim=64"]
    layers = f"model.n_layers={max(2, setup.mesh.sizes['pp'])}"
    found = linted(f"parallel={preset}", f"plan={plan}", layers, *sizes)
    assert found == ()


def test_whole_logits_cost_what_the_step_gathers() -> None:
    sizes = ["train.batch_size=4", "train.accumulate=2", "train.seq_len=64", "model.vocab_size=512"]
    gathered = "output: {style: colwise, input: stream, output: replicate}"
    [found] = linted("parallel=tp2", *sizes, f'rules=["{gathered}"]')
    # Two parts of 2 x 64 x 512 logits in float32: half of each comes over the wire.
    assert "2 collectives a step send 256.0 KiB, and a rank holds 256.0 KiB" in found.message
    assert "a vocabulary-parallel loss needs 128.0 KiB" in found.message
    assert found.span is not None and found.span.file.startswith("<override rules=")
    assert found.help is not None and "`output: shard(-1)` and `local: false`" in found.help


def test_a_whole_traced_step_shows_the_waste_of_a_sum_that_is_split_again() -> None:
    rules = [
        "layers.*.feed_forward.w2: {style: rowwise, output: replicate}",
        "layers.*.feed_forward: {style: prepare-io, input: {x: stream -> replicate}, output: replicate -> shard(1)}",
    ]
    overrides = f'rules=["{rules[0]}","{rules[1]}"]'
    sizes = ["train.batch_size=2", "train.seq_len=64", "model.dim=64"]
    found = linted("parallel=tp2", *sizes, overrides)
    assert [(d.code, d.severity) for d in found] == [("redundant-redistribution", "warning")]
    # Two layers: an all-reduce of 2 x 64 x 64 floats in forward (32 KiB sent), an all-gather of as many in
    # backward (16 KiB).
    assert "4 collectives a step send 96.0 KiB" in found[0].message
    assert "layers.{0,1}.feed_forward.w2" in found[0].message and "reduce-scatter" in (found[0].help or "")


# --- made up: two modules, one after the other
# -----------------------------------------------------------------


class Pair(nn.Module):
    """b(a(x)), in which `skip` reads what is between them too."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.skip = skip
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y) + y if self.skip else self.b(y)


class Layers(nn.Module):
    def __init__(self, count: int = 12, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.relu())  # so that nothing goes from layer to layer as it is
        return x


def entry(phase: str, module: str, kind: str, payload: int, axis: str = "tp", ranks: int = 2) -> Collective:
    sent = wire_bytes(kind, payload, ranks)
    return Collective(
        phase,
        kind,
        axis,
        ranks,
        payload,
        sent,
        "float32",
        module,
        None,
        axis != "tp" and kind != "all_reduce",
    )


def found_in(
    text: str,
    model: nn.Module,
    ledger: Sequence[Collective] = (),
    mesh: Mapping[str, int] | None = None,
    **more: Any,
) -> list[Diagnostic]:
    with torch.device("meta"):
        model = model.to("meta")
    program = compiled(text, lambda: model, Mesh(mesh or {"tp": 2}))
    step = Trace(0, tuple(ledger), Usage(0, "", "", {}))
    return [
        d for d in check_traced(Traced(program, model, step, WORKLOAD, **more)) if d.severity == "warning"
    ]


def test_hops_over_several_axes_are_told_and_the_cheaper_order_with_its_price() -> None:
    rule = (
        "layers.*.feed_forward.w2: {style: shard-params, params: {weight: {tp_outer: shard(0), tp: shard(1)}}, "
        "input: shard(-1) -> shard(-1), output: shard(1)}"
    )
    given = [
        "parallel=tp2",
        "parallel.mesh.tp_outer=2",
        f'rules=["{rule}"]',
        "train.batch_size=4",
        "model.dim=64",
    ]
    found = [d for d in linted(*given) if d.code.endswith("-redistribution")]
    assert [(d.code, d.severity) for d in found] == [
        ("multi-hop-redistribution", "note"),
        ("costly-redistribution", "warning"),
    ]
    assert "reduce_scatter over tp, then all_gather over tp_outer: 2 a step" in found[0].message
    assert "in backward of layers.{0,1}.feed_forward.w2" in found[1].message
    assert "all_gather over tp, then split over tp_outer" in found[1].message
    assert "where split over tp_outer, then all_gather over tp would send" in found[1].message
    assert "parallel.redistribute=min-cost" in (found[1].help or "")
    assert all(d.span is not None and d.span.file.startswith("<override") for d in found)
    cheapest = linted(*given, "parallel.redistribute=min-cost")
    assert [d.code for d in cheapest if d.code.endswith("-redistribution")] == ["multi-hop-redistribution"]


GATHER_SPLIT = """version: 1
rules:
  a: {style: prepare-output, output: shard(1) -> replicate}
  b: {style: prepare-input, input: replicate -> shard(1), local: true}
"""


def test_a_tensor_gathered_and_split_again_is_found_with_its_bytes() -> None:
    ledger = [
        entry("forward", "a", "all_gather", 4 * MIB),
        entry("backward", "b", "all_gather", 4 * MIB),
        entry("forward", "b", "all_gather", 9),
    ]
    [found] = found_in(GATHER_SPLIT, Pair(), ledger)
    assert found.code == "redundant-redistribution"
    assert found.message == (
        "the output of a is gathered over tp and split again as the input of b, with nothing in between: "
        "2 collectives a step send 4.0 MiB"
    )
    assert marked(GATHER_SPLIT, found) == "output"
    assert [marked(GATHER_SPLIT, r.span) for r in found.related] == ["input"]


def test_split_and_gathered_is_found_too() -> None:
    text = GATHER_SPLIT.replace("output: shard(1) -> replicate", "output: replicate -> shard(1)")
    text = text.replace("input: replicate -> shard(1)", "input: shard(1) -> replicate")
    [found] = found_in(text, Pair())
    assert "is split over tp and gathered again" in found.message


@pytest.mark.parametrize(
    ("text", "skip"),
    [
        (GATHER_SPLIT, True),
        (GATHER_SPLIT.replace("input: replicate -> shard(1)", "input: replicate -> replicate"), False),
        (GATHER_SPLIT.replace("output: shard(1) -> replicate", "output: shard(1) -> shard(0)"), False),
        (
            GATHER_SPLIT.replace("  a: {", "  b: {").replace(
                "  b: {style: prepare-input", "  a: {style: prepare-input"
            ),
            False,
        ),
    ],
    ids=["read in between", "gathered and wanted whole", "never whole", "the other way round"],
)
def test_what_is_needed_is_not_called_redundant(text: str, skip: bool) -> None:
    assert found_in(text, Pair(skip)) == []


HALF = """version: 1
rules:
  layers.{0,2}: {style: rowwise, input: replicate, output: shard(1)}
  layers.1: {style: rowwise, input: replicate}
  layers.3: {style: rowwise, input: replicate}
"""


def test_half_a_sequence_parallel_plan_is_found_but_for_the_models_output() -> None:
    ledger = [
        entry("forward", "layers.1", "all_reduce", 4 * MIB),
        entry("forward", "layers.0", "reduce_scatter", 4 * MIB),
    ]
    [found] = found_in(HALF, Layers(4), ledger)
    assert found.code == "half-sequence-parallel"
    assert (
        "layers.1 leaves the sequence whole on every rank of tp, while layers.{0,2} shard it" in found.message
    )
    assert "1 collective a step sends 4.0 MiB, 2.0 MiB more" in found.message
    assert found.span is not None and found.span.line == 4


@pytest.mark.parametrize("output", ["replicate", "shard(1)"])
def test_sequence_parallelism_all_on_or_all_off_is_fine(output: str) -> None:
    text = f"version: 1\nrules:\n  layers.*: {{style: rowwise, input: replicate, output: {output}}}\n"
    assert found_in(text, Layers(4)) == []


FSDP = 'version: 1\nrules:\n  layers.*: fsdp\n  "": fsdp\n'


def gathers(payload: int, ranks: int, calls: int = 2) -> list[Collective]:
    return [
        entry("forward", f"layers.{i}", "all_gather", payload, "dp_shard", ranks)
        for i in range(12)
        for _ in range(calls)
    ]


def test_many_small_units_over_many_ranks_are_found() -> None:
    [found] = found_in(FSDP, Layers(), gathers(MIB // 2, 8), {"dp_shard": 8})
    assert found.code == "small-fsdp-units" and found.severity == "warning"
    assert (
        "layers.{0..11} are gathered in 24 all-gathers a step of 512.0 KiB on average over 8 ranks"
        in found.message
    )
    assert marked(FSDP, found) == "layers.*" and "min_params" in (found.help or "")


@pytest.mark.parametrize(("payload", "ranks"), [(MIB, 8), (MIB // 2, 4)], ids=["large enough", "few ranks"])
def test_units_that_are_large_or_few_ranks_apart_are_fine(payload: int, ranks: int) -> None:
    assert found_in(FSDP, Layers(), gathers(payload, ranks), {"dp_shard": ranks}) == []


def test_a_root_unit_with_all_layers_in_it_is_found() -> None:
    text = 'version: 1\nrules:\n  "": fsdp\n'
    ledger = [entry("forward", "", "all_gather", 8 * MIB, "dp_shard", 4)]
    [found] = found_in(text, Layers(), ledger, {"dp_shard": 4})
    assert (
        found.code == "large-root-unit"
        and "100% of the parameters at once: every rank holds 8.0 MiB" in found.message
    )
    assert marked(text, found) == '""' and "`layers.*: fsdp`" in (found.help or "")


def test_a_root_unit_without_layers_or_of_few_bytes_is_fine() -> None:
    text = 'version: 1\nrules:\n  "": fsdp\n'
    large, small = ([entry("forward", "", "all_gather", size, "dp_shard", 4)] for size in (8 * MIB, MIB // 2))
    assert found_in(text, Pair(), large, {"dp_shard": 4}) == []
    assert found_in(text, Layers(), small, {"dp_shard": 4}) == []


@pytest.mark.parametrize(("fused", "words"), [(False, "optim.fused=true"), ("auto", "local shards")])
def test_an_optimizer_that_communicates_for_each_parameter_is_found(fused: object, words: str) -> None:
    ledger = [entry("optimizer", "", "all_reduce", 64) for _ in range(13)]
    [found] = found_in(FSDP, Layers(), ledger, {"dp_shard": 4}, optimizer={"fused": fused})
    assert found.code == "optimizer-collectives" and words in (found.help or "")
    assert "each of its 12 parameters (all_reduce over tp): 13 collectives a step send" in found.message


def test_an_optimizer_with_one_collective_a_parameter_is_fine() -> None:
    ledger = [entry("optimizer", "", "all_reduce", 64) for _ in range(12)]
    assert found_in(FSDP, Layers(), ledger, {"dp_shard": 4}) == []


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum().item() > 0 else x


def test_a_model_that_does_not_run_on_meta_is_linted_as_far_as_its_ledger_goes() -> None:
    ledger = [entry("optimizer", "", "all_reduce", 64) for _ in range(9)]
    assert [
        d.code for d in found_in('version: 1\nrules:\n  "": fsdp\n', ByValue(), ledger, {"dp_shard": 2})
    ] == ["optimizer-collectives"]
