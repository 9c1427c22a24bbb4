"""Write text with a trained model: `python -m recipes.generate checkpoint=runs/a prompt="def main(" parallel=tp2`.

Model, plan and tokenizer are from the checkpoint, and the mesh is from any preset. The text is written to stdout token by
token, everything else to stderr. `training.run_sampling` reads and checks the command, and calls `generate` on each rank.
`configs/generate.yaml` has the keys.
"""

from __future__ import annotations

import parallelizer as pz
from parallelizer import training


def generate(job: training.SamplingJob) -> list[list[int]]:
    """The sampling of one rank, in an initialised process group. Returns the new tokens of each text."""
    setup = job.setup

    # The model on the meta device, made parallel in place by the compiled plan, then its parameters.
    mesh = pz.build_mesh(setup.mesh, setup.device)
    pz.seed_ranks(mesh, 0)
    model = setup.build_model()
    whole = setup.whole_model(model)  # for a model whose values only its constructor can set, else None
    pz.apply(job.program, model, mesh)
    if job.checkpoint is not None:
        pz.materialize(model, device=job.device, seed=0, whole=whole, skip_saved=True)
        pz.load_checkpoint(job.checkpoint, model)
    elif job.weights is not None:
        pz.load_pretrained(model, job.weights, device=job.device)
    model.eval()

    text, sampler = job.text(model, mesh), job.sampler()
    made = []
    for _ in range(job.sampling.samples):
        tokens, stream = list(job.prompt), job.stream()
        stream.show(tokens)
        for _ in range(job.max_new_tokens):
            token = sampler.draw(text.logits(tokens))  # the same on every rank
            if token == job.tokenizer.separator:
                break
            tokens.append(token)
            stream.show(tokens)
        stream.end()
        made.append(tokens[len(job.prompt) :])
    return made


if __name__ == "__main__":
    training.run_sampling(generate)
