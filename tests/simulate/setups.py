"""Small configurations, as the command line gives them."""

from __future__ import annotations

import functools
from pathlib import Path

from torch import nn

from parallelizer.child.children import in_children
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.all_checks import check_followed
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.follow.flow import failure_alone, follow
from parallelizer.simulate.record.trace import Trace, trace
from parallelizer.styles.application import Program
from parallelizer.styles.float8.recipes import TORCHAO_NAMES

CONFIGS = Path(__file__).parent / "configs"
LLAMA = (
    "model.dim=64",
    "model.hidden_dim=128",
    "model.max_seq_len=256",
    "train.seq_len=32",
    "train.batch_size=8",
)
GPT = (
    f"hydra.searchpath=[file://{CONFIGS}]",
    "model=gpt",
    f"plan={CONFIGS}/plans/gpt.yaml",
    "train.seq_len=32",
    "train.batch_size=8",
)
FAILING = (
    *GPT[:1],
    "model=failing",
    f"plan={CONFIGS}/plans/failing.yaml",
    "train.seq_len=8",
    "train.batch_size=8",
)
STACK = (*GPT[:1], "model=stack", f"plan={CONFIGS}/plans/stack.yaml", "train.seq_len=8", "train.batch_size=8")
_MIXTURE = (
    "model.config.hidden_size=64", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=2",
    "train.batch_size=8",
)  # fmt: skip
MIXTURES = {
    "hf_qwen3_moe": (*_MIXTURE, "model.config.head_dim=16", "model.config.moe_intermediate_size=32"),
    "hf_mixtral": (*_MIXTURE, "model.config.intermediate_size=32"),
}
"""Mixtures of experts of transformers, small."""

EXPERTS_IN_FLOAT8 = "rules=['model.layers.*.mlp.experts: {{style: float8, recipe: {}}}']"
CHECKPOINT = 'rules=["{}.*: checkpoint"]'
FLOAT8_RECIPES = tuple(TORCHAO_NAMES)
GATHERED = "layers.*: {style: fsdp, gather: float8}"
CAST = (
    "layers.*.{attention,feed_forward}: {style: prepare-input, input: {x: stream -> replicate}, cast: float8}"
)
SELECTIVE = 'rules=["{}.*: {{style: checkpoint, mode: selective}}"]'


def in_float8(recipe: str, *rules: str) -> str:
    """The override that puts the linears of a Llama's layers in float8, with more rules beside it."""
    linears = "layers.*.{attention.w[qkvo],feed_forward.w[123]}"
    every = (f"{linears}: {{style: float8, recipe: {recipe}}}", *rules)
    return f"rules=[{','.join(map(repr, every))}]"


def setup_of(*overrides: str) -> Setup:
    """What these overrides ask for."""
    return from_config(*compose_config(overrides))


def llama(*overrides: str) -> Setup:
    """The recipe's model, small."""
    return setup_of(*LLAMA, *overrides)


def failing(kind: str, *overrides: str) -> Setup:
    """A small model, cheap to trace, whose layers do something that fake tensors do not take; `fine` ones do not."""
    return setup_of(*FAILING, f"model.kind={kind}", *overrides)


def stack(*overrides: str) -> Setup:
    """Lists of small layers, cheap to trace."""
    return setup_of(*STACK, *overrides)


def traced(setup: Setup, rank: int = 0, *, fold: bool = False) -> Trace:
    """The dry run of a setup."""
    model = setup.build_model()
    return trace(setup.compile(model), model, setup.recipe(), rank, fold=fold)


@functools.cache
def traced_llama(*overrides: str) -> Trace:
    """The dry run of the recipe's model, once for all tests of a process that look at it."""
    return traced(llama(*overrides))


def followed_findings(setup: Setup, program: Program, model: nn.Module) -> tuple[Diagnostic, ...]:
    """What following a step of a setup's program finds, as it is found."""
    recipe = setup.recipe()
    given = program, model, recipe.workload, recipe.loss
    [flow] = in_children([(follow, *given)])
    alone = None if flow.failure is None else in_children([(failure_alone, *given)])[0]
    return check_followed(Followed(program, model, flow, alone))
