"""What the command `verify` does, from Python.

setup = pz.from_overrides(["model=llama_debug", "parallel=tp8_cp2"])
assert pz.verify(setup).passed
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from parallelizer.configuration.setup import Setup
from parallelizer.configuration.validate import validating

if TYPE_CHECKING:
    from parallelizer.proof.proof import Proof


def verify(
    setup: Setup, *, full_mesh: bool = False, seed: int = 0, force: bool = False, dtype: str = "float64"
) -> Proof:
    """The proof of `parallelizer verify`: runs the tiny form of a setup on one process and on real CPU
    ranks, and compares all results.

    `Proof.passed` is whether they are equal. The arguments are the command's options. `Proof.diagnostics`
    are the findings of `parallelizer.validate` for the setup. `validate` runs beside the ranks and does not
    stop them: only a plan that cannot be compiled is refused. For a model without a configuration use
    `parallelizer.testing.assert_equivalent`. The process forks, so it must not have a process group. Raises
    PlanError if the plan is refused, unless `force` is set, and LaunchError if a rank fails.
    """
    from parallelizer.proof.prove import check_ranks, prove
    from parallelizer.proof.tiny import small_mesh
    from parallelizer.proof.unsure import UNSURE, only_unsure, settled

    check_ranks(setup.mesh if full_mesh else small_mesh(setup.mesh))
    model = setup.build_model()
    program = setup.compile(model, force=force, unsure=UNSURE)
    force = force or only_unsure(program.diagnostics)
    with validating(setup, program, model) as validation:
        proof = prove(setup, program=program, full_mesh=full_mesh, seed=seed, force=force, dtype=dtype)
        found = validation().found
        return dataclasses.replace(
            proof, diagnostics=settled(found) if proof.passed and proof.is_verdict else found
        )
