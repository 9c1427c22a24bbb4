"""How many architectures `init` writes a plan for that is proven as it stands: `python -m tests.init.survey`, and
`--unseen` and `--next` for architectures that nothing was tuned to, `--named` for those that are known to be hard.

For each architecture, in a process of its own: `init` proposes a plan in its usual time, and `verify` proves it, untouched, on
every mesh below in float64. A mesh whose axis the plan leaves out, and says why, has "left out" instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.init.architectures import CONF, NAMED, NAMES, NEXT, UNSEEN, overrides

MESHES: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "fsdp2": {"dp_shard": 2},
    "fsdp2_tp2": {"dp_shard": 2, "tp": 2},
    "pp2": {"pp": 2},
}
SECONDS = 60.0
"""The default of `init --seconds`."""
PAGE = Path("docs/init.md")
BEGIN, END = "<!-- {}:begin -->", "<!-- {}:end -->"


def survey(
    name: str, meshes: Sequence[str] = tuple(MESHES), seconds: float = SECONDS, unproven: bool = False
) -> dict[str, Any]:
    """One architecture: the plan that `init` writes in so many seconds, what was said of it, and how it went on these meshes.
    With `unproven` it is that of `init --unproven`, or of `init` if a proof of that one fails here.
    """
    before, began = _cpu(), time.perf_counter()
    text = _proposed(name, seconds, unproven)
    row = {
        "name": name,
        "seconds": time.perf_counter() - began,
        "cpu": _cpu() - before,
        "plan": text,
        "said": _said(text),
        "share": share(name, text),
        "unproven": unproven,
        "cells": _cells(name, text, meshes),
    }
    return survey(name, meshes, seconds) if unproven and not passed(row) else row


def _cpu() -> float:
    """The CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _proposed(name: str, seconds: float, unproven: bool) -> str:
    from parallelizer.commands import init as command

    given = overrides(name)
    arguments = argparse.Namespace(
        overrides=given, unproven=unproven, output=None, force=False, seconds=seconds
    )
    with contextlib.redirect_stderr(io.StringIO()):
        return command.propose(lambda more: _setup([*given, *more]), arguments).text


def configured(name: str, plan: Path) -> Any:
    """The setup of an architecture under a plan."""
    return _setup([*overrides(name), f"plan={plan}"])


def _setup(given: list[str]) -> Any:
    from parallelizer.configuration.compose import compose_config
    from parallelizer.configuration.read_setup import from_config

    return from_config(*compose_config(given, CONF))


def _cells(name: str, text: str, meshes: Sequence[str]) -> dict[str, str]:
    from parallelizer.diagnostics.diagnostic import PlanError
    from parallelizer.language.plan import Mesh

    cells: dict[str, str] = {}
    references: dict[tuple[int, int], Any] = {}
    with tempfile.TemporaryDirectory(prefix="init-") as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(text)
        setup = configured(name, path)
        for label, mesh in ((label, MESHES[label]) for label in meshes):
            if not set(mesh) <= {"dp_shard", *_axes(text)}:
                cells[label] = "left out"
                continue
            try:
                proven = _passes(dataclasses.replace(setup, mesh=Mesh(mesh)), references)
                cells[label] = "proven" if proven else "differs"
            except PlanError as error:
                cells[label] = f"refused: {error.diagnostics[0].code}"
            except Exception as error:
                cells[label] = f"failed: {type(error).__name__}"
    return cells


def _passes(setup: Any, references: dict[tuple[int, int], Any]) -> bool:
    """As `verify`; what is unsharded is run once for meshes that are given the same batch."""
    from parallelizer.proof.prove import prove_with
    from parallelizer.proof.runs import references_of
    from parallelizer.proof.tiny import shrink, subject_of

    setup.compile(setup.build_model())
    subject = subject_of(shrink(setup)[0])
    key = subject.rows, subject.seq_len
    if key not in references:
        references[key] = references_of(subject)
    return prove_with(subject, references[key]).passed


def share(name: str, text: str) -> float:
    """The share of all matrices' elements, embeddings included, that the plan splits over tp."""
    from parallelizer.compiler.compile import compile as compile_plan
    from parallelizer.language.plan import Mesh
    from parallelizer.styles.application import tensor_placements

    if "tp" not in _axes(text):
        return 0.0
    with tempfile.TemporaryDirectory(prefix="init-") as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(text)
        setup = configured(name, path)
    model = setup.build_model()
    program = compile_plan(setup.plan, model, Mesh({"tp": 2}), workload=setup.workload)
    placed = tensor_placements(program.applications)
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.ndim > 1}
    split = [n for n in sizes if any(placement.dim is not None for placement in placed.get(n, {}).values())]
    return sum(map(sizes.__getitem__, split)) / sum(sizes.values())


def _axes(text: str) -> set[str]:
    """The model axes that a plan's rules use, whatever its comments say of others."""
    rules = [line.partition("#")[0] for line in text.splitlines()]
    words = {"tp": ("colwise", "rowwise"), "cp": ("context-parallel", "axis: cp"), "pp": ("stage",)}
    return {
        axis for axis, styles in words.items() if any(style in rule for style in styles for rule in rules)
    }


def _said(text: str) -> list[str]:
    """The sentences above the rules, without the title."""
    lines = text.splitlines()
    head = lines[1 : next(i for i, line in enumerate(lines) if line.startswith("version"))]
    sentences: list[str] = []
    for line in head:
        if line.startswith("#   ") and sentences:
            sentences[-1] += " " + line[4:]
        else:
            sentences.append(line[2:])
    return sentences


