"""Text from a model, a token at a time, in one rank of a world.

Unmodified models keep no keys and values of earlier tokens: the whole text is computed anew for each token. It is filled up
behind its end to a length that the mesh divides, of which there are few; a causal model does not see what is behind, and
whether it does is looked at once. Rank 0 draws, from the whole logits, and tells the others.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.diagnostics import Diagnostic, PlanError
from parallelizer.step import forward
from recipes.batches import local_device
from recipes.data.tokenizer import Tokenizer
from recipes.sampling_settings import Sampling
from recipes.settings import Settings

LEAST = 64
"""Lengths are multiples of it, or of the next number that the mesh divides."""

HELD = "�"


@dataclass(frozen=True)
class Job:
    """What every rank needs. `checkpoint` or `weights`, a folder of transformers', is where values come from; `prompt` are
    tokens, at least one, and at most `longest` are ever fed. `fill` are the entries beside `input_ids` that the model takes:
    zeros, or positions counted from 0.
    """

    setup: pz.Setup
    program: pz.Program
    settings: Settings
    sampling: Sampling
    tokenizer: Tokenizer
    prompt: Sequence[int]
    longest: int
    fill: Mapping[str, str]
    checkpoint: Path | None = None
    weights: Path | None = None

    def room(self, tokens: int) -> int:
        """The length that so many tokens are filled up to."""
        step = multiple(self.setup.mesh.sizes["cp"], self.setup.mesh.sizes["tp"])
        step *= math.ceil(LEAST / step)
        return min(-(-tokens // step) * step, self.longest)


def multiple(cp: int, tp: int) -> int:
    """What a length must divide by on a mesh."""
    return tp if cp == 1 else math.lcm(2 * cp, cp * tp)


def generate(job: Job) -> list[list[int]]:
    """One rank's part. Returns the tokens that were made for each text. Raises PlanError on all ranks."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    setup = job.setup
    mesh = pz.build_mesh(setup.mesh, setup.device)
    pz.seed_ranks(mesh, 0)
    device = local_device(setup.device)
    model = setup.build_model()
    whole = setup.whole_model(model)
    pz.apply(job.program, model, mesh)
    if job.checkpoint is not None:
        pz.materialize(model, device=device, seed=0, whole=whole, skip_saved=True)
        pz.load_checkpoint(job.checkpoint, model)
    elif job.weights is not None:
        pz.load_pretrained(model, job.weights, device=device)
    model.eval()
    text = _Text(job, model, mesh, device)
    text.check_causal()
    generator, leads = torch.Generator().manual_seed(job.sampling.seed), dist.get_rank() == 0
    return [_sample(job, text, generator, device, leads) for _ in range(job.sampling.samples)]


def _sample(
    job: Job, text: _Text, generator: torch.Generator, device: torch.device, leads: bool
) -> list[int]:
    tokens = list(job.prompt)
    stream = Stream(job.tokenizer, quiet=not leads)
    stream.show(tokens)
    while len(tokens) - len(job.prompt) < job.sampling.max_new_tokens and len(tokens) <= job.longest:
        logits = text.logits(tokens)
        drawn = torch.zeros((), dtype=torch.int64, device=device)
        if leads:
            drawn.fill_(draw(logits[: job.tokenizer.vocab_size].cpu(), job.sampling, generator))
        dist.broadcast(drawn, 0)
        if int(drawn) == job.tokenizer.separator:
            break
        tokens.append(int(drawn))
        stream.show(tokens)
    stream.end()
    return tokens[len(job.prompt) :]


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token for logits [V] on the CPU: the likeliest where the temperature is 0."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = -math.inf
    shares = scaled.softmax(0)
    if sampling.top_p is not None:
        ordered, places = shares.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        shares[places[before >= sampling.top_p]] = 0  # the likeliest has nothing before it, and stays
    return int(torch.multinomial(shares, 1, generator=generator))


class _Text:
    """The logits of a text's last token."""

    def __init__(self, job: Job, model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        self.job, self.model, self.mesh, self.device = job, model, mesh, device
        self.plan, self.tokens = job.program.plan, job.setup.workload.name_of("input_ids")

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], filler: int | None = None, rows: int | None = None) -> Tensor:
        """[V], float32, the same on every rank. Collective."""
        job, count = self.job, len(tokens)
        behind = [job.tokenizer.separator if filler is None else filler] * (job.room(rows or count) - count)
        ids = torch.tensor([[*tokens, *behind]])
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        fill = {n: places if what == "positions" else torch.zeros_like(ids) for n, what in job.fill.items()}
        batch = pz.shard_batch({self.tokens: ids, **fill}, self.plan, self.mesh, device=self.device)
        local = pz.shard_batch({self.tokens: places, **fill}, self.plan, self.mesh)[self.tokens][0]
        output = forward(self.model, batch)
        pz.restore_buffers(self.model)
        here = (local == count - 1).nonzero().flatten().tolist()
        if isinstance(output, DTensor) and any(p.is_shard(1) for p in output.placements):
            output = output.full_tensor()
        found = output[0, here[0] if here else 0]
        found = (found.full_tensor() if isinstance(found, DTensor) else found).float()
        if job.setup.mesh.sizes["cp"] > 1:  # one of its ranks has this token
            found = found if here else torch.zeros_like(found)
            dist.all_reduce(found, group=self.mesh.get_group("cp"))
        return found

    def check_causal(self) -> None:
        """Raises PlanError on all ranks where the logits of a token depend on what stands behind it."""
        tokens = list(self.job.prompt)[: self.job.longest - 1]
        if not tokens:
            return
        one, other = (self.logits(tokens, filler, len(tokens) + 1) for filler in (0, 1))
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-3):
            message = "the logits of a token change with what stands behind it: this model does not write from left to right"
            span = self.job.setup.origins.span("model._target_")
            raise PlanError(
                [Diagnostic("data-mismatch", message, span, "generate with a causal language model")]
            )


class Stream:
    """Writes a text as it grows, on a terminal without control characters: an untrained model draws them too."""

    def __init__(self, tokenizer: Tokenizer, *, quiet: bool) -> None:
        self.tokenizer, self.quiet, self.text, self.shown = tokenizer, quiet, "", 0

    def show(self, tokens: Sequence[int]) -> None:
        """Write what is new; a character that may yet be half there waits."""
        self.text = "" if self.quiet else self.tokenizer.decode(_visible(tokens, self.tokenizer.separator))
        if not self.text.endswith(HELD):
            self._write(self.text[self.shown :])

    def end(self) -> None:
        """Write the rest, and end the line."""
        self._write(self.text[self.shown :] + "\n" * (not self.quiet))

    def _write(self, text: str) -> None:
        if text:
            self.shown += len(text)
            sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()


def _visible(tokens: Sequence[int], separator: int) -> Sequence[int]:
    """Without the separator that begins a text which has no prompt."""
    return tokens[1:] if tokens and tokens[0] == separator else tokens


def printable(text: str) -> str:
    """With a terminal's control characters, but for line ends and tabs, as U+FFFD."""
    return "".join(c if c in "\n\t" or c.isprintable() else HELD for c in text)
