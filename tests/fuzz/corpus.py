"""What is mutated: every shipped and test plan, every preset, and overrides of every kind."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from tests.fuzz.mutations import mutated, mutated_word

ROOT = Path(__file__).resolve().parents[2]


def _files(*patterns: str) -> tuple[Path, ...]:
    return tuple(sorted((path for pattern in patterns for path in ROOT.glob(pattern)), key=Path.as_posix))


GOOD_PLANS = _files("configs/plans/*.yaml", "tests/plans/good/*.yaml")
ALL_PLANS = _files("configs/plans/*.yaml", "tests/plans/**/*.yaml")
PRESETS = _files("configs/parallel/*.yaml")
OVERRIDES = (
    "parallel=tp8_cp2",
    "parallel.mesh.cp=2",
    "plan=llama_tp",
    "plan=./configs/plans/llama.yaml",
    "model.n_heads=16",
    "++parallel.layouts.stream=replicate",
    "++parallel.layouts.stream='shard(1)'",
    "++parallel.styles.fsdp.reshard_after_forward=false",
    "++parallel.styles.fsdp=null",
    'rules=["layers.*.attention.w[qkv]: {style: rowwise, output: shard(1)}"]',
    "parallel.rules=['layers.*: checkpoint', 'norm: none']",
    "train.seq_len=128",
    "device=cpu",
    "~parallel.styles.fsdp",
    "imports=[]",
)

PRESET_SHARE, OVERRIDE_SHARE = 0.12, 0.06
"""Of all cases; the rest are plans. What Hydra composes takes twenty times as long."""


@dataclass(frozen=True)
class Case:
    """One input: the bytes of a file, or words of a command line. `as_json` is how the answer is asked for."""

    kind: str
    source: str
    content: bytes = b""
    words: tuple[str, ...] = ()
    as_json: bool = False

    def with_content(self, content: bytes) -> Case:
        """The same case with another file."""
        return replace(self, content=content)


def case(seed: int, index: int) -> Case:
    """The case of a number, the same whenever and wherever it is made."""
    rng = random.Random(f"{seed}:{index}")
    as_json = rng.random() < 0.5
    kind = rng.random()
    if kind < OVERRIDE_SHARE:
        words = rng.sample(OVERRIDES, rng.randint(1, 3))
        at = rng.randrange(len(words))
        words[at] = mutated_word(words[at], rng)
        return Case("override", words[at], words=tuple(words), as_json=as_json)
    preset = kind < OVERRIDE_SHARE + PRESET_SHARE
    plans = GOOD_PLANS if rng.random() < 0.6 else ALL_PLANS
    path = rng.choice(PRESETS if preset else plans)
    content = mutated(path.read_bytes(), rng)
    source = path.relative_to(ROOT).as_posix()
    return Case("preset" if preset else "plan", source, content, as_json=as_json)
