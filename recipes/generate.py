"""Text from what a run has learned: `python -m recipes.generate checkpoint=runs/a prompt="def main(" parallel=tp2`.

Model, plan and tokenizer are those of the checkpoint; the mesh is that of any preset. The text goes to stdout as it comes, all
else to stderr.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import parallelizer as pz
from parallelizer import interrupts, launch
from parallelizer.checkpoint.fit import misfits
from parallelizer.checkpoint.loading import Opened, open_checkpoint
from parallelizer.compose import compose_config
from parallelizer.diagnostics import Diagnostic, PlanError, Span
from parallelizer.hugging_face.recognise import is_pretrained
from parallelizer.hugging_face.source import weights_folder
from parallelizer.hugging_face.weights import look_up
from parallelizer.load import config_folder
from parallelizer.override_mistakes import OverrideSyntaxError
from parallelizer.position_reads import position_sources
from parallelizer.show import diagnostics as show_diagnostics
from recipes import outcome
from recipes.checkpoint import resolved
from recipes.data.entries import vocabulary_of
from recipes.data.tokenizer import Tokenizer, tokenizer_of, with_tokenizer
from recipes.own_configs import own_folders, own_words
from recipes.recorded import overrides_for
from recipes.sampling import Job, generate, multiple
from recipes.sampling_settings import read_sampling
from recipes.settings import read_settings
from recipes.summary import shown

UNBOUNDED = 1 << 20
"""Tokens that are fed to a model that says nothing of its longest text."""


@dataclass(frozen=True)
class Words:
    """A command line: what goes to Hydra, and two values that do not, because they are texts and paths as they stand."""

    overrides: tuple[str, ...]
    prompt: str = ""
    checkpoint: Path | None = None
    config_dirs: tuple[str, ...] = ()
    config_name: str = "generate"


def read_words(argv: Sequence[str]) -> Words:
    """The words behind the command's name. Quotes around a prompt, which Hydra would ask for, are left out."""
    known = own_words(["", "--config-name", "generate", *argv])
    found, overrides = {"prompt": "", "checkpoint": ""}, []
    for word in known.rest:
        key, is_one, value = word.lstrip("+").partition("=")
        if is_one and key in found:
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[key] = value[1:-1] if quoted else value
        else:
            overrides.append(word)
    path = found["checkpoint"] if found["checkpoint"] not in ("", "null") else None
    checkpoint = Path(path).expanduser() if path else None
    folders = tuple(own_folders(["", *argv]))
    return Words(tuple(overrides), found["prompt"], checkpoint, folders, known.config_name)


def prepare(words: Words, folder: Path) -> Job:
    """Everything that can be checked before a rank starts; what a checkpoint tells is laid out in `folder`, which is empty.

    Raises PlanError and OverrideSyntaxError.
    """
    opened, chosen = _stored(words, folder)
    config, origins = compose_config([*chosen, *words.overrides], words.config_dirs, words.config_name)
    setup, settings = pz.from_config(config, origins), read_settings(config, origins)
    sampling = read_sampling(config, origins)
    model = setup.build_model()
    fill = entries_to_fill(setup)
    tokenizer = tokenizer_of(with_tokenizer(config.data, setup.model).get("tokenizer"))
    multiple_of = multiple(setup.mesh.sizes["cp"], setup.mesh.sizes["tp"])
    longest = context_length(setup, model) // multiple_of * multiple_of
    prompt = tokens_of(words.prompt, tokenizer, vocabulary_of(model, setup), longest)
    program = _compiled(setup, model, multiple_of)
    job = Job(setup, program, settings, sampling, tokenizer, prompt, longest, fill)
    if opened is not None:
        found = misfits(model, None, opened.metadata, opened.about, Span(str(opened.path)))
        if found:
            raise PlanError(found)
        return replace(job, checkpoint=opened.path)
    weights = weights_folder(setup.model, origins)
    if weights is None:
        help_text = "checkpoint=FOLDER: a run's output folder, a checkpoint (step_<N>), or a saved model"
        raise PlanError([Diagnostic("checkpoint-not-found", "no checkpoint is given", None, help_text)])
    look_up(model, weights)
    return replace(job, weights=weights)


def _stored(words: Words, folder: Path) -> tuple[Opened | None, list[str]]:
    """The checkpoint that a command names, if it is one of a run's, and the overrides that choose its configuration."""
    if words.checkpoint is None:
        return None, []
    if (words.checkpoint / "config.json").is_file():
        return None, ["model=hf", f"model.name='{words.checkpoint}'"]
    span = Span(f"<override checkpoint={words.checkpoint}>", 1, 12)
    opened = open_checkpoint(resolved(words.checkpoint, span, "checkpoint"))
    record = opened.state
    if not isinstance(record, Mapping) or not {"config", "plan"} <= {*record}:
        return opened, []  # of somebody's own loop: the command says the model
    return opened, overrides_for(record, folder, words.overrides)


def _compiled(setup: pz.Setup, model: nn.Module, length: int) -> pz.Program:
    """The program for a text, whatever batches the model was trained with."""
    work = replace(setup.workload, batch_size=setup.mesh.size("dp_replicate", "dp_shard"), accumulate=1)
    return replace(setup, workload=replace(work, seq_len=length, spans={})).compile(model)


