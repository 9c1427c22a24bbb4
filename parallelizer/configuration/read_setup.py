"""From a composed Hydra configuration to a Setup: plan, mesh, style defaults, workload, model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from parallelizer.compiler.observe.families import families
from parallelizer.configuration import old_paths
from parallelizer.configuration.compose import compose_config, running_origins
from parallelizer.configuration.dotted_path import function_at
from parallelizer.configuration.limits import grown_key
from parallelizer.configuration.origins import Origins
from parallelizer.configuration.read_hardware import read_hardware
from parallelizer.configuration.read_mesh import read_mesh
from parallelizer.configuration.read_model import read_model, read_workload
from parallelizer.configuration.read_pipeline import check_rows, read_pipeline, without_pp
from parallelizer.configuration.read_routing import read_routing
from parallelizer.configuration.reading import Reading
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, quoted
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language import parse_options as options
from parallelizer.language.layout_names import layouts_in, unused_layouts
from parallelizer.language.load import find_along, load
from parallelizer.language.parse_plan import parse_layouts
from parallelizer.language.parse_rule import parse_rule_item, quoted_rules
from parallelizer.language.plan import REDISTRIBUTE, Option, Placement, Plan, Rule, StyleDefaults
from parallelizer.language.schema.preset_keys import PARALLEL_KEYS
from parallelizer.language.styles import STYLES
from parallelizer.language.yaml_nodes import MappingNode, SequenceNode

DEVICES = ("auto", "cpu", "cuda")


def from_config(
    config: DictConfig, origins: Origins | None = None, *, planless: bool = False, builds: bool = True
) -> Setup:
    """Read a composed configuration. With `planless`, no plan is read, and the setup's plan has no rules.

    Without `origins`, the origins of the running `@hydra.main` are used, or else the shipped folder. Raises
    PlanError with all errors in the configuration and its plan files. The modules of `imports` and `checks`
    are imported. A transformers model whose inputs are not tokens is built on meta, because its batch and loss
    are derived from it. With `builds=False` no model is built, and such a setup has the batch and loss of its
    model config, which are not those of its model.
    """
    old_paths.install()
    reading = Reading(config, origins or running_origins())
    _check_size(reading)
    _choose_dtype(config)
    _import(reading)
    _check_preset(reading)
    mesh = read_mesh(reading)
    pipeline = read_pipeline(reading, mesh)
    defaults = _style_defaults(reading)
    layouts = parse_layouts(reading.mapping("parallel.layouts"), reading.findings)
    rules = (*_rules(reading, "parallel.rules"), *_rules(reading, "rules"))
    plan = Plan("none", "<none>") if planless else _plan(reading)
    model = read_model(reading, builds)
    workload = read_workload(reading, model)
    if pipeline is not None and workload is not None:
        check_rows(reading, pipeline, mesh, workload)
    device = _device(reading)
    optim, hardware = reading.get("optim"), read_hardware(reading)
    clip = _clip(reading)
    redistribute = _redistribute(reading)
    routing = read_routing(reading, mesh)
    share = _max_unsharded(reading)
    _check(reading)
    if reading.findings.items or plan is None or workload is None:
        raise PlanError(reading.findings.items)
    warnings = _unused_layouts(reading, layouts, plan, rules)
    warnings += without_pp(reading, mesh)
    warnings += tuple(unused_layouts(plan.with_rules(rules)))
    plan = plan.with_rules(rules).with_layouts(layouts)
    return Setup(
        plan,
        mesh,
        defaults,
        workload,
        model,
        str(model["loss"]),
        device,
        optim=optim or {},
        clip=clip,
        hardware=hardware,
        origins=reading.origins,
        redistribute=redistribute,
        warnings=warnings,
        max_unsharded=share,
        pipeline=pipeline,
        routing=routing,
    )


def from_overrides(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config_name: str = "train"
) -> Setup:
    """The setup for a command line: `["model=mine", "parallel=tp2"]`, with `--config-dir` as `config_dir`.

    Raises PlanError with all errors in it.
    """
    return from_config(*compose_config(list(overrides), config_dir, config_name))


def import_styles(config: DictConfig, origins: Origins) -> None:
    """Import what `imports` names, for the styles that it registers. Raises PlanError."""
    _import(Reading(config, origins))


def _check_size(reading: Reading) -> None:
    """Raise PlanError for interpolations that come to too much; nothing has been filled in before."""
    grown = grown_key(OmegaConf.to_container(reading.config, resolve=False))
    if grown is not None:
        key, reason = grown
        message = f"{key} has {reason} after its interpolations are resolved"
        raise PlanError([Diagnostic("yaml-limit", message, reading.span(key), "write the value itself")])


def _choose_dtype(config: DictConfig) -> None:
    """Put a dtype in the place of `train.dtype: auto`, where interpolations and records of the run find it: bfloat16 on GPUs,
    float32 on CPUs. Commands that have not imported torch do not compute.
    """
    if OmegaConf.select(config, "train.dtype") != "auto":
        return
    device = OmegaConf.select(config, "device")
    if device == "auto" and (torch := sys.modules.get("torch")) is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    OmegaConf.update(config, "train.dtype", "bfloat16" if device == "cuda" else "float32")


def _clip(reading: Reading) -> float | None:
    """The bound of the gradient norm; None for none."""
    clip = reading.get("train.clip")
    if clip is None or (isinstance(clip, int | float) and not isinstance(clip, bool) and clip > 0):
        return clip
    reading.error(
        "wrong-type",
        f"train.clip is {quoted(str(clip))}",
        "train.clip",
        "a positive number, or null for none",
    )
    return None


def _redistribute(reading: Reading) -> str:
    mode = reading.get("parallel.redistribute", REDISTRIBUTE[0])
    if mode not in REDISTRIBUTE:
        message = f"there is no redistribution method {quoted(str(mode))}"
        help_text = did_you_mean(str(mode), REDISTRIBUTE, "there are")
        reading.error("unknown-value", message, "parallel.redistribute", help_text)
    return str(mode)


def _max_unsharded(reading: Reading) -> Option | None:
    """The share of parameters that may lie whole without a rule; None for any."""
    key = "parallel.max_unsharded"
    share = reading.get(key)
    if share is None:
        return None
    if isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1:
        return Option(float(share), reading.span(key))
    reading.error("wrong-type", f"{key} is {quoted(str(share))}", key, "a share from 0 to 1, or null for any")
    return None


def _import(reading: Reading) -> None:
    """Import the modules that register styles. Raises PlanError: without them nothing else can be judged."""
    names = reading.get("imports") or []
    for index, name in enumerate(names if isinstance(names, list) else [names]):
        try:
            importlib.import_module(str(name))
        except Exception as error:  # whatever a user's module raises
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = "" if isinstance(error, ModuleNotFoundError) else f" ({frame.filename}:{frame.lineno})"
            message = f"cannot import {name}: {type(error).__name__}: {error}{where}"
            help_text = "it is searched in the working directory and in the installed packages"
            span = reading.origins.span(f"imports.{index}") or reading.span("imports")
            raise PlanError([Diagnostic("import-failed", message, span, help_text)]) from None


def _check(reading: Reading) -> None:
    """Let the functions that `checks` names report what they find. Each takes the Reading.

    Those of a package that is not installed here are left out: what it would run cannot be run here either.
    """
    names = reading.get("checks") or []
    for index, name in enumerate(names if isinstance(names, list) else [names]):
        package = str(name).partition(".")[0]
        if package.isidentifier() and importlib.util.find_spec(package) is None:
            continue
        try:
            check = function_at(str(name))
        except Exception as error:  # whatever the import of a user's module raises
            message = f"checks names {quoted(str(name))}, which is not a function: {error}"
            span = reading.origins.span(f"checks.{index}") or reading.span("checks")
            help_text = "name a function that takes a parallelizer.configuration.reading.Reading"
            reading.findings.error("check-not-found", message, span, help_text)
            continue
        check(reading)


def _plan(reading: Reading) -> Plan | None:
    before = len(reading.findings.items)
    written = None if _model_names_no_plan(reading) else reading.get("plan")
    name = written or _own_plan(reading)
    if not isinstance(name, str | int) or name == "":
        if len(reading.findings.items) == before and not (not name and _no_own_plan(reading)):
            if _model_names_no_plan(reading):
                help_text = (
                    "`parallelizer init` proposes a plan; write `plan: <name or path>` into the model config, or set "
                    "plan=<name or path>"
                )
                span = reading.origins.file_of("model") or reading.span("model")
                reading.findings.error("plan-not-found", "the model config has no `plan`", span, help_text)
                return None
            message = "no plan is chosen" if not name else f"{quoted(str(name))} is not the name of a plan"
            reading.error("plan-not-found", message, "plan", "set plan=<name or path>")
        return None
    try:
        find = find_along([*reading.origins.folders, config_folder()])
        return load(str(name), find, reading.span("plan"))
    except PlanError as error:
        missing = not written and error.diagnostics[0].code == "plan-not-found"
        if not (missing and _no_own_plan(reading)):
            reading.findings.items.extend(error.diagnostics)
        return None


def _model_names_no_plan(reading: Reading) -> bool:
    """Whether the plan is to be the model config's, which names none."""
    plan = OmegaConf.to_container(reading.config, resolve=False).get("plan")  # type: ignore[union-attr]
    model = reading.get("model", resolve=False)
    return plan == "${model.plan}" and isinstance(model, Mapping) and not model.get("plan")


