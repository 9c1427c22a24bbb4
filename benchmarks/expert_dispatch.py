"""The style `experts` against the two all-to-alls and the experts' own time, side by side in the same two ranks.

    python benchmarks/expert_dispatch.py [--tokens 2048] [--width 512] [--hidden 1024] [--experts 8] [--rounds 16]

Both take turns, forward and backward. What is added by the style: counting, the exchange of counts and its host read, the order
of rows, their weights on the way, and the weighted sum. The rows of the other side lie in order already.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from benchmarks.turns import Times
from parallelizer.language.plan import Mesh
from parallelizer.propose.from_transformers.imported import parsed
from parallelizer.runtime.launch import launcher as launch
from parallelizer.styles.experts.travel import exchange

RANKS, CHOSEN = 2, 2
SIDES = ("style", "all-to-alls and experts alone")
CLOCKS = ("on the clock", "processor time")


class Experts(nn.Module):
    """Gated experts in stacked parameters, and a loop over those that have tokens, as in transformers."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param, std=0.02)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up[expert]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.down[expert])
            made = made.index_add(0, token, rows * top_k_weights[token, place, None])
        return made


class Block(nn.Module):
    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.experts = Experts(experts, width, hidden)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        made: Tensor = self.experts(x, chosen, shares)
        return made


def rank(tokens: int, width: int, hidden: int, experts: int, rounds: int) -> tuple[Times, float]:
    """This rank's seconds of each round, and the largest difference of the results."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(tokens, width)
    shares, chosen = torch.randn(tokens, experts).softmax(-1).topk(CHOSEN, -1)
    gradient = torch.randn(tokens, width)
    mesh = pz.build_mesh(Mesh({"dp_shard": RANKS}, ep=RANKS), "cpu")
    with torch.device("meta"):
        block = Block(experts, width, hidden)
    program = pz.compile(parsed("version: 1\nrules: {experts: experts}"), block, mesh)
    pz.materialize(pz.apply(program, block, mesh), device="cpu", seed=0)
    own = experts // RANKS
    alone = Experts(own, width, hidden)
    for name, param in alone.named_parameters():
        param.data = block.experts.get_parameter(name).to_local().detach()

    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    sent = torch.bincount(flat, minlength=experts)
    arriving = torch.empty_like(sent)
    group = dist.group.WORLD
    dist.all_to_all_single(arriving, sent, group=group)
    send, receive = (counts.view(RANKS, own).sum(1).tolist() for counts in (sent, arriving))
    numbers = torch.arange(own).repeat(RANKS).repeat_interleave(arriving).unsqueeze(1)
    weights = exchange(shares.flatten()[order], send, receive, group).unsqueeze(1)
    rows, back = x[order // CHOSEN], gradient[order // CHOSEN]
    made: dict[str, Tensor] = {}

    def style() -> None:
        tokens_ = x.clone().requires_grad_()
        made["style"] = block(tokens_, chosen, shares)
        made["style"].backward(gradient)
        block.zero_grad(set_to_none=True)

    def parts() -> None:
        rows_ = rows.clone().requires_grad_()
        there = exchange(rows_, send, receive, group)
        made["parts"] = exchange(alone(there, numbers, weights), receive, send, group)
        made["parts"].backward(back)
        alone.zero_grad(set_to_none=True)

    times: Times = {f"{name}, {clock}": [] for clock in CLOCKS for name in SIDES}
    for turn in range(rounds + 1):
        for name, call in zip(SIDES, (style, parts), strict=True):
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            call()
            if turn:  # the first one warms up
                times[f"{name}, {CLOCKS[1]}"].append(time.process_time() - used)
                times[f"{name}, {CLOCKS[0]}"].append(time.perf_counter() - begun)
    summed = torch.zeros(tokens, width).index_add(0, order // CHOSEN, made["parts"].detach())
    return times, (summed - made["style"].detach()).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="on each rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    given = (options.tokens, options.width, options.hidden, options.experts, options.rounds)
    print(launch.start(measured, given, ranks=RANKS, device="cpu")[0])


def measured(*given: int) -> str:
    """All ranks' figures in words."""
    torch.set_num_threads(1)
    times, difference = rank(*given)
    gathered: list[tuple[Times, float] | None] = [None] * RANKS
    dist.all_gather_object(gathered, (times, difference))
    found = [one for one in gathered if one is not None]
    lines = []
    for clock in CLOCKS:
        style, parts = (
            [max(turn) for turn in zip(*(one[f"{name}, {clock}"] for one, _ in found), strict=True)]
            for name in SIDES
        )
        ratios = [a / b for a, b in zip(style, parts, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        lines.append(
            f"{clock}: style {1e3 * statistics.median(style):.1f} ms, {SIDES[1]} {1e3 * statistics.median(parts):.1f} ms, "
            f"ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f})"
        )
    return "\n".join([*lines, f"largest difference of the results {max(d for _, d in found):.1e}"])


if __name__ == "__main__":
    main()