def passed(row: dict[str, Any]) -> bool:
    """Whether nothing failed, and the plan splits something over tp that is proven. Of other meshes alone, anything proven."""
    cells = row["cells"]
    return all(c in ("proven", "left out") for c in cells.values()) and (
        cells["tp2"] == "proven" if "tp2" in cells else "proven" in cells.values()
    )


def counts(rows: list[dict[str, Any]]) -> str:
    """On how many meshes of each kind the plans are proven."""
    labels = [label for label in MESHES if any(label in row["cells"] for row in rows)]
    return ", ".join(
        f"{sum(row['cells'].get(label) == 'proven' for row in rows)} on {label}" for label in labels
    )


def table(rows: list[dict[str, Any]], option: str = "") -> str:
    """The page's part that is made."""
    command = f"`python -m tests.init.survey{option}`"
    ran = [row for row in rows if "not run" not in row["cells"].values()]
    some = (
        f"{len(ran)} of {len(rows)} architectures have been run"
        if len(ran) < len(rows)
        else f"Of {len(rows)} architectures"
    )
    text = [f"{some}, {'and ' * (len(ran) < len(rows))}these are proven: {counts(ran)}, by {command}.", ""]
    labels = [label for label in MESHES if any(label in row["cells"] for row in rows)]
    text.append(
        f"| architecture | split over tp | {' | '.join(labels)} | seconds (CPU) | left alone, in `init`'s words |"
    )
    text.append("|---|---:|" + "---|" * len(labels) + "---:|---|")
    for row in rows:
        said = "<br>".join(s.replace("|", "\\|").replace("<", "&lt;") for s in row["said"])
        share = f"{row['share']:.0%}" if "share" in row else ""
        cells = " | ".join(row["cells"].get(label, "") for label in labels)
        took = f"{row['seconds']:.0f} ({row['cpu']:.0f})" if row["seconds"] else ""
        text.append(f"| {row['name']} | {share} | {cells} | {took} | {said} |")
    return "\n".join(text)


def _child(name: str, meshes: Sequence[str], seconds: float, unproven: bool, queue: Any) -> None:
    try:
        queue.put(survey(name, meshes, seconds, unproven))
    except BaseException as error:
        cells = dict.fromkeys(meshes, f"failed: {error}")
        queue.put({**_NOTHING, "name": name, "cells": cells})


_NOTHING: dict[str, Any] = {"seconds": 0, "cpu": 0, "plan": "", "said": []}
"""A row of an architecture that was not looked at."""


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if all architectures pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all unless said")
    parser.add_argument(
        "--results", default="/tmp/init-survey.json", help="where rows are kept, to go on later"
    )
    parser.add_argument("--again", action="store_true", help="do not take rows from there")
    parser.add_argument("--unseen", action="store_true", help="the architectures that nothing was tuned to")
    parser.add_argument("--next", action="store_true", help="the 45 that were listed after those")
    parser.add_argument("--named", action="store_true", help="those that are known to be hard")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"the seconds that `init` has ({SECONDS:g}, its own default)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"put the table into {PAGE}; of names that are given, into a table of its own",
    )
    parser.add_argument(
        "--mesh",
        nargs="+",
        choices=MESHES,
        default=list(MESHES),
        help="meshes to prove on (all)",
    )
    parser.add_argument(
        "--unproven",
        action="store_true",
        help="the plans of `init --unproven`, whose proofs are those here; of `init` where one fails: half the work",
    )
    parser.add_argument("--kept", action="store_true", help="run nothing: what has no row there is `not run`")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in (*NAMES, *UNSEEN, *NEXT, *NAMED)]:
        parser.error(f"there is no architecture {', '.join(unknown)}")
    kept = Path(arguments.results)
    rows = {r["name"]: r for r in json.loads(kept.read_text())} if kept.exists() else {}
    lists = {"unseen": UNSEEN, "next": NEXT, "named": NAMED}
    part = next((part for part in lists if getattr(arguments, part)), "survey")
    names = arguments.names or lists.get(part, NAMES)
    context = multiprocessing.get_context("spawn")
    for name in names:
        if name in rows and set(arguments.mesh) <= set(rows[name]["cells"]) and not arguments.again:
            continue
        if arguments.kept:
            rows.setdefault(
                name, {**_NOTHING, "name": name, "cells": dict.fromkeys(arguments.mesh, "not run")}
            )
            continue
        queue = context.Queue()
        given = (name, arguments.mesh, arguments.seconds, arguments.unproven, queue)
        child = context.Process(target=_child, args=given)
        child.start()
        rows[name] = queue.get()
        child.join()
        kept.write_text(json.dumps(list(rows.values()), indent=1))
        print(f"{name}: {rows[name]['cells']} ({rows[name]['seconds']:.0f} s)", flush=True)
        for sentence in rows[name]["said"]:
            print(f"    {sentence}", flush=True)
    chosen = [rows[name] for name in names]
    if arguments.write:
        part = "again" if arguments.names else part
        page = PAGE.read_text()
        begin, finish = BEGIN.format(part), END.format(part)
        start, end = page.index(begin) + len(begin), page.index(finish)
        asked = {"survey": "", "again": f" {' '.join(names)}"}.get(part, f" --{part}")
        made = table(chosen, f"{asked}{' --unproven' * arguments.unproven}")
        PAGE.write_text(f"{page[:start]}\n{made}\n{page[end:]}")
    print(f"{sum(map(passed, chosen))} of {len(chosen)}; proven: {counts(chosen)}")
    return 0 if all(map(passed, chosen)) else 1


if __name__ == "__main__":
    sys.exit(main())