def _no_own_plan(reading: Reading) -> bool:
    """Report why a model of a family has no plan of its own; False for other models."""
    model = reading.get("model")
    found = (family.why_no_plan(model) for family in families()) if isinstance(model, Mapping) else ()
    why = next((w for w in found if w is not None), None)
    if why is not None:
        reading.error(why.code, why.message, why.key, why.help)
    return why is not None


def _own_plan(reading: Reading) -> str | None:
    """The plan of a model of a family whose config names none."""
    model = reading.get("model")
    names = (family.plan_name(model) for family in families()) if isinstance(model, Mapping) else ()
    return next((name for name in names if name is not None), None)


def _check_preset(reading: Reading) -> None:
    """Report unknown keys. Raises PlanError when the preset is no map: then there is nothing to read."""
    before = len(reading.findings.items)
    preset = reading.mapping("parallel", resolve=False)
    if len(reading.findings.items) > before:
        raise PlanError(reading.findings.items)
    for entry, _ in preset:
        if entry.text not in PARALLEL_KEYS:
            message = f"a preset has no key {quoted(entry.text)}"
            help_text = did_you_mean(entry.text, PARALLEL_KEYS, "it has")
            reading.unknown("unknown-key", message, f"parallel.{entry.text}", help_text)


def _style_defaults(reading: Reading) -> dict[str, StyleDefaults]:
    defaults = {}
    for name, node in reading.mapping("parallel.styles", resolve=False):
        style, key = name.text, f"parallel.styles.{name.text}"
        if style not in STYLES:
            help_text = did_you_mean(style, STYLES, "the styles are")
            reading.unknown("unknown-style", f"there is no style {quoted(style)}", key, help_text)
        elif isinstance(node, MappingNode):
            defaults[style] = StyleDefaults(_option_defaults(reading, style, node))
        elif reading.get(key) is None:
            defaults[style] = StyleDefaults(off=True)
        else:
            message = f"the defaults of {style} are a map of options, or null to switch it off"
            reading.error("wrong-type", message, key, f"as in ++{key}.<option>=<value>, or ++{key}=null")
    return defaults


