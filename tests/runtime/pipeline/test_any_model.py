"""Models with much between their blocks, cut into stages of real ranks, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.losses import cross_entropy
from parallelizer.proof.prove import prove_subject
from parallelizer.proof.subject import Subject
from parallelizer.proof.tiny import proof_batch
from tests.chosen import chosen
from tests.compiler.pipeline.models import VOCABULARY, Plain, Tangled, Tied, Two
from tests.findings import on_meta
from tests.parity import plan

PLANS = {
    Plain: 'rules: {"blocks.*": [fsdp, stage], "": fsdp}',
    Tangled: 'rules: {"blocks.*": [fsdp, stage], "": fsdp}',
    Two: 'rules: {"*coder.*": [fsdp, stage], "": fsdp}',
    Tied: 'rules: {"*coder.*": [fsdp, stage], "": fsdp}',
}
WORK = Workload(
    {
        "input_ids": Entry(("batch", "sequence"), "int64", (0, VOCABULARY // 2)),
        "labels": Entry(("batch", "sequence"), "int64", (0, VOCABULARY), -100),
    },
    8,
    6,
)
CASES = [
    (build, mesh, schedule)
    for build in PLANS
    for mesh in ("pp2", "pp2_fsdp2")
    for schedule in ("1f1b", "interleaved-1f1b", "zbv")
    if (build, mesh) != (Tangled, "pp2_fsdp2") or schedule == "1f1b"  # the others are refused
]
IN_THE_DEFAULT_RUN = [(Tangled, "pp2", "zbv"), (Two, "pp2_fsdp2", "interleaved-1f1b"), (Tied, "pp2", "1f1b")]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "of", chosen(CASES, IN_THE_DEFAULT_RUN), ids=lambda of: f"{of[0].__name__} {of[1]} {of[2]}"
)
def test_a_model_in_stages_is_the_model(of: tuple[type[nn.Module], str, str]) -> None:
    build, mesh, schedule = of
    proof = prove_subject(
        Subject(
            plan(PLANS[build]),
            Mesh({"pp": 2, "dp_shard": 2} if mesh == "pp2_fsdp2" else {"pp": 2}),
            lambda: on_meta(build),
            cross_entropy,
            adamw,
            lambda seed: proof_batch(WORK, seed),
            rows=WORK.batch_size,
            seq_len=WORK.seq_len,
            workload=WORK,
            pipeline=Pipeline(schedule, 4),
        )
    )
    assert proof.passed, str(proof)
