"""From a composed Hydra configuration to what the compiler needs: plan, mesh, style defaults, workload, model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from parallelizer import options
from parallelizer.diagnostics import Diagnostic, PlanError, Span
from parallelizer.origins import Origins
from parallelizer.parse import Findings, find_along, load, parse_layouts, parse_rule_text
from parallelizer.plan import AXES, Mesh, Option, Plan, Rule, StyleDefaults
from parallelizer.source import MappingNode, Node, Scalar, SequenceNode
from parallelizer.styles.declare import STYLES
from parallelizer.suggest import nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallelizer.compiler import Program
    from parallelizer.simulate.trace import Recipe
    from parallelizer.workload import Workload

MODEL_KEYS = ("plan", "batch", "loss", "tiny")
"""The keys of a model config that are ours; the others are `_target_` and its arguments."""


def config_folder() -> Path:
    """The folder of the shipped configuration: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def load_plan(name: str, folders: Sequence[str | Path] = ()) -> Plan:
    """Read a plan by name (`plans/<name>.yaml` in `folders`, then in the shipped configuration) or by path.

    Raises PlanError with every mistake of form in it and in what it extends.
    """
    return load(name, find_along([*(Path(f) for f in folders), config_folder()]))


@dataclass(frozen=True)
class Setup:
    """What a configuration asks for. `model` is the model's config, `loss` the dotted path of its loss."""

    plan: Plan
    mesh: Mesh
    defaults: Mapping[str, StyleDefaults]
    workload: Workload
    model: Mapping[str, Any]
    loss_path: str
    device: str
    optim: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    hardware: Mapping[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins)

    def build_model(self) -> nn.Module:
        """The configured model on the meta device. Raises PlanError when it cannot be built."""
        import torch
        from hydra.errors import HydraException
        from hydra.utils import instantiate

        arguments = {k: v for k, v in self.model.items() if k not in MODEL_KEYS}
        try:
            with torch.device("meta"):
                model = instantiate(arguments, _convert_="all")
        except HydraException as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise PlanError(
                [Diagnostic("model-build", f"the model cannot be built: {reason}", self.origins.span("model._target_"),
                            f"check model._target_={arguments.get('_target_')} and its arguments")]
            ) from None
        built: nn.Module = model
        return built

    def loss(self) -> Callable[..., Any]:
        """The loss function. Raises PlanError when the path names none."""
        from hydra.utils import get_method

        try:
            function: Callable[..., Any] = get_method(self.loss_path)
            return function
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise PlanError([Diagnostic("model-build", f"model.loss={self.loss_path} is no function: {reason}",
                                        self.origins.span("model.loss"))]) from None

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The configured optimizer: `optim._target_` is a function of the model and the `optim` config. A fused AdamW where nothing
        is configured."""
        import torch
        from hydra.utils import get_method

        if not self.optim.get("_target_"):
            return torch.optim.AdamW(model.parameters(), fused=True)
        optimizer: torch.optim.Optimizer = get_method(self.optim["_target_"])(model, self.optim)
        return optimizer

    def recipe(self) -> Recipe:
        """What a dry run of one step needs beside the program."""
        from parallelizer.simulate.trace import Recipe

        return Recipe(self.workload, self.loss(), self.build_optimizer, self.clip)

    def compile(self, model: nn.Module) -> Program:
        """Compile the plan for the model. Raises PlanError."""
        from parallelizer.compiler import compile as compile_plan

        return compile_plan(self.plan, model, self.mesh, workload=self.workload, defaults=self.defaults)


def from_config(config: DictConfig, origins: Origins | None = None) -> Setup:
    """Read a composed configuration. Raises PlanError with every mistake in it, plan files included; nothing is built."""
    origins = origins or Origins(folders=[config_folder()])
    findings = Findings()
    _imports(config, origins)
    mesh = _mesh(config, origins, findings)
    defaults = _style_defaults(config, origins, findings)
    layouts = parse_layouts(_mapping(config, "parallel.layouts", origins), findings)
    rules: list[Rule] = []
    for key in ("parallel.rules", "rules"):
        rules.extend(_rules(config, key, origins, findings))
    plan = _plan(config, origins, findings)
    model = _model(config, origins, findings)
    workload = _workload(config, model, origins, findings)
    if findings.items or plan is None or workload is None or mesh is None:
        raise PlanError(findings.items)
    plan = plan.with_rules(tuple(rules)).with_layouts(layouts)
    device = _device(config, origins)
    optim, hardware = (_plain(config, key) for key in ("optim", "hardware"))
    clip = OmegaConf.select(config, "train.clip")
    return Setup(plan, mesh, defaults, workload, model, str(model["loss"]), device, optim, clip, hardware, origins)


def _plain(config: DictConfig, key: str) -> dict[str, Any]:
    node = config.get(key)
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else {}
    return {str(k): v for k, v in plain.items()} if isinstance(plain, dict) else {}


def _imports(config: DictConfig, origins: Origins) -> None:
    for index, name in enumerate(config.get("imports") or []):
        try:
            importlib.import_module(str(name))
        except ImportError as error:
            raise PlanError([Diagnostic("import-failed", f"cannot import {name}: {error}", origins.span(f"imports.{index}")
                                        or origins.span("imports"))]) from None


def _plan(config: DictConfig, origins: Origins, findings: Findings) -> Plan | None:
    name = config.get("plan")
    span = origins.span("plan")
    if not isinstance(name, str) or not name:
        findings.error("plan-not-found", "no plan is chosen", span or Span("<configuration>"), "set plan=<name or path>")
        return None
    try:
        return load(name, find_along([*origins.folders, config_folder()]), span)
    except PlanError as error:
        findings.items.extend(error.diagnostics)
        return None


def _mesh(config: DictConfig, origins: Origins, findings: Findings) -> Mesh | None:
    sizes, spans = {}, {}
    written = OmegaConf.select(config, "parallel.mesh")
    for axis, size in (written or {}).items():
        span = origins.span(f"parallel.mesh.{axis}") or Span("<configuration>")
        if axis not in AXES:
            near = nearest(str(axis), AXES, 1)
            hint = (f"did you mean {near[0]}? " if near else "") + f"the axes are {', '.join(AXES)}"
            findings.error("unknown-axis", f"there is no axis {axis!r}", span, hint)
        elif isinstance(size, bool) or not isinstance(size, int) or size < 1:
            findings.error("wrong-type", f"the size of {axis} is {size!r}", span, "a size is a whole number from 1")
        else:
            sizes[axis], spans[axis] = size, span
    return Mesh(sizes, spans) if not findings.items else None


def _style_defaults(config: DictConfig, origins: Origins, findings: Findings) -> dict[str, StyleDefaults]:
    defaults = {}
    for name, written in (OmegaConf.select(config, "parallel.styles") or {}).items():
        key = f"parallel.styles.{name}"
        span = origins.span(key) or Span("<configuration>")
        declaration = STYLES.get(str(name))
        if declaration is None:
            near = nearest(str(name), STYLES, 1)
            findings.error("unknown-style", f"there is no style {name!r}", span,
                           (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(STYLES)}")
            continue
        if written is None:
            defaults[str(name)] = StyleDefaults(off=True)
            continue
        if not isinstance(written, DictConfig):
            findings.error("wrong-type", f"the defaults of {name} are {written!r}", span, "a map of options, or null to switch it off")
            continue
        read = {}
        for option, value in written.items():
            kind = declaration.options.get(str(option))
            at = origins.span(f"{key}.{option}") or span
            if kind is None:
                near = nearest(str(option), declaration.options, 1)
                findings.error("unknown-option", f"{name} has no option {option!r}", at,
                               (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(declaration.options)}")
            elif value is not None:
                read[str(option)] = Option(options.parse(kind, _node(value, at), findings), at)
        defaults[str(name)] = StyleDefaults(read)
    return defaults


def _rules(config: DictConfig, key: str, origins: Origins, findings: Findings) -> list[Rule]:
    written = OmegaConf.select(config, key)
    raw = OmegaConf.to_container(written, resolve=False) if written is not None else []
    span = origins.span(key) or Span("<configuration>")
    if not isinstance(raw, list):
        findings.error("wrong-type", f"{key} takes a list of rules", span, f"{key}=[\"layers.*: checkpoint\"]")
        return []
    rules: list[Rule] = []
    for index, item in enumerate(raw):
        at = origins.span(f"{key}.{index}") or span
        if isinstance(item, dict) and len(item) == 1:
            import yaml

            item = yaml.safe_dump(item, default_flow_style=True, width=10_000).strip()[1:-1]
        if not isinstance(item, str):
            findings.error("wrong-type", f"{item!r} is not a rule", at, 'a rule is a text: "layers.*: checkpoint"')
            continue
        try:
            rules.extend(parse_rule_text(item, at.file, _inside(at, item)))
        except PlanError as error:
            findings.items.extend(error.diagnostics)
    return rules


def _inside(at: Span, text: str) -> Span:
    """Where a rule's text begins inside the override or the quoted scalar that holds it."""
    if at.file.startswith("<override "):
        start = at.file.find(text, len("<override "))
        return Span(at.file, 1, start - len("<override ") + 1 if start >= 0 else at.column, at.end_column)
    quote = 1 if at.end_column - at.column == len(text) + 2 else 0
    return Span(at.file, at.line, at.column + quote, at.end_column)