def _option_defaults(reading: Reading, style: str, node: MappingNode) -> dict[str, Option]:
    """The options that a preset sets for a style; null leaves an option as it is."""
    declared = STYLES[style].options
    read = {}
    for name, _ in node:
        option, key = name.text, f"parallel.styles.{style}.{name.text}"
        if option not in declared:
            help_text = did_you_mean(option, declared, "it has")
            reading.unknown("unknown-option", f"{style} has no option {quoted(option)}", key, help_text)
        elif (value := reading.get(key)) is not None:
            parsed = options.parse(declared[option], reading.origins.node(key, value), reading.findings)
            read[option] = Option(parsed, reading.span(key))
    return read


def _rules(reading: Reading, key: str) -> tuple[Rule, ...]:
    """The rules of a preset or of the command line. They are read unresolved: interpolations are reported."""
    written = reading.get(key, resolve=False)
    if written is None:
        return ()
    node = reading.origins.node(key, written)
    if isinstance(node, SequenceNode):
        return tuple(rule for item in node.items for rule in parse_rule_item(item, reading.findings))
    meant = written if isinstance(written, str) and ": " in written else ""
    help_text = f"write each in quotes, in a list: {quoted_rules(key, meant)}"
    reading.error("wrong-type", f"{key} takes a list of rules", key, help_text)
    return ()


def _unused_layouts(
    reading: Reading, layouts: Mapping[str, Placement], plan: Plan, rules: Sequence[Rule]
) -> tuple[Diagnostic, ...]:
    """A warning for every layout that a preset or the command line sets and that the plan does not have."""
    values = [option.value for rule in rules for use in rule.uses for option in use.options.values()]
    known = set(plan.layouts).union(named.name for value in values for named in layouts_in(value))
    return tuple(
        Diagnostic(
            "unknown-layout",
            f"the plan has no layout {quoted(name)}",
            reading.origins.key_span(f"parallel.layouts.{name}"),
            did_you_mean(name, plan.layouts, "its layouts are"),
            "warning",
        )
        for name in layouts
        if name not in known
    )


def _device(reading: Reading) -> str:
    device = reading.get("device", "auto")
    if device not in DEVICES:
        help_text = did_you_mean(str(device), DEVICES, "the devices are")
        reading.error("unknown-value", f"there is no device {quoted(str(device))}", "device", help_text)
    return str(device)
