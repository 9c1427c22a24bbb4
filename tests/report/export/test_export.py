"""The exported code does what the compiled plan does: the same placements and the same collectives, entry by
entry."""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.child.children import in_children
from parallelizer.compiler.observe.module_calls import observe
from parallelizer.compiler.observe.running_module import Running
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry as BatchEntry
from parallelizer.language.workload import Workload
from parallelizer.mesh import build_mesh, data_groups
from parallelizer.report.export.export import export
from parallelizer.report.export.own_styles import imports_this_package
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import materialize
from parallelizer.runtime.state import ParallelState, remember
from parallelizer.runtime.step import train_step
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.simulate.record.ledger import Collective, Ledger
from parallelizer.simulate.record.trace import local_parts
from parallelizer.styles import fsdp_partial
from parallelizer.styles.application import Program
from parallelizer.torch_private import FakeTensors
from tests import findings
from tests.chosen import marks_at
from tests.ranks import run_ranks
from tests.report import own_styles
from tests.simulate.setups import CAST, GATHERED, in_float8
from tests.simulate.setups import llama as small_llama
from tests.styles.models import (
    Alibi,
    Around,
    ConfiguredAttention,
    Conv1DMlp,
    FusedExperts,
    GroupedAttention,
    Scaled,
)

PRESETS = sorted(
    p.stem
    for p in (config_folder() / "parallel").glob("*.yaml")
    if p.stem != "base" and not p.stem.startswith("pp")
)
QUICK = {("single", "llama"), ("fsdp2_tp2", "llama"), ("cp2_tp2", "llama"), ("hsdp2x16_tp8", "llama_tp")}

Placements = dict[str, tuple[Any, ...]]
Result = tuple[Placements, tuple[Collective, ...]]


# --- the shipped presets and plans ------------------------------------------------------------------


def shipped(preset: str, plan: str, *overrides: str) -> Any:
    mesh = from_config(
        *compose_config([f"parallel={preset}", "train.batch_size=2048", "train.seq_len=2048"])
    ).mesh
    rows = mesh.size("dp_replicate", "dp_shard")
    fixed = ["model.dim=64", "model.hidden_dim=64", f"train.batch_size={rows}", "train.seq_len=64"]
    return from_config(*compose_config([f"parallel={preset}", f"plan={plan}", *fixed, *overrides]))


@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        pytest.param(p, name, marks=() if (p, name) in QUICK else pytest.mark.slow)
        for p in PRESETS
        for name in (("llama", "llama_tp") if "tp" in p else ("llama",))  # without tp the two are one
    ],
)
def test_a_shipped_plan_places_and_sends_the_same(preset: str, plan: str) -> None:
    setup = shipped(preset, plan)
    model = setup.build_model()
    program = setup.compile(model)
    code = export(program, model, observe(model, setup.workload))
    compiled, exported = both(program, model, code, setup.workload, setup.loss())
    assert exported == compiled
    # And on torch's public names alone, but for the runtime of context parallelism, which it owns up to.
    split = setup.mesh.sizes["cp"] > 1
    expected = {"torch"} | ({"parallelizer"} if split else set())
    assert {m.split(".")[0] for m in imports(code)} - sys.stdlib_module_names == expected
    assert ("imports its runtime from the package parallelizer" in " ".join(code.split())) == split
    assert private_names(code) == set()


