"""Predicted memory and collectives against a rehearsal: one rank of meshes that are larger than any machine here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.gpu.cases import Case, Row, Where
from parallelizer.configuration.read_setup import from_overrides
from parallelizer.simulate.record.planned import differences, plan_step
from parallelizer.simulate.rehearse.rehearse import rehearse

GIB = 2**30
COMPILED_SMALL = "layers.*: {style: compile, backend: aot_eager}"


def on_a_gpu(words: Iterable[str]) -> list[str]:
    """The overrides of a case on a GPU: in bfloat16, unless the case has another dtype."""
    return ["device=cuda", "train.dtype=bfloat16", *words]


def rehearsed(where: Where, rank: int, *words: str) -> Iterator[Row]:
    """One rank, predicted and rehearsed. Small ones are compiled without inductor, which takes minutes on a CPU."""
    if where.small:
        words = tuple(word.replace("layers.*: compile", COMPILED_SMALL) for word in words)
    small = (
        (
            "model.n_layers=2",
            "model.dim=256",
            "model.hidden_dim=512",
            "model.vocab_size=512",
            "train.seq_len=128",
        )
        if where.small
        else ()
    )
    setup = from_overrides([f"device={where.device}", *words, *small] if where.small else on_a_gpu(words))
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    planned = plan_step(program, model, recipe, rank)
    found = rehearse(program, model, recipe, rank=rank, device=where.device, steps=3)
    peak = found.peak
    highest = max(peak.phases, key=lambda name: peak.phases[name]) if peak.phases else ""
    ledger = (
        "not seen"
        if found.ledger is None
        else "; ".join(map(str, differences(planned.ledger, found.ledger)))
        or f"{len(found.ledger)} as planned"
    )
    everything = sum(found.kernels.seconds.values()) or 1.0
    yield {
        "rank": f"{rank} of {found.ranks}",
        "predicted GiB": round(planned.peak / GIB, 3),
        "requested GiB": round(peak.requested / GIB, 3),
        "apart": f"{(peak.requested - planned.peak) / 2**20:+.1f} MiB, {peak.requested / planned.peak - 1:+.1%}",
        "allocated GiB": peak.allocated and round(peak.allocated / GIB, 3),
        "reserved GiB": peak.reserved and round(peak.reserved / GIB, 3),
        "highest in": highest,
        "device s": round(found.device_seconds, 4),
        "host s": round(found.host_seconds, 4),
        "busy": f"{found.kernels.busy:.0%}",
        "kernels": found.kernels.count,
        "shares": ", ".join(
            f"{k} {v / everything:.0%}" for k, v in sorted(found.kernels.seconds.items(), key=lambda i: -i[1])
        ),
        "host reads": sum(found.host_reads.values()),
        "graphs": f"{found.graphs[0]}+{found.graphs[1]}",
        "collectives": ledger[:300],
        "loss": f"{found.loss:.3f}",
    }
    for place, times in found.host_reads.items():
        yield {"host read at": place, "times": times}
    for name, seconds in found.kernels.costliest.items():
        yield {"kernel": name[:90], "ms": round(seconds * 1e3, 2)}


def _case(name: str, *words: str, rank: int = 0) -> Case:
    return Case(f"memory {name}", rehearsed, (rank, *words), limit=280 if "405B" in name else 100)


B8, B70, B405 = "model=llama3_8b", "model=llama3_70b", "model=llama3_405b"
FSDP8, TP8 = "parallel.mesh.dp_shard=8", "parallel.mesh.tp=8"
LONG = "train.seq_len=8192"
CUT = "model.n_layers=8"
CHECKPOINT, SELECTIVE = (
    'rules=["layers.*: checkpoint"]',
    'rules=["layers.*: {style: checkpoint, mode: selective}"]',
)


def method_rule(method: str) -> str:
    """The override that gives context parallelism this method."""
    return f'rules=["layers.*.attention.inner: {{style: context-parallel, method: {method}}}"]'


CASES = (
    _case("8B fsdp8 checkpoint", B8, FSDP8, LONG, "train.batch_size=8", CHECKPOINT),
    _case("405B fsdp1024_cp2_tp8 rank 0", B405, "parallel=fsdp1024_cp2_tp8", LONG, "train.batch_size=1024"),
    _case("8B tp8", B8, TP8, LONG, "train.batch_size=1"),
    _case("8B fsdp8_tp8", B8, "parallel=fsdp8_tp8", LONG, "train.batch_size=8"),
    _case("8B fsdp8_tp8 rank 63", B8, "parallel=fsdp8_tp8", LONG, "train.batch_size=8", rank=63),
    _case("8B fsdp8 8 layers", B8, FSDP8, LONG, "train.batch_size=8", CUT),
    _case("8B fsdp8 selective", B8, FSDP8, LONG, "train.batch_size=8", SELECTIVE),
    _case("8B cp2_tp8 8 layers", B8, "parallel.mesh.cp=2", TP8, LONG, "train.batch_size=1", CUT),
    _case(
        "8B cp4 ring 8 layers", B8, "parallel.mesh.cp=4", LONG, "train.batch_size=1", CUT, method_rule("ring")
    ),
    _case(
        "8B cp4 ulysses 8 layers",
        B8,
        "parallel.mesh.cp=4",
        LONG,
        "train.batch_size=1",
        CUT,
        method_rule("ulysses"),
    ),
    _case("8B hsdp2x16_tp8", B8, "parallel=hsdp2x16_tp8", LONG, "train.batch_size=32"),
    _case(
        "70B fsdp64_tp8 16 layers",
        B70,
        "parallel.mesh.dp_shard=64",
        TP8,
        LONG,
        "train.batch_size=64",
        "model.n_layers=16",
    ),
    _case(
        "405B fsdp1024_cp2_tp8 rank 16,032",
        B405,
        "parallel=fsdp1024_cp2_tp8",
        LONG,
        "train.batch_size=1024",
        rank=16032,
    ),
    _case(
        "8B fsdp8 float32 2 layers",
        B8,
        FSDP8,
        "train.seq_len=4096",
        "train.batch_size=8",
        "model.n_layers=2",
        "train.dtype=float32",
    ),
    _case("8B fsdp8 accumulate 2", B8, FSDP8, LONG, "train.batch_size=16", "train.accumulate=2", CUT),
    _case(
        "packed documents cp2 4 layers",
        "model=llama_packed",
        "parallel.mesh.cp=2",
        "train.seq_len=2048",
        "train.batch_size=2",
    ),
)
