"""Faults planted in the sharded run, each of which the proof must find, place and name.

A fault is made by patching what the ranks run, after their plan was checked; the unsharded run never meets
it. `python -m tests.proof.faults` runs all of them, and with --write docs/proving.md writes its table;
with --wider it plants them on presets of more axes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from benchmarks.proofs.markdown import replace_between, table
from parallelizer.proof import observe
from parallelizer.proof.proof import Proof
from parallelizer.proof.prove import prove, prove_subject
from parallelizer.proof.subject import Subject
from parallelizer.runtime import gradients, initialize, step, sum_over_batch
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.pipeline import live
from parallelizer.runtime.pipeline.execute import Execution
from parallelizer.runtime.pipeline.passes import LossHead
from parallelizer.runtime.pipeline.stage_model import StageModel
from parallelizer.runtime.state import state_of
from parallelizer.styles import fsdp, fsdp_partial
from parallelizer.styles.context_parallel import balance, gathering, intercept
from parallelizer.styles.context_parallel.buffers import LocalBuffers
from parallelizer.styles.experts import dispatch
from parallelizer.styles.experts.stream import Stream
from parallelizer.styles.float8 import experts, gathers, grouped, inputs, linear
from parallelizer.styles.packing import Packing
from tests.proof import subjects
from tests.proof.ledger_proof import LedgerProof, ledger_proof
from tests.simulate.setups import CAST, GATHERED, in_float8

Patch = pytest.MonkeyPatch
Faulty = Callable[..., Any]


SMALL = functools.partial(subjects.mlp, {"tp": 2})


@dataclass(frozen=True)
class Fault:
    """`plant` patches; the proof must name the module, the phase and the axis, and use the words. No
    overrides: the `subject`, without one the small model. `by_ledger`: every value stays right, and the ranks' ledger is
    compared with the planned one. `or_over` are axes that are to blame like `axis` where the mesh has them: those that what is
    wrong goes over as well. `or_in` are modules that may show it first, by the values; `not_on` are presets on which nothing
    breaks by it.
    """

    name: str
    overrides: tuple[str, ...]
    plant: Callable[[Patch], None]
    module: str
    phase: str
    axis: str | None
    words: str
    force: bool = False
    subject: Callable[[], Subject] = SMALL
    by_ledger: bool = False
    or_over: tuple[str, ...] = ()
    or_in: tuple[str, ...] = ()
    not_on: tuple[str, ...] = ()

    @property
    def needs_torchao(self) -> bool:
        """Whether the plan computes in float8."""
        return any("float8" in override for override in self.overrides)


def proof_of(fault: Fault) -> Proof | LedgerProof:
    """Plant the fault, and prove."""
    if fault.by_ledger:
        return ledger_proof(subjects.setup(*fault.overrides), lambda: planted(fault))
    with planted(fault):
        if not fault.overrides:
            return prove_subject(fault.subject())
        return prove(subjects.setup(*fault.overrides), force=fault.force)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Inside, ranks have the fault."""
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        yield


def found_rightly(fault: Fault, proof: Proof | LedgerProof) -> bool:
    """Whether the proof fails, and says of the fault what is true."""
    found = proof.divergence
    return (
        not proof.passed
        and found is not None
        and found.module in (fault.module, *fault.or_in)
        and found.phase == fault.phase
        and found.axis in (fault.axis, *fault.or_over)
        and fault.words in found.description
    )


def on_ranks(patch: Patch, owner: Any, name: str, faulty: Faulty) -> None:
    """Replace a function on ranks only; `faulty` gets the right one first."""
    right = getattr(owner, name)

    @functools.wraps(right)  # torch looks at signatures
    def either(*args: Any, **kwargs: Any) -> Any:
        return faulty(right, *args, **kwargs) if dist.is_initialized() else right(*args, **kwargs)

    static = isinstance(vars(owner).get(name), staticmethod)
    patch.setattr(owner, name, staticmethod(either) if static else either)


def on_model(change: Callable[[nn.Module], None]) -> Callable[[Patch], None]:
    """Change the ranks' model once it has its values."""

    def built(right: Faulty, model: nn.Module, **kwargs: Any) -> nn.Module:
        right(model, **kwargs)
        change(model)
        return model

    return lambda patch: on_ranks(patch, observe, "materialize", built)