def _model(config: DictConfig, origins: Origins, findings: Findings) -> dict[str, Any]:
    model = OmegaConf.to_container(config.model, resolve=True) if isinstance(config.get("model"), DictConfig) else None
    if not isinstance(model, dict):
        findings.error("model-build", "no model is configured", Span("<configuration>"), "set model=<name>")
        return {}
    for key in ("_target_", "batch", "loss"):
        if not model.get(key):
            findings.error("model-build", f"the model config has no `{key}`", origins.span("model") or Span("<configuration>"),
                           "a model config says _target_ with its arguments, plan, batch and loss")
    return {str(k): v for k, v in model.items()}


def _workload(config: DictConfig, model: dict[str, Any], origins: Origins, findings: Findings) -> Workload | None:
    from parallelizer.workload import Entry, Workload

    entries = {}
    for name, entry in (model.get("batch") or {}).items():
        try:
            shape = tuple(entry["shape"])
            low, high = entry.get("range") or (0, 2)
            entries[str(name)] = Entry(shape, str(entry.get("dtype", "int64")), (int(low), int(high)))
        except (TypeError, KeyError, ValueError, AttributeError):
            findings.error("wrong-type", f"model.batch.{name} does not describe a tensor",
                           origins.span(f"model.batch.{name}") or Span("<configuration>"),
                           "write {shape: [batch, sequence], dtype: int64, range: [0, 256]}")
    sizes, spans = {}, {}
    for key in ("batch_size", "seq_len", "accumulate"):
        value = OmegaConf.select(config, f"train.{key}", default=1)
        span = origins.span(f"train.{key}") or Span("<configuration>")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            findings.error("wrong-type", f"train.{key} is {value!r}", span, "a whole number from 1")
            continue
        sizes[key], spans[key] = value, span
    return Workload(entries, **sizes, spans=spans) if len(sizes) == 3 else None