def test_the_code_runs_where_this_package_is_not_installed(tmp_path: Path) -> None:
    setup = shipped("fsdp2_tp2", "llama_tp", "rules=['layers.*: checkpoint']")
    model = setup.build_model()
    (tmp_path / "parallel.py").write_text(export(setup.compile(model), model, observe(model, setup.workload)))
    source = Path(__file__).resolve().parents[3] / "parallelizer" / "models" / "llama.py"
    (tmp_path / "llama.py").write_text(source.read_text())
    (tmp_path / "main.py").write_text(MAIN)
    done = subprocess.run(
        [sys.executable, "-I", "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["64", "DTensor"]


MAIN = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "parallelizer":
            raise ImportError("parallelizer is not installed here")

sys.meta_path.insert(0, Absent())
sys.path.insert(0, ".")
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import llama, parallel

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
torch.manual_seed(0)
model = llama.Llama(vocab_size=64, dim=64, n_layers=2, n_heads=8, n_kv_heads=8, hidden_dim=64, max_seq_len=32)
parallel.parallelize(model, parallel.build_mesh("cpu"))
logits = model(torch.zeros(1, 32, dtype=torch.int64))
logits.sum().backward()
print(logits.shape[-1], type(model.norm.weight.grad).__name__)
"""


# --- styles that the shipped plans do not use --------------------------------------------------------


class Gated(nn.Module):
    """A gated layer whose gate and value are one matrix, beside a table of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.width = dim
        self.norm = nn.LayerNorm(dim)
        self.both = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.empty(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
        gate, value = self.both(self.norm(x)).split(self.width, -1)
        return x + self.down(F.silu(gate) * value) * self.scale


class Stack(nn.Module):
    """Layers called by keyword, one of them of another width, and an output that is the embedding again."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleDict({str(i): Gated(16) for i in range(layers)})
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers.values():
            x = layer(x=x)
        return self.head(x)


WORKLOAD = Workload(
    {"input_ids": BatchEntry(("batch", "sequence")), "labels": BatchEntry(("batch", "sequence"))}, 4, 8
)


def token_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


CASES: dict[str, tuple[dict[str, int], Sequence[str], dict[str, Any]]] = {
    "packed and divided": (
        {"tp": 2},
        [
            "layers.*.both: {style: colwise, packed: [1, 1]}",
            "layers.*: {style: shard-params, params: {scale: replicate}, divide: [width]}",
            "layers.*.down: rowwise",
        ],
        {},
    ),
    "parameters on local shards": (
        {"tp": 2},
        [
            "layers.*.norm: {style: replicate, grad: replicate}",
            "layers.{1..3}.down: replicate",
            "layers.0.down: {style: shard-params, params: {weight: shard(0), bias: shard(0)}, input: replicate,"
            " output: shard(-1) -> replicate}",
        ],
        {},
    ),
    "inputs by keyword": (
        {"tp": 2},
        [
            "layers.*: {style: prepare-io, input: {x: replicate -> shard(1)}, output: shard(1) -> replicate,"
            " local_input: true, grad: partial}"
        ],
        {},
    ),
    "parts of an input's gradient": (
        {"tp": 2},
        ["layers.*: {style: prepare-input, input: {x: replicate -> replicate}, local: true, grad: partial}"],
        {},
    ),
    "outputs, some layers, one parameter under two names": (
        {"tp": 2},
        [
            "layers.{0,2}: {style: prepare-output, output: replicate -> replicate}",
            "layers.3.down: {style: colwise, output: replicate}",
            "embed: {style: colwise, output: replicate}",
            "head: {style: rowwise, input: replicate}",
        ],
        {},
    ),
    "fsdp by the largest dimension, small ones whole": (
        {"dp_shard": 4},
        ['"": fsdp', "layers.*: fsdp"],
        {
            "shard_dim": "largest",
            "min_size": 64,
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "reshard_after_forward": False,
        },
    ),
    "units inside units, offloaded, replicated": (
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        [
            '"": fsdp',
            "layers.*: fsdp",
            "layers.{0,1}.both: [fsdp, {style: colwise, output: replicate}]",
            "layers.{2,3}.both: {style: colwise, output: replicate}",
            "layers.{0,1}.down: {style: rowwise, input: replicate}",
        ],
        {"cpu_offload": True},
    ),
    "selective checkpoints": (
        {"dp_shard": 2},
        [
            '"": fsdp',
            "layers.{0..2..2}: {style: checkpoint, mode: selective}",
            "layers.1: {style: checkpoint, mode: alternate}",
        ],
        {},
    ),
    "replicas only": ({"dp_replicate": 4}, ['"": fsdp'], {}),
    "a copied output, a term of a value": (
        {"tp": 2},
        [
            "layers.*.down: {style: rowwise, input: replicate, own: true}",
            "layers.*.norm: {style: replicate, value: partial}",
        ],
        {},
    ),
}


@pytest.mark.parametrize(
    ("name", "observed"),
    [
        pytest.param(
            name, observed, id=f"{'observed' if observed else 'unobserved'}-{name}", marks=marks_at(place)
        )
        for place, (observed, name) in enumerate(itertools.product([True, False], CASES))
    ],
)
def test_other_styles_place_and_send_the_same(name: str, observed: bool) -> None:
    mesh, rules, options = CASES[name]
    with torch.device("meta"):
        model = Stack()
    program = compiled(model, mesh, rules, options)
    code = export(program, model, observe(model, WORKLOAD) if observed else None)
    one, other = both(program, model, code, WORKLOAD, token_loss)
    assert other == one
    assert private_names(code) <= {"_fields"}
    assert "parallelizer" not in {m.split(".")[0] for m in imports(code)}


MODULES = {
    "a linear that is stored the other way round": (Conv1DMlp, ["inner.up: colwise", "inner.down: rowwise"]),
    "parts that a configuration knows": (
        ConfiguredAttention,
        [
            "inner.qkv: {style: colwise, packed: [config.heads, config.kv_heads, config.kv_heads]}",
            "inner.out: rowwise",
            "inner: {style: shard-params, divide: [config.heads, config.kv_heads]}",
        ],
    ),
    "a key-value head for two ranks": (
        lambda: GroupedAttention(4, 1),
        [
            "inner.q: colwise",
            "inner.[kv]: {style: colwise, replicate_kv: true}",
            "inner.out: rowwise",
            "inner.k_norm: replicate",
            "inner: {style: shard-params, divide_groups: [groups], replicate_kv: true}",
        ],
    ),
    "slices of a buffer": (
        Alibi,
        [
            "inner.qkv.*: colwise",
            "inner.out: rowwise",
            "inner: {style: shard-params, params: {slopes: shard(0), weigh: shard(0)}}",
        ],
    ),
    "slices of a buffer on DTensors": (
        Scaled,
        [
            "inner: {style: shard-params, params: {scale: shard(1)}, input: replicate -> shard(2), output: replicate}"
        ],
    ),
    "parts of one parameter of several": (
        FusedExperts,
        [
            "inner: [{style: shard-params, params: {gate_up: shard(1), down: shard(2)}, packed: {gate_up: [1, 1]}},"
            " {style: prepare-io, input: {x: replicate}, local_input: true, grad: partial, output: partial -> replicate}]"
        ],
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_other_modules_place_and_send_the_same(name: str) -> None:
    inner, rules = MODULES[name]
    with torch.device("meta"):
        model = Around(inner())
    program = compiled(model, {"tp": 2}, rules, {})
    code = export(program, model)
    one, other = both(program, model, code, WORKLOAD, token_loss)
    assert other == one
    assert "parallelizer" not in {m.split(".")[0] for m in imports(code)}


def test_repeated_layers_are_loops_and_others_are_not() -> None:
    with torch.device("meta"):
        model = Stack(6)
    rules = [
        "layers.*: fsdp",
        "layers.{0,2,4}.norm: replicate",
        "layers.3.both: {style: colwise, output: replicate}",
        '"": fsdp',
    ]
    code = export(compiled(model, {"dp_shard": 2, "tp": 2}, rules, {}), model)
    assert "for layer in model.layers.values():" in code
    assert "for i in range(0, 5, 2):" in code
    assert code.count("fully_shard(") == 2


def test_each_call_names_its_rule() -> None:
    setup = shipped("hsdp2x16_tp8", "llama")
    model = setup.build_model()
    program = setup.compile(model)
    code = export(program, model)
    for application in program:
        assert f"{application.rule.span.file}:{application.rule.span.line})" in code


def with_style(act: ParallelStyle) -> tuple[Program, nn.Module]:
    """A program whose one style is another's."""
    with torch.device("meta"):
        model = Stack()
    program = compiled(model, {"tp": 2}, ["layers.*.both: {style: colwise, output: replicate}"], {})
    replaced = tuple(dataclasses.replace(a, act=act) for a in program)
    return dataclasses.replace(program, applications=replaced), model


def test_a_style_of_the_users_own_is_imported_and_made_anew() -> None:
    program, model = with_style(own_styles.Scaled(3.0))
    workload = WORKLOAD
    code = export(program, model)
    placed, exported = both(program, model, code, workload, token_loss)
    assert exported == placed
    assert "from tests.report.own_styles import Scaled\n" in code and "Scaled(by=3.0)" in code
    assert imports(code) >= {"tests.report.own_styles"}
    assert "Imports styles of your own from tests.report.own_styles." in code
    assert "registered" not in code  # that module does without this package
    assert "Scaled()" in export(*with_style(own_styles.Scaled()))
    assert "Scaled(layouts=(Shard(-1),))" in export(*with_style(own_styles.Scaled(layouts=(Shard(-1),))))


class Inside:
    class Nested(own_styles.Scaled):
        """Not at the top of its module."""


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (own_styles.Forgetful(2.0), "does not keep its argument 'factor'"),
        (own_styles.Changing(2.0), "made again from its attributes is another"),
        (own_styles.Opaque(own_styles.Layouts()), "a Layouts cannot be written out"),
        (own_styles.SequenceParallel(), "the file has another SequenceParallel already"),
        (own_styles.Scaled(float("nan")), "a float cannot be written out"),
        (Inside.Nested(), "Inside.Nested cannot be imported from tests.report.export.test_export"),
    ],
)
def test_a_style_that_cannot_be_made_anew_is_refused_with_the_reason(act: Any, reason: str) -> None:
    program, model = with_style(act)
    with pytest.raises(PlanError) as raised:
        export(program, model)
    [found] = {(d.code, d.span, d.message) for d in raised.value.diagnostics}
    assert found[:2] == ("export-style", program.applications[0].rule.span) and found[2].endswith(reason)


def test_a_module_that_imports_this_package_is_known() -> None:
    assert imports_this_package(__name__) and not imports_this_package(own_styles.__name__)


def test_what_has_no_public_name_is_left_out_and_said() -> None:
    program, model = with_style(own_styles.Scaled())
    code = " ".join(export(dataclasses.replace(program, redistribute="min-cost"), model).split())
    assert "parallel.redistribute=min-cost is left out" in code
    assert "min-cost" not in export(program, model)


# --- both ways in one fake world -----------------------------------------------------------------------


def compiled(
    model: nn.Module, mesh: dict[str, int], rules: Sequence[str], options: Mapping[str, Any]
) -> Program:
    text = "\n".join(["version: 1", "rules:", *(f"  {rule}" for rule in rules)])
    return findings.compiled(text, lambda: model, Mesh(mesh), options={"fsdp": options})


def both(
    program: Program, model: nn.Module, code: str, workload: Workload, loss: Any
) -> tuple[Result, Result]:
    """Placements and ledger of the compiled plan and of the exported code."""
    (results,) = in_children([(_both, program, model, code, workload, loss)])
    return results


def _both(
    program: Program, model: nn.Module, code: str, workload: Workload, loss: Any
) -> tuple[Result, Result]:
    enter_fake_world(program.mesh.world_size, 0)
    names: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": _importing(program)}}
    exec(compile(code, "parallel.py", "exec"), names)
    ours, theirs = build_mesh(program.mesh, "cpu"), names["build_mesh"]("cpu")
    sizes = {n: theirs.size(i) for i, n in enumerate(theirs.mesh_dim_names)}
    assert {n: s for n, s in sizes.items() if s > 1} == {n: s for n, s in program.mesh.sizes.items() if s > 1}

    def exported(program: Program, model: nn.Module, mesh: Any) -> None:
        names["parallelize"](model, mesh)
        # The loss's mean over all ranks is train_step's own, which looks here for the groups.
        nothing: Any = SimpleNamespace(restore=lambda: None)
        remember(model, ParallelState(program, mesh, {}, nothing, tuple(data_groups(mesh))))

    # Exported code leaves the sums of partial gradients to FSDP: there is no public way to what it gathers.
    with mock.patch.object(fsdp_partial, "keep_partial", lambda unit: None):
        compiled = _recorded(program, copy.deepcopy(model), ours, apply, workload, loss)
    return compiled, _recorded(program, model, ours, exported, workload, loss)


def _importing(program: Program) -> Callable[..., Any]:
    def import_(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "parallelizer" and program.mesh.sizes["cp"] == 1:
            raise ImportError(f"{name} is not there")
        return __import__(name, *args)

    return import_


def _recorded(
    program: Program, model: nn.Module, mesh: Any, make: Callable[..., Any], workload: Workload, loss: Any
) -> Result:
    make(program, model, mesh)
    ledger = Ledger(program, mesh, Running(model))
    ledger.label(model)
    with FakeTensors():
        model.to_empty(device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        parts = local_parts(workload, program, mesh)
        with ledger:
            train_step(model, parts, loss, optimizer, 1.0)
        placements = {name: _placement(param) for name, param in model.named_parameters()}
    return placements, tuple(ledger.entries)


def _placement(param: Tensor) -> tuple[Any, ...]:
    if not isinstance(param, DTensor):
        return tuple(param.shape), str(param.dtype), ()
    by_axis = zip(param.device_mesh.mesh_dim_names or (), map(str, param.placements), strict=True)
    return tuple(param.to_local().shape), str(param.dtype), tuple(by_axis)


# --- what the code mentions ------------------------------------------------------------------------------


def imports(code: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def private_names(code: str) -> set[str]:
    """Names and attributes that begin with an underscore, and parts of modules that do; but those of Python's data model."""
    tree = ast.parse(code)
    names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name)
    }
    names |= {part for module in imports(code) for part in module.split(".")}
    return {n for n in names if n.startswith("_") and n != "_" and not n.endswith("__")}


def test_options_of_context_parallelism_are_written_out() -> None:
    style = "++parallel.styles.context-parallel."
    code = code_of(small_llama("parallel=cp4", f"{style}method=ulysses-ring", f"{style}ulysses_degree=2"))
    assert 'ContextOptions(method="ulysses-ring", ulysses_degree=2)' in code


# --- real ranks
# ----------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_on_real_ranks_every_gradient_is_the_same_to_the_bit() -> None:
    """Three exported plans in one start of four ranks: with FSDP, with helpers, and with the runtime of
    context parallelism."""
    presets = (("fsdp2_tp2", "llama"), ("fsdp2_tp2", "llama_tp"), ("cp2_tp2", "llama"))
    cases = [(setup, code_of(setup)) for setup in (shipped(p, plan) for p, plan in presets)]

    def worker() -> list[dict[str, bool]]:
        return [_same_gradients(setup, code) for setup, code in cases]

    for by_case in run_ranks(worker, 4):
        for same in by_case:
            assert len(same) > 20 and all(same.values()), [name for name, equal in same.items() if not equal]


FLOAT8 = {
    "rowwise": in_float8("rowwise"),
    "rowwise, padded": in_float8("rowwise, pad: true"),
    "gathered by fsdp": in_float8("tensorwise", GATHERED),
    "gathered by fsdp and tp": in_float8("tensorwise", GATHERED, CAST),
}


@pytest.mark.ranks
@pytest.mark.slow
def test_on_real_ranks_every_gradient_in_float8_is_the_same_to_the_bit() -> None:
    """Four exported plans in one start of four ranks. In one of them a rank has 60 tokens, which `pad` fills up."""
    pytest.importorskip("torchao", reason="float8 needs torchao")
    sizes = ("model.n_layers=2", "train.seq_len=60")
    cases = {
        name: (setup, code_of(setup))
        for name, rules in FLOAT8.items()
        for setup in [shipped("fsdp2_tp2", "llama", *(sizes if "padded" in name else sizes[:1]), rules)]
    }
    assert {name for name, (_, code) in cases.items() if ", pad=True)" in code} == {"rowwise, padded"}

    def worker() -> dict[str, dict[str, bool]]:
        return {name: _same_gradients(*case) for name, case in cases.items()}

    for by_case in run_ranks(worker, 4):
        for name, same in by_case.items():
            assert len(same) > 15 and all(same.values()), (
                name,
                [p for p, equal in same.items() if not equal],
            )


def code_of(setup: Any) -> str:
    model = setup.build_model()
    return export(setup.compile(model), model, observe(model, setup.workload))


def _same_gradients(setup: Any, code: str) -> dict[str, bool]:
    names: dict[str, Any] = {}
    exec(compile(code, "parallel.py", "exec"), names)
    mesh = build_mesh(setup.mesh, "cpu")
    ours, theirs = setup.build_model(), setup.build_model()
    apply(setup.compile(ours), ours, mesh)
    names["parallelize"](theirs, mesh)
    batch = setup.workload.example(2, setup.workload.seq_len)
    local = names["local_batch"](batch, mesh) if "local_batch" in names else batch
    for model in (ours, theirs):
        materialize(model, device="cpu", seed=3)
        total, _ = setup.loss()(model(local["input_ids"]), local)
        total.backward()
    others = dict(theirs.named_parameters())
    return {
        name: torch.equal(_local(param.grad), _local(others[name].grad))
        for name, param in ours.named_parameters()
    }


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