def entries_to_fill(setup: pz.Setup) -> dict[str, str]:
    """The batch entries that a model takes beside its tokens, and what they are filled with: `zeros` for the numbers of
    documents, `positions` for places. Raises PlanError `data-mismatch` for a model that is not given a text.
    """
    entries, plan = setup.workload.entries, setup.plan.batch
    text, tokens = ("batch", "sequence"), setup.workload.name_of("input_ids")
    found, other = {}, []
    for name, entry in entries.items():
        told = plan.get(name)
        if name in (tokens, setup.workload.name_of("labels")) and tuple(entry.shape) == text:
            continue
        if told is not None and told.make:
            continue
        if told is not None and told.documents:
            found[name] = "zeros"
        elif (entry.data or name) == "position_ids" and tuple(entry.shape) == text:
            found[name] = "positions"
        else:
            other.append(name)
    if other or tokens not in entries:
        what = f"takes {', '.join(other)}" if other else "takes no input_ids"
        message = f"the model {what}: text can be made from a model that takes input_ids, [batch, sequence], and gives logits"
        span = setup.origins.span("model.batch") or setup.origins.span("model._target_")
        raise PlanError([Diagnostic("data-mismatch", message, span, "choose a run of a language model")])
    return found


def context_length(setup: pz.Setup, model: nn.Module) -> int:
    """The longest text that a model takes: as a model of transformers says, or an argument `max_seq_len`, or the tables that it
    is seen to read by position.
    """
    said = [setup.model.get("max_seq_len")]
    if is_pretrained(model):
        said.append(getattr(model.config, "max_position_embeddings", None))
    given = [name for name, buffer in setup.plan.batch.items() if buffer.make == "positions"]
    said += [source.rows for source in position_sources(model, setup.workload, given)]
    return min((length for length in said if isinstance(length, int)), default=UNBOUNDED)


def tokens_of(prompt: str, tokenizer: Tokenizer, vocabulary: int | None, longest: int) -> list[int]:
    """A prompt's tokens, for an empty one the end of a document before. Raises PlanError `prompt-invalid`."""
    content = prompt.encode("utf-8", "surrogateescape")
    refused = tokenizer.refuses(content)
    tokens = [int(t) for t in tokenizer.encode([content])[0]] if content and not refused else []
    tokens = tokens or [tokenizer.separator]
    unknown = [t for t in tokens if vocabulary is not None and t >= vocabulary]
    if refused:
        why, help_text = f"cannot be read: {refused}", "give a text"
    elif unknown:
        why = f"has the {tokenizer.unit} {unknown[0]}, and the model's vocabulary is {vocabulary:,}"
        help_text = "data.tokenizer names the tokenizer that the model was trained with"
    elif len(tokens) > longest:
        why = f"has {len(tokens):,} {tokenizer.unit}s, and the model takes {longest:,} on this mesh"
        help_text = "give a shorter one"
    else:
        return tokens
    raise PlanError([Diagnostic("prompt-invalid", f"the prompt {why}", None, help_text)])


def run(words: Words, folder: Path, outside: launch.OutsideRanks | None) -> None:
    """Check, start or join the ranks, and say how it went. Raises PlanError, LaunchError and OverrideSyntaxError."""
    job = prepare(words, folder)
    setup, leads = job.setup, outside is None or outside.rank == 0
    if leads:
        origin = job.checkpoint or job.weights
        print(f"from {shown(origin) if origin else ''}, on {setup.mesh}", file=sys.stderr, flush=True)
    begun = time.monotonic()
    if outside is None:
        command = shlex.join(["-m", "recipes.generate", *sys.argv[1:]])
        world, limits = setup.mesh.world_size, job.settings
        launch.check_ranks(world, setup.device, max_cpu_ranks=limits.max_cpu_ranks, command=command)
        made = launch.start(
            generate,
            (job,),
            ranks=world,
            device=setup.device,
            start_timeout=limits.start_timeout,
            collective_timeout=limits.collective_timeout,
        )[0]
    else:
        if outside.world_size != setup.mesh.world_size:
            world = setup.mesh.world_size
            message = (
                f"the mesh has {world} ranks ({setup.mesh}), {outside.launcher} started {outside.world_size}"
            )
            span = setup.origins.span("parallel.mesh") or Span("<configuration>")
            raise PlanError([Diagnostic("world-size", message, span, "start as many ranks as the mesh has")])
        made = launch.join(
            generate, (job,), device=setup.device, collective_timeout=job.settings.collective_timeout
        )
    if leads:
        seconds = time.monotonic() - begun
        print(f"{sum(map(len, made))} {job.tokenizer.unit}s in {seconds:.1f} s", file=sys.stderr)


def main() -> None:
    """The command, for one process of a job."""
    torch.set_num_threads(1)  # ranks are forked from this process
    argv = sys.argv[1:]
    if {"-h", "--help"} & {*argv}:
        print(f"{__doc__}\n{(config_folder() / 'generate.yaml').read_text()}", end="")
        return
    with outcome.command_reported(), tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
        outside = launch.outside_ranks()
        try:
            words = read_words(argv)
            run(words, Path(folder), outside)
        except OverrideSyntaxError as error:
            show_diagnostics.write([error.diagnostic], sys.stderr)
            sys.exit(2)
    if outside is not None:
        launch.leave()


if __name__ == "__main__":
    interrupts.raise_again()
    main()
