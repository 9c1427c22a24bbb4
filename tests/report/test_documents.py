"""The JSON documents hold what the design promises, in figures that agree with each other."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.report.documents import plan_document, refusal_document, validate_document
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.rank_classes import RankClass
from parallelizer.simulate.record.trace import Trace

ERROR = Diagnostic("a-code", "what is wrong", Span("a.yaml", 3, 5, 9), "what to do")
WARNING = Diagnostic("b-code", "what is odd", None, None, severity="warning")


def document(*overrides: str, rank: int = 0) -> dict[str, Any]:
    setup = from_config(*compose_config([*overrides, "device=cpu"]))
    model = setup.build_model()
    made = plan_document(setup.compile(model), model, setup.device, rank)
    result: dict[str, Any] = json.loads(json.dumps(made))
    return result


def test_a_finding_in_full() -> None:
    assert validate_document([ERROR]) == {
        "valid": False,
        "diagnostics": [
            {
                "code": "a-code",
                "severity": "error",
                "message": "what is wrong",
                "help": "what to do",
                "span": {"file": "a.yaml", "line": 3, "column": 5, "end_column": 9},
                "related": [],
            }
        ],
    }


def test_warnings_do_not_make_a_plan_invalid() -> None:
    made = validate_document([WARNING])
    assert made["valid"] is True
    assert made["diagnostics"][0]["span"] is None and made["diagnostics"][0]["help"] is None
    assert validate_document([])["valid"] is True
    assert validate_document([WARNING, ERROR])["valid"] is False


def test_a_refusal_is_its_findings() -> None:
    assert [d["code"] for d in refusal_document([ERROR])["diagnostics"]] == ["a-code"]


@pytest.mark.parametrize(
    ("preset", "more", "schedule", "bubble"),
    [
        ("pp2", [], "1f1b", 1 / 5),  # (ranks - 1) / (microbatches + ranks - 1)
        ("pp4", ["parallel.pipeline.microbatches=4"], "1f1b", 3 / 7),
        ("pp2", ["parallel.pipeline.schedule=gpipe", "parallel.pipeline.microbatches=8"], "gpipe", 1 / 9),
    ],
)
def test_a_pipeline_has_its_schedule_and_its_bubble(
    preset: str, more: list[str], schedule: str, bubble: float
) -> None:
    made = document(f"parallel={preset}", "model.n_layers=4", *more)["pipeline"]
    assert made["bubble"] == pytest.approx(bubble) and made["schedule"] == schedule
    assert made["order_file"] is None and made["stages_per_rank"] == 1
    assert document("parallel=tp2")["pipeline"] is None


def test_a_plan_s_frame() -> None:
    made = document("parallel=fsdp2_cp2_tp2", rank=5)
    assert made["world_size"] == 8 and made["device"] == "cpu" and made["rank"] == 5
    assert made["mesh"] == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 2,
        "cp": 2,
        "ep": 1,
        "tp_outer": 1,
        "tp": 2,
    }
    assert made["diagnostics"] == [] and made["collectives"] == [] and made["memory"] is None


def test_applications_name_their_rules() -> None:
    made = document("parallel=fsdp2_tp2")
    [wq] = [a for a in made["applications"] if a["module"] == "layers.0.attention.wq"]
    assert wq["slot"] == "params" and wq["style"] == "colwise" and wq["axis"] == "tp"
    assert wq["rule"]["key"] == "layers.*.attention.w[qkv]" and wq["rule"]["file"].endswith("llama.yaml")
    assert isinstance(wq["rule"]["line"], int)
    modules = {a["module"] for a in made["applications"]}
    assert "" in modules and not any("{" in module for module in modules)


@pytest.mark.parametrize("preset", ["single", "fsdp2", "hsdp2x2", "tp4", "fsdp2_cp2_tp2", "tp8_cp2"])
def test_local_shapes_over_all_ranks_make_the_whole(preset: str) -> None:
    """What all ranks hold together is each parameter once for every rank that replicates it."""
    setup = from_config(*compose_config([f"parallel={preset}", "device=cpu"]))
    model = setup.build_model()
    program = setup.compile(model)
    first = plan_document(program, model, setup.device, 0)
    mesh, world = first["mesh"], first["world_size"]
    held: dict[str, int] = {}
    for rank in range(world):
        for p in plan_document(program, model, setup.device, rank)["parameters"]:
            held[p["name"]] = held.get(p["name"], 0) + math.prod(p["local_shape"])
            assert p["bytes"] == 4 * math.prod(p["local_shape"]) and p["dtype"] == "float32"
    for p in first["parameters"]:
        sharded = [
            a
            for axis, placement in p["placements"].items()
            if placement != "replicate"
            for a in axis.split("+")
        ]
        copies = world // math.prod(mesh[a] for a in sharded)
        assert held[p["name"]] == copies * math.prod(p["global_shape"])


def test_placements_name_the_axes_above_1_and_fold_those_of_fsdp() -> None:
    for p in document("parallel=fsdp2_cp2_tp2")["parameters"]:
        assert list(p["placements"]) == ["dp_shard+cp", "tp"]
        assert set(p["placements"].values()) <= {"replicate", "shard(0)", "shard(1)"}


def test_buffers_are_the_plan_s() -> None:
    assert document("parallel=cp2")["buffers"] == {
        "batch": {"input_ids": 1, "labels": 1},
        "model": {"rope.*": 0},
        "balance": "auto",
    }


def test_every_class_of_ranks_is_told() -> None:
    setup = from_config(*compose_config(["parallel=fsdp4", "device=cpu"]))
    model = setup.build_model()
    classes = (RankClass(0, 3, 10, 20, 30), RankClass(3, 1, 5))
    step = Trace(0, (), Usage(20, "", "", {}), classes=classes)
    made = plan_document(setup.compile(model), model, "cpu", 0, step)
    assert json.loads(json.dumps(made["rank_classes"])) == [
        {"rank": 0, "ranks": 3, "parameters_bytes": 10, "peak": 20, "sent_bytes": 30},
        {"rank": 3, "ranks": 1, "parameters_bytes": 5, "peak": None, "sent_bytes": None},
    ]
    assert document("parallel=fsdp4")["rank_classes"] == []
