"""The exported stages run on torch.distributed.pipelining, and give every gradient of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from parallelizer.compiler.observe.module_calls import observe
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.report.export.export import export
from parallelizer.runtime.initialize import materialize
from parallelizer.styles.float8.linear import run_in_float8
from parallelizer.styles.float8.recipes import TORCHAO_NAMES, recipe_of
from tests.chosen import chosen
from tests.ranks import run_ranks
from tests.simulate.setups import in_float8

ROWS, TOKENS = 8, 16
SMALL = (f"train.batch_size={ROWS}", f"train.seq_len={TOKENS}", "device=cpu")
LLAMA = (
    "model.dim=32", "model.n_layers=4", "model.n_heads=4", "model.n_kv_heads=2", "model.hidden_dim=48",
    "model.max_seq_len=16",
)  # fmt: skip
CELLS = {
    "pp2 1f1b": ("pp2", "1f1b", *LLAMA),
    "pp2 zbv": ("pp2", "zbv", *LLAMA),
    "pp2 gpipe": ("pp2", "gpipe", *LLAMA),
    "pp2 interleaved-1f1b": ("pp2", "interleaved-1f1b", *LLAMA),
    "pp2 interleaved-zero-bubble": ("pp2", "interleaved-zero-bubble", *LLAMA),
    "pp2 dualpipev": ("pp2", "dualpipev", *LLAMA),
    "pp2_tp2 1f1b": ("pp2_tp2", "1f1b", *LLAMA),
    "pp2_fsdp2 1f1b": ("pp2_fsdp2", "1f1b", *LLAMA),
    "pp2_fsdp2_tp2 1f1b": ("pp2_fsdp2_tp2", "1f1b", *LLAMA),
    "tied": ("pp2", "zbv", *LLAMA, "+model.tie_embeddings=true"),
    "tied, fsdp": ("pp2_fsdp2", "1f1b", *LLAMA, "+model.tie_embeddings=true"),
    "a table from an earlier stage": ("pp2", "1f1b", "model=hf_llama"),
    "gpt2": ("pp2", "1f1b", "model=hf_gpt2"),
    "gemma2": ("pp2_fsdp2", "1f1b", "model=hf_gemma2"),
    "vit": ("pp2", "gpipe", "model=vit_tiny"),
}


def setup_of(preset: str, schedule: str = "1f1b", *more: str) -> Setup:
    words = [f"parallel={preset}", *SMALL, *more]
    if preset.startswith("pp"):
        words += [f"parallel.pipeline.schedule={schedule}", "parallel.pipeline.microbatches=4"]
    return from_config(*compose_config(words))


def exported(setup: Setup) -> str:
    model = setup.build_model()
    return export(setup.compile(model), model, observe(model, setup.workload))


def filled(setup: Setup) -> nn.Module:
    """The whole model, with values."""
    return materialize(setup.build_model(), device="cpu", seed=0)


def batch_of(setup: Setup) -> dict[str, Tensor]:
    batch = setup.workload.example(ROWS, TOKENS, "cpu", 3)
    if batch["labels"].ndim > 1:
        batch["labels"][1, 5:] = -100
    return batch


def mean_loss(output: Any, labels: Tensor, tokens: int) -> Tensor:
    logits = getattr(output, "logits", output)
    of_tokens = logits.flatten(0, 1) if labels.ndim > 1 else logits
    return F.cross_entropy(of_tokens, labels.flatten(), ignore_index=-100, reduction="sum") / tokens


def gradients_of_one_process(setup: Setup) -> dict[str, Tensor]:
    model, batch = filled(setup), batch_of(setup)
    labels = batch.pop("labels")
    mean_loss(model(**batch), labels, int((labels != -100).sum())).backward()
    every = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in every if p.grad is not None}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def staged_gradients(code: str, setup: Setup, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of this rank's stages after a step of the exported file."""
    file: dict[str, Any] = {"__name__": "exported"}
    exec(compile(code, "exported.py", "exec"), file)
    mesh = file["build_mesh"]("cpu")
    stages = file["build_stages"](setup.build_model(), mesh)
    for stage in stages:
        stage.to_empty(device="cpu")
        for name, param in stage.named_parameters():
            value = values[name.removeprefix("model.")]
            if isinstance(param.data, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            param.data.copy_(value)
        for path, buffer in stage.named_buffers():
            buffer.copy_(values[path.removeprefix("model.")])
    batch = batch_of(setup)
    tokens = int((batch["labels"] != -100).sum())
    if "dp_shard" in mesh.mesh_dim_names:
        groups, mine = mesh["dp_shard"].size(), mesh.get_local_rank("dp_shard")
        batch = {name: entry.chunk(groups)[mine] for name, entry in batch.items()}
    labels = batch.pop("labels")
    schedule = file["build_schedule"](
        stages, mesh, lambda output, target: mean_loss(output, target, tokens), torch.device("cpu")
    )
    sum_shared = (
        file["SharedGradients"](stages, mesh, file["SHARED"], file["PLACED"]) if "SHARED" in file else None
    )
    with loss_parallel():
        schedule.step(target=labels, **batch)
    if sum_shared is not None:
        sum_shared()
    return {
        name.removeprefix("model."): whole(p.grad)
        for stage in stages
        for name, p in stage.named_parameters()
        if p.grad is not None
    }


@pytest.mark.ranks
@pytest.mark.parametrize("cell", chosen(CELLS, ("tied", "pp2_fsdp2_tp2 1f1b")))
def test_every_gradient_is_that_of_one_process(cell: str) -> None:
    setup = setup_of(*CELLS[cell])
    code, expected = exported(setup), gradients_of_one_process(setup_of("single", "", *CELLS[cell][2:]))
    assert "parallelizer" not in code.split("from __future__", 1)[1]
    model = filled(setup)
    values = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = {name: value.detach() for name, value in values.items()}
    every = run_ranks(lambda: staged_gradients(code, setup, values), setup.mesh.world_size)
    assert {name for one in every for name in one} == set(expected)
    for one in every:
        for name, gradient in one.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def gradients_by_microbatch(setup: Setup) -> dict[str, Tensor]:
    """Those of one process that computes the microbatches one after the other: the tokens of each share a scale."""
    model, batch = filled(setup), batch_of(setup)
    for application in setup.compile(setup.build_model()).of_slot("precision"):
        recipe = TORCHAO_NAMES[recipe_of(application)]
        run_in_float8(model.get_submodule(application.module), recipe, emulate=True)
    tokens = int((batch["labels"] != -100).sum())
    for at in range(4):
        part = {name: entry.chunk(4)[at] for name, entry in batch.items()}
        labels = part.pop("labels")
        mean_loss(model(**part), labels, tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("recipe", TORCHAO_NAMES)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_in_float8_give_the_gradients_of_one_process_in_float8(recipe: str, schedule: str) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    words = (*LLAMA, in_float8(recipe))
    setup = setup_of("pp2", schedule, *words)
    code, expected = exported(setup), gradients_by_microbatch(setup_of("single", "", *words))
    full = gradients_of_one_process(setup_of("single", "", *LLAMA))
    values = {name: value.detach() for name, value in filled(setup).state_dict(keep_vars=True).items()}
    values |= {name: value.detach() for name, value in filled(setup).named_buffers()}
    every = run_ranks(lambda: staged_gradients(code, setup, values), setup.mesh.world_size)
    assert {name for one in every for name in one} == set(expected)
    for one in every:
        for name, gradient in one.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)
    # The stages do compute in float8.
    name = "layers.0.feed_forward.w1.weight"
    assert not torch.allclose(expected[name], full[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("pp2_cp2", "1f1b", *LLAMA), "cp divides the sequence"),
        (("pp2", "1f1b", "model=encoder_decoder_tiny"), "shared is called several times"),
    ],
)
def test_what_torch_cannot_run_is_refused_with_the_reason(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        exported(setup_of(*overrides))
    [found] = caught.value.diagnostics
    assert found.code == "export-pipeline" and reason in found.message and found.span is not None