def _device(config: DictConfig, origins: Origins) -> str:
    device = str(config.get("device", "auto"))
    if device not in ("auto", "cpu", "cuda"):
        raise PlanError([Diagnostic("unknown-value", f"there is no device {device!r}", origins.span("device"), "auto, cpu or cuda")])
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _mapping(config: DictConfig, key: str, origins: Origins) -> MappingNode:
    written = OmegaConf.select(config, key) or {}
    raw = OmegaConf.to_container(written, resolve=False) if written else {}
    entries = []
    for name, value in (raw if isinstance(raw, dict) else {}).items():
        span = origins.span(f"{key}.{name}") or Span("<configuration>")
        entries.append((Scalar(str(name), False, span), _node(value, span)))
    return MappingNode(tuple(entries), Span("<configuration>"))


def _node(value: Any, span: Span) -> Node:
    """A value that YAML has already given a type, as the node it came from."""
    if isinstance(value, DictConfig | dict):
        return MappingNode(tuple((Scalar(str(k), False, span), _node(v, span)) for k, v in value.items()), span)
    if OmegaConf.is_list(value) or isinstance(value, list):
        return SequenceNode(tuple(_node(v, span) for v in value), span)
    if isinstance(value, bool):
        return Scalar("true" if value else "false", True, span)
    return Scalar(str(value), not isinstance(value, str), span)
