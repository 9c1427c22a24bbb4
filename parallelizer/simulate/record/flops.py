"""How many floating-point operations a step of the model takes, counted operator by operator."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from parallelizer import torch_private
from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.equal_layers import SHORT, Run, longest_run, shorten
from parallelizer.language.workload import Workload
from parallelizer.runtime.initialize import allocate
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.step import Loss, outcome_for_loss
from parallelizer.styles.application import Program


def step_flops(program: Program, model: nn.Module, workload: Workload, loss: Loss) -> int | None:
    """Those of forward and backward over the whole global batch, on all ranks together; None where the model does not
    run on fake tensors, or has no operator that is counted.

    Counted by torch's `FlopCounterMode` on the unsharded model, in children of this process: 2mnk for each product of
    matrices, so 4 b h s^2 d for the forward of an attention of s rows and columns, whether a mask hides half of it or not.
    What checkpointing computes again is not in it. So the ratio to what the hardware can do is the MFU of PaLM (Chowdhery
    et al. 2022, appendix B), which estimates 6N + 12LHQT a token for a Transformer of N parameters without embeddings, L
    layers, H heads of size Q and T tokens in a sequence. One sequence is counted, and multiplied; of equal layers a few.
    """
    run = longest_run(program, model)
    try:
        if run is not None:
            shorts = [(_of_short, program, model, workload, loss, run, SHORT + more) for more in (0, 1)]
            few, more = in_children(shorts)
            if few is not None and more is not None:
                return int(few + (run.count - SHORT) * (more - few)) * workload.batch_size or None
        [whole] = in_children([(_of_one_sequence, model, workload, loss)])
    except WorldError:  # the dry run says why
        return None
    return None if whole is None else whole * workload.batch_size or None


def _of_short(
    program: Program, model: nn.Module, workload: Workload, loss: Loss, run: Run, keep: int
) -> int | None:
    shorten(program, model, run, keep)
    return _of_one_sequence(model, workload, loss)


def _of_one_sequence(model: nn.Module, workload: Workload, loss: Loss) -> int | None:
    """Uses the model, which is on meta, up."""
    fake = torch_private.FakeTensors()
    try:
        with fake:
            allocate(model, "cpu")
            batch = {k: torch.empty_like(v) for k, v in workload.example(1, workload.seq_len).items()}
        # Written out, attention is two products of matrices; the CPU's kernel is no operator that is counted.
        with sdpa_kernel(SDPBackend.MATH), fake, FlopCounterMode(display=False) as counter:
            total, _ = loss_sums(loss, outcome_for_loss(model, batch), batch)
            total.backward()
    except (Exception, SystemExit):  # whatever the model raises
        return None
    return counter.get_total_flops()