def replaced(owner: Any, name: str, faulty: Faulty) -> Callable[[Patch], None]:
    """A fault that is one function."""
    return lambda patch: on_ranks(patch, owner, name, faulty)


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of what should have happened."""


def inside(model: nn.Module, path: str) -> nn.Module | None:
    """A module of the model; None on a rank whose stages lack it."""
    return dict(model.named_modules()).get(path)


def _scale_gradient(model: nn.Module) -> None:
    """The weight counts twice in backward, its input once. FSDP does not call hooks of parameters."""
    wo = inside(model, "layers.0.attention.wo")
    if wo is None:
        return
    forward = wo.forward

    def twice(x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = forward(x.detach())
        result: torch.Tensor = forward(x) + (again - again.detach())
        return result

    wo.forward = twice


def _exchange_heads(model: nn.Module) -> None:
    wk, state = inside(model, "layers.0.attention.wk"), state_of(model)
    if wk is None or state is None:
        return
    group = state.mesh["tp"].get_group()

    def exchange(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(2)]
        dist.all_gather(parts, output.detach().contiguous(), group=group)
        return output * 0 + parts[1 - dist.get_rank(group)]

    wk.register_forward_hook(exchange)


def _other_slice(right: Faulty, full: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    """The key heads' slices, dealt out in the wrong order."""
    local = right(full, mesh, placements)
    return right(full.roll(full.shape[0] // 2, 0), mesh, placements) if full.shape[0] == 32 else local


def _mean(right: Faulty, model: nn.Module, batch: Any, loss: Any, *args: Any) -> Any:
    def mean(output: torch.Tensor, part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = loss(output, part)
        return total / weight, torch.ones(())

    return right(model, batch, mean, *args)


def _own_sum(right: Faulty, tensor: torch.Tensor, groups: Any) -> torch.Tensor:
    """A sum over the tokens of this rank alone."""
    return tensor.clone()


def _twice(right: Faulty, unit: nn.Module, names: Any, groups: Any) -> None:
    right(unit, names, (*groups, *groups))


def _over_shards_alone(right: Faulty, module: nn.Module, *, mesh: Any, **options: Any) -> Any:
    return right(module, mesh=mesh["dp_shard"], **options)


def _no_mask(right: Faulty, region: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return right(
        region,
        func,
        args,
        {**kwargs, "is_causal": False} if region.name == "layers.1.attention.inner" else kwargs,
    )


def _skip_on_second(model: nn.Module) -> None:
    state = state_of(model)
    if state is not None and state.mesh["dp_shard"].get_local_rank() == 1:
        torch.optim.AdamW.step = nothing  # of this process, which is a rank


def _plain_labels(right: Faulty, batch: Any, plan: Any, mesh: Any, **options: Any) -> Any:
    cp = mesh["cp"]
    return {
        **right(batch, plan, mesh, **options),
        "labels": batch["labels"].chunk(cp.size(), 1)[cp.get_local_rank()],
    }


def _unreduced(right: Faulty, *args: Any) -> Any:
    *_, module, output, _ = args
    return output.to_local() if isinstance(module, nn.Linear) else right(*args)


def _bias_again(model: nn.Module) -> None:
    down = model.get_submodule("down")
    bias = down.get_parameter("bias")
    local = bias.full_tensor() if isinstance(bias, DTensor) else bias
    down.register_forward_hook(lambda module, args, output: output + local.detach() + 1)


def _everything_sharded(right: Faulty, tensor: torch.Tensor, ranks_of: dict[str, tuple[int, ...]]) -> Any:
    if not isinstance(tensor, DTensor):
        return right(tensor, ranks_of)
    groups = tensor.device_mesh.get_all_groups()
    ranks = [tuple(dist.get_process_group_ranks(group)) for group in groups]
    return {(str(i), ranks[i]): group for i, group in enumerate(groups) if group.size() > 1}


def _times_ep(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if ".experts." in name:
            param.register_hook(lambda gradient: gradient * 2)


def _experts_of_every_rank(right: Faulty, *args: Any) -> Any:
    """What `ep` shares out counts as whole."""
    return {axis: group for axis, group in right(*args).items() if axis[0] != "ep"}


def _own_number_shifted(right: Faulty, *args: Any) -> Any:
    """Rows are computed by the next expert of the rank."""
    counts = right(*args)
    own = args[1] // dist.get_world_size(args[2])
    return dataclasses.replace(counts, experts=(counts.experts + 1) % own)


def _all_of_them(right: Faulty, stream: Stream, length: int) -> tuple[int, int]:
    """Every rank of tp computes the first rows."""
    return 0, right(stream, length)[1]


def _rolled(right: Faulty, buffers: LocalBuffers) -> None:
    for name in buffers.whole:
        buffers.whole[name] = buffers.whole[name].roll(1, 0)
    right(buffers)


def _own_rows_only(
    right: Faulty, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, group: Any, *more: Any
) -> Any:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    return tuple(balance.split(t, 2, ranks, rank).to(dtype) for t in (keys, values))


def _noise(model: nn.Module) -> None:
    norm = inside(model, "layers.0.ffn_norm")
    if norm is not None:
        norm.register_forward_hook(lambda module, args, output: output + 1e-8 * (1000 * output).sin())


def _another_decay(right: Faulty, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
    for group in optimizer.param_groups:
        group["weight_decay"] *= 1.5
    return right(optimizer, *args)


def _halved(right: Faulty, parameters: Any) -> None:
    parameters = list(parameters)
    right(parameters)
    for param in parameters:
        param.grad.mul_(0.5)


def _local_norm(right: Faulty, parameters: Any, *groups: Any) -> torch.Tensor:
    """Every rank's own shards, and nobody else's."""
    locals_ = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    return torch.stack([g.norm() for g in locals_]).norm()


def _batch_before(right: Faulty, stage: StageModel, received: Any, known: Any, batch: Any) -> Any:
    """Stages behind the first read the batch of the microbatch before."""
    earlier = vars(stage).get("earlier", batch)
    stage.__dict__["earlier"] = batch
    return right(stage, received, known, earlier if stage.index else batch)


def _unscaled(right: Faulty, head: LossHead, output: Any, batch: Any) -> Any:
    scaled = right(head, output, batch)
    return None if scaled is None else scaled / head.scale


def _first_twice(right: Faulty, batch: Any, plan: Any, number: int) -> Any:
    first, _, *others = right(batch, plan, number)
    return [first, first, *others]


def _memory_before(right: Faulty, stage: StageModel, received: Any, known: Any, batch: Any) -> Any:
    """What the encoder returned for the microbatch before."""
    before = vars(stage).get("earlier", received)
    stage.__dict__["earlier"] = [tensor.detach() for tensor in received]
    given = [
        old if value.unit.startswith("encoder") and old.shape == new.shape else new
        for value, old, new in zip(stage.stage.receives, before, received, strict=True)
    ]
    return right(stage, given, known, batch)


def _skipped_lost(right: Faulty, stage: StageModel, received: Any, known: Any, batch: Any) -> Any:
    """Zeros for what skips the modules between: what the encoder returned, on a stage of the decoder."""
    given = [
        torch.zeros_like(tensor) if value.unit.startswith("encoder") and len(received) > 1 else tensor
        for value, tensor in zip(stage.stage.receives, received, strict=True)
    ]
    return right(stage, given, known, batch)


def _swap_stages(model: nn.Module) -> None:
    state = state_of(model)
    models = state.pipeline.models if state is not None and state.pipeline is not None else {}
    if not {1, 2} <= models.keys():
        return
    lists = [models[stage].model.get_submodule("layers") for stage in (1, 2)]
    layers = [dict(inside.named_children())[str(at)] for at, inside in zip((1, 2), lists, strict=True)]
    for at, inside, other in zip((1, 2), lists, reversed(layers), strict=True):
        inside.add_module(str(at), other)
        models[at].watch()


def _root_left_out(patch: Patch) -> None:
    """The modules of a stage are units, and the stage itself is none. So FSDP has no root that is told which backward is the
    last one, as in torch's own schedules.
    """

    def wrap(right: Faulty, module: nn.Module, **options: Any) -> Any:
        if not isinstance(module, StageModel):
            return right(module, **options)
        for inside in reversed(list(module.modules())):
            if any(not isinstance(p, DTensor) for p in inside.parameters(recurse=False)):
                right(inside, **options)
        return module

    def prepare(right: Faulty, execution: Any, action: Any, stage: StageModel, final: bool) -> None:
        if isinstance(stage, FSDPModule):
            right(execution, action, stage, final)

    def keep(right: Faulty, module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            right(module)

    on_ranks(patch, torch.distributed.fsdp, "fully_shard", wrap)
    on_ranks(patch, fsdp_partial, "keep_partial", keep)
    on_ranks(patch, Execution, "_prepare_backward", prepare)


def _scale_of_a_shard(right: Faulty, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The scale of what a rank has of a tensor, taken for that of the tensor."""
    if not isinstance(tensor, DTensor):
        return right(tensor, *args, **kwargs)
    scale = right(tensor.to_local(), *args, **kwargs)
    return DTensor.from_local(scale, tensor.device_mesh, [Replicate()], run_check=False)


def _scale_before(patch: Patch) -> None:
    """The scale that the same call had for the microbatch before, in the stages of a pipeline."""
    from torchao.float8 import float8_scaling_utils

    calls: list[torch.Tensor] = []
    before: list[torch.Tensor] = []

    def begun(right: Faulty, *args: Any) -> Any:
        before[:] = calls
        calls.clear()
        return right(*args)

    def old(right: Faulty, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(right(*args, **kwargs))
        at = len(calls) - 1
        alike = at < len(before) and before[at].shape == calls[at].shape
        return before[at] if alike else calls[at]

    on_ranks(patch, StageModel, "forward", begun)
    on_ranks(patch, float8_scaling_utils, "tensor_to_scale", old)


def scaled_by(faulty: Faulty) -> Callable[[Patch], None]:
    """A fault of the scales that torchao finds."""

    def plant(patch: Patch) -> None:
        from torchao.float8 import float8_scaling_utils

        on_ranks(patch, float8_scaling_utils, "tensor_to_scale", faulty)

    return plant


def _cast_alone(right: Faulty, x: Any, module: Any) -> Any:
    """An input that is cast with the scale of what a rank has of it."""
    part = right(x.to_local(), module)
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False)


def _scale_of_another_expert(right: Faulty, largest: torch.Tensor) -> torch.Tensor:
    """Stacked weights, each with the largest values of the expert before."""
    scales: torch.Tensor = right(largest.roll(1, 0) if largest.ndim == 3 else largest)
    return scales


def _round_head(model: nn.Module) -> None:
    """What a glob that matches too much would do."""
    head = inside(model, "output")
    if (
        isinstance(head, nn.Linear) and "weight" in head._parameters
    ):  # a stage without the head has an empty one
        linear.run_in_float8(head, "rowwise", emulate=True)


def _skip_one(right: Faulty, module: nn.Linear, *args: Any, **kwargs: Any) -> None:
    """A filter leaves the linears of one size in their own dtype."""
    if (module.in_features, module.out_features) != (64, 128):
        right(module, *args, **kwargs)


NORMS = 'rules=["layers.*.{attention_norm,ffn_norm}: none"]'
MIXTURE = (
    "model=hf_qwen3_moe", "model.config.hidden_size=64", "model.config.head_dim=16", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2", "model.config.moe_intermediate_size=32",
)  # fmt: skip
OVER_TP = ("parallel.mesh.tp=2", "parallel.mesh.ep=2")
EXPERTS_IN_FLOAT8 = 'rules=["model.layers.*.mlp.experts: {style: float8, recipe: rowwise}"]'
BIAS_IN_EVERY_TERM = """
rules:
  experts:
    - {style: shard-params, params: {up: shard(2), up_bias: shard(1), down: shard(1), down_bias: replicate}}
    - {style: prepare-io, input: {x: replicate, shares: replicate}, local_input: true, grad: partial,
       output: partial -> replicate}
"""
WHOLE_NORMS = "++parallel.styles.fsdp.min_size=100"

FAULTS = (
    Fault(
        "a norm without its rule",
        ("parallel=tp2", NORMS),
        nothing,
        "layers.1.ffn_norm",
        "backward",
        "tp",
        "its reduction over tp is missing",
        force=True,
    ),
    Fault(
        "a norm without its rule, beside learned positions",
        ("model=hf_gpt2", "parallel=fsdp2_tp2", 'rules=["transformer.h.*.{ln_1,ln_2}: none"]'),
        nothing,
        "transformer.h.1.ln_2",
        "backward",
        "tp",
        "its reduction over tp is missing",
        force=True,
    ),
    Fault(
        "a gradient scaled by tp",
        ("parallel=tp2",),
        on_model(_scale_gradient),
        "layers.0.attention.wo",
        "backward",
        "tp",
        "is tp (2) times the reference",
    ),
    Fault(
        "rotary positions not split with the tokens",
        ("parallel=cp2",),
        replaced(LocalBuffers, "_swap", nothing),
        "rope",
        "forward",
        "cp",
        "the output of rope",
    ),
    Fault(
        "key heads of another rank",
        ("parallel=tp2",),
        on_model(_exchange_heads),
        "layers.0.attention.wk",
        "forward",
        "tp",
        "the part that belongs to rank 1",
    ),
    Fault(
        "key weights dealt out in the wrong order",
        ("parallel=tp2",),
        replaced(initialize, "local_slice", _other_slice),
        "layers.0.attention.wk",
        "initialization",
        "tp",
        "in another order: a permutation",
    ),
    Fault(
        "loss averaged over ranks, not tokens",
        ("parallel=fsdp2",),
        replaced(observe, "train_step", _mean),
        "output",
        "backward",
        "dp_shard",
        "as in a mean of means",
        or_over=("cp",),
    ),
    Fault(
        "an all-reduce doubled",
        ("parallel=fsdp2", WHOLE_NORMS),
        replaced(fsdp, "sum_gradients_of", _twice),
        "norm",
        "backward",
        "dp_shard",
        "once too often",
        or_over=("cp",),
    ),
    Fault(
        "the causal mask dropped in one layer",
        ("parallel=cp2",),
        replaced(intercept, "_attend", _no_mask),
        "layers.1.attention.inner",
        "forward",
        "cp",
        "differs by",
    ),
    Fault(
        "weights initialised differently per rank",
        ("parallel=fsdp2_tp2",),
        replaced(initialize, "derived_seed", lambda right, seed, name: right(seed + dist.get_rank(), name)),
        "tok_embeddings",
        "initialization",
        "tp",
        "the initial value of tok_embeddings.weight",
    ),
    Fault(
        "one rank skips the optimizer's step",
        ("parallel=fsdp2",),
        on_model(_skip_on_second),
        "tok_embeddings",
        "optimizer",
        "dp_shard",
        "no optimizer step was made there",
    ),
    Fault(
        "labels not permuted with the tokens",
        ("parallel=cp2",),
        replaced(observe, "shard_tokens", _plain_labels),
        "output",
        "backward",
        "cp",
        "look at the labels",
    ),
    Fault(
        "a row-wise output not reduced",
        ("plan=llama_tp", "parallel=tp2"),
        replaced(RowwiseParallel, "_prepare_output_fn", _unreduced),
        "layers.0.attention.wo",
        "forward",
        "tp",
        "its reduction over tp is missing",
    ),
    Fault(
        "a bias added again",
        (),
        on_model(_bias_again),
        "down",
        "forward",
        "tp",
        "by the same vector at every position",
    ),
    Fault(
        "fsdp averages gradients",
        ("parallel=fsdp2",),
        replaced(fsdp, "sum_instead_of_average", nothing),
        "output",
        "backward",
        "dp_shard",
        "and not summed",
        or_over=("cp",),
    ),
    Fault(
        "whole parameters' gradients not summed",
        ("parallel=fsdp2", WHOLE_NORMS),
        replaced(fsdp, "sum_gradients_of", nothing),
        "norm",
        "backward",
        "dp_shard",
        "is missing",
        or_over=("cp",),
    ),
    Fault(
        "the gradient norm counts replicas",
        ("parallel=tp2",),
        replaced(gradients, "_sharding_groups", _everything_sharded),
        "",
        "clip",
        None,
        "some are counted more than once",
    ),
    Fault(
        "the gradient norm of this rank only",
        ("parallel=fsdp2",),
        replaced(step, "grad_norm", _local_norm),
        "",
        "clip",
        None,
        "some are left out",
    ),
    Fault(
        "buffers put back shifted",
        ("parallel=cp2",),
        replaced(LocalBuffers, "restore", _rolled),
        "rope",
        "forward",
        "cp",
        "of step 1",
    ),
    Fault(
        "packed parts split as one",
        (),
        replaced(Packing, "order", lambda right, packing: torch.arange(sum(packing.parts))),
        "gate_up",
        "forward",
        "tp",
        "the output of gate_up",
    ),
    Fault(
        "data ranks read the same rows",
        ("parallel=fsdp2",),
        replaced(observe, "batch_rank", lambda right, mesh: (0, right(mesh)[1])),
        "tok_embeddings",
        "forward",
        "dp_shard",
        "the part that belongs to rank 0",
    ),
    Fault(
        "keys' gradients stay on their rank",
        ("parallel=cp2",),
        replaced(gathering, "scatter_sum", _own_rows_only),
        "layers.1.attention.wv",
        "backward",
        "cp",
        "the gradient of the output of layers.1.attention.wv",
    ),
    Fault(
        "a norm in lower precision",
        ("parallel=tp2",),
        on_model(_noise),
        "layers.0.ffn_norm",
        "forward",
        "tp",
        "noise, of the size that float32 rounds away",
    ),
    Fault(
        "replicas of hsdp not summed",
        ("parallel=hsdp2x2",),
        replaced(torch.distributed.fsdp, "fully_shard", _over_shards_alone),
        "output",
        "backward",
        "dp_replicate",
        "its reduction over dp_replicate is missing",
    ),
    Fault(
        "another weight decay",
        ("parallel=tp2",),
        replaced(torch.optim.AdamW, "step", _another_decay),
        "tok_embeddings",
        "optimizer",
        None,
        "the optimizer's step differs",
    ),
    Fault(
        "every gradient halved",
        ("parallel=tp2",),
        replaced(step, "sum_partial", _halved),
        "output",
        "backward",
        "tp",
        "1/tp (1/2) of the reference, as every other is",
    ),
    Fault(
        "the documents of another microbatch",
        ("model=llama_packed", "plan=llama_packed", "parallel=pp2"),
        replaced(StageModel, "forward", _batch_before),
        "rope",
        "forward",
        "pp",
        "along dimension 0 only, on rank",
    ),
    Fault(
        "a microbatch computed twice",
        ("parallel=pp2",),
        replaced(live, "microbatches", _first_twice),
        "tok_embeddings",
        "forward",
        "pp",
        "along dimension 0 only",
    ),
    Fault(
        "a pipeline's loss without its scale",
        ("parallel=pp2",),
        replaced(LossHead, "__call__", _unscaled),
        "output",
        "backward",
        "pp",
        "is 4096 times the reference",
    ),
    Fault(
        "a tied parameter's gradients not summed over stages",
        ("parallel=pp2", "++model.tie_embeddings=true"),
        replaced(step, "sum_shared", nothing),
        "tok_embeddings",
        "backward",
        "pp",
        "its reduction over pp is missing",
    ),
    Fault(
        "two stages swapped",
        ("parallel=pp2", "parallel.pipeline.schedule=zbv", "model.n_layers=4"),
        on_model(_swap_stages),
        "layers.1.attention_norm",
        "forward",
        "pp",
        "the output of layers.1.attention_norm differs",
    ),
    Fault(
        "a root that is not wrapped",
        ("parallel=pp2_fsdp2",),
        _root_left_out,
        "layers.0",
        "backward",
        "dp_shard",
        "it runs once a microbatch and not once a step",
        by_ledger=True,
    ),
    Fault(
        "the encoder's output of another microbatch",
        ("model=encoder_decoder_tiny", "plan=encoder_decoder", "parallel=pp2"),
        replaced(StageModel, "forward", _memory_before),
        "decoder.blocks.0.cross.k",
        "forward",
        "pp",
        "along dimension 0 only",
    ),
    Fault(
        "a skip connection dropped between stages",
        ("model=encoder_decoder_tiny", "plan=encoder_decoder", "parallel=pp2"),
        replaced(StageModel, "forward", _skipped_lost),
        "decoder.blocks.0.cross.k",
        "forward",
        "pp",
        "the output of decoder.blocks.0.cross.k is zero, on every rank",
    ),
    Fault(
        "experts' gradients ep times too large",
        (*MIXTURE, "parallel=fsdp2_ep2"),
        on_model(_times_ep),
        "model.layers.1.mlp.experts",
        "backward",
        "ep",
        "is ep (2) times the reference",
    ),
    Fault(
        "the gradient norm of one rank's experts",
        (*MIXTURE, "parallel=fsdp2_ep2"),
        replaced(gradients, "_sharding_groups", _experts_of_every_rank),
        "",
        "clip",
        None,
        "some are left out",
    ),
    Fault(
        "a router's gradients not summed over tp",
        (*MIXTURE, *OVER_TP, 'rules=["model.layers.*.mlp.gate: {style: replicate, grad: replicate}"]'),
        nothing,
        "model.layers.1.mlp.gate",
        "backward",
        "tp",
        "its reduction over tp is missing",
        force=True,
    ),
    Fault(
        "rows computed by the next expert",
        (*MIXTURE, "parallel=fsdp2_ep2"),
        replaced(dispatch, "exchanged_counts", _own_number_shifted),
        "model.layers.0.mlp.experts",
        "forward",
        "dp_shard",
        "the output of model.layers.0.mlp.experts",
        or_over=("tp",),
    ),
    Fault(
        "tokens of experts not divided over tp",
        (*MIXTURE, *OVER_TP),
        replaced(Stream, "place", _all_of_them),
        "model.layers.0.mlp.experts",
        "forward",
        "tp",
        "the output of model.layers.0.mlp.experts",
    ),
    Fault(
        "a balancing loss of one rank's tokens",
        (),
        replaced(sum_over_batch, "_reduced", _own_sum),
        "router",
        "backward",
        "dp_shard",
        "the gradient of the output of router differs",
        subject=functools.partial(subjects.balanced, {"dp_shard": 2}),
    ),
    Fault(
        "a router's bias changed by the load of one rank's tokens",
        (),
        replaced(sum_over_batch, "_reduced", _own_sum),
        "router",
        "forward",
        "dp_shard",
        "the output of router",
        subject=functools.partial(subjects.corrected, {"dp_shard": 2}),
    ),
    Fault(
        "a bias of experts added tp times",
        (),
        nothing,
        "experts",
        "forward",
        "tp",
        "the output of experts differs",
        subject=functools.partial(subjects.balanced, {"tp": 2}, BIAS_IN_EVERY_TERM),
    ),
    Fault(
        "the largest value of a shard",
        ("parallel=tp2", in_float8("tensorwise")),
        scaled_by(_scale_of_a_shard),
        "layers.0.attention.wq",
        "forward",
        "tp",
        "the output of layers.0.attention.wq",
    ),
    Fault(
        "the scale of another microbatch",
        ("parallel=pp2", in_float8("tensorwise")),
        _scale_before,
        "layers.0.attention.wq",
        "forward",
        "pp",
        "the output of layers.0.attention.wq",
    ),
    Fault(
        "a head in float8 that no rule names",
        ("parallel=tp2", in_float8("rowwise")),
        on_model(_round_head),
        "output",
        "forward",
        "tp",
        "the output of output",
    ),
    Fault(
        "a linear that stays in its own dtype",
        ("parallel=fsdp2", in_float8("rowwise")),
        replaced(linear, "run_in_float8", _skip_one),
        "layers.0.feed_forward.w1",
        "forward",
        "dp_shard",
        "the output of layers.0.feed_forward.w1",
        or_over=("tp", "cp"),  # it is so on every mesh
    ),
    Fault(
        "weights gathered with the scale of a part, of fsdp",
        ("parallel=fsdp2_tp2", in_float8("tensorwise", GATHERED)),
        replaced(gathers, "_groups", lambda right, params: right(params)[1:]),
        "layers.0.attention.wq",
        "forward",
        "dp_shard",
        "the output of layers.0.attention.wq",
        or_over=("cp",),
    ),
    Fault(
        "weights gathered with the scale of a part, of tp",
        ("parallel=fsdp2_tp2", in_float8("tensorwise", GATHERED)),
        replaced(gathers, "_groups", lambda right, params: right(params)[:1]),
        "layers.0.attention.wq",
        "forward",
        None,  # on a mesh of tp alone fsdp gathers nothing
        "the output of layers.0.attention.wq",
    ),
    Fault(
        "an input cast with the scale of a part",
        ("parallel=tp2", in_float8("tensorwise", CAST)),
        replaced(inputs, "cast_input", _cast_alone),
        "layers.0.attention.wq",
        "forward",
        "tp",
        "the output of layers.0.attention.wq",
    ),
    Fault(
        "the largest value of a part of a row, of stacked experts",
        (*MIXTURE, "parallel=tp2", EXPERTS_IN_FLOAT8),
        replaced(grouped, "agreed", lambda right, largest, groups: right(largest, ())),
        "model.layers.1.mlp.experts",  # a scale that is another power of two changes only the smallest values
        "forward",
        "tp",
        "the output of model.layers.",
        or_in=("model.layers.0.mlp.experts",),
        not_on=("fsdp2_ep4_tp2",),  # experts are whole there
    ),
    Fault(
        "weights scaled as those of another expert",
        (*MIXTURE, "parallel=fsdp2_ep2", EXPERTS_IN_FLOAT8),
        replaced(grouped, "row_scales", _scale_of_another_expert),
        "model.layers.0.mlp.experts",
        "forward",
        "dp_shard",
        "the output of model.layers.0.mlp.experts",
        or_over=("tp",),
    ),
    Fault(
        "stacked experts that stay in their own dtype",
        (*MIXTURE, "parallel=fsdp2_ep2", EXPERTS_IN_FLOAT8),
        replaced(experts, "run_experts_in_float8", nothing),
        "model.layers.0.mlp.experts",
        "forward",
        "dp_shard",
        "the output of model.layers.0.mlp.experts",
        or_over=("tp",),
    ),
)


PRESETS = ("fsdp2_tp2", "hsdp2x2", "cp2_tp2", "fsdp2_cp2_tp2", "pp2_fsdp2", "pp2_tp2", "pp2_cp2", "pp2_fsdp2_tp2",
           "fsdp2_ep4_tp2")  # fmt: skip
"""The presets of two and three axes."""


def on_more_axes(fault: Fault) -> Iterator[Fault]:
    """The same fault on every preset that has the axes of its own, and more. A mesh that has two axes for the data shares the
    rows of `fsdp2` over both.
    """
    own = next((word.partition("=")[2] for word in fault.overrides if word.startswith("parallel=")), None)
    if own is None or fault.by_ledger:
        return
    axes = set(own.split("_")) if own != "fsdp2_ep2" else {"fsdp2", "ep4"}
    for preset in PRESETS:
        if (
            preset != own
            and preset not in fault.not_on
            and axes <= set(preset.replace("hsdp2x2", "hsdp2x2_fsdp2").split("_"))
        ):
            words = tuple(f"parallel={preset}" if w.startswith("parallel=") else w for w in fault.overrides)
            yield dataclasses.replace(fault, name=f"{fault.name}, on {preset}", overrides=words)


def main() -> None:
    """Run every fault, print how many are found, and write the table into a page where one is named."""
    parser = argparse.ArgumentParser(
        "python -m tests.proof.faults", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name contains this")
    parser.add_argument("--wider", action="store_true", help="on presets of two and three axes")
    parser.add_argument("--write", metavar="PAGE", help="the page to write the table into")
    options = parser.parse_args()
    every = [wider for fault in FAULTS for wider in on_more_axes(fault)] if options.wider else FAULTS
    chosen = [fault for fault in every if options.only in fault.name]
    rows, right = [], 0
    for fault in chosen:
        try:
            proof = proof_of(fault)
        except LaunchError as error:  # a fault that cannot be planted on these axes
            print("FAILED", fault.name, error.message.strip().splitlines()[-1], sep=" | ", flush=True)
            continue
        found = proof.divergence
        rightly = found_rightly(fault, proof)
        right += rightly
        if options.wider:
            print("right" if rightly else "WRONG", fault.name, found, sep=" | ", flush=True)
        where = f"`{found.module or 'the model'}`, {found.phase}" if found else "not found"
        rows.append(
            [fault.name, where, (found.axis if found else None) or "", found.description if found else ""]
        )
    text = f"{right} of {len(chosen)} planted faults are found, placed and named.\n\n"
    if options.write:
        replace_between(
            options.write, "planted", text + table(["fault", "found in", "axis", "said of it"], rows)
        )
    print(text.strip())


if __name__ == "__main__":
    main()
