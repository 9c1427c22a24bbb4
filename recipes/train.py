"""Train a model under a plan: `python -m recipes.train parallel=tp8_cp2`.

`training.run` composes the configuration (`configs/train.yaml` and the command line), checks it, and starts one
process for each rank of the mesh, or joins the processes that torchrun or Slurm started. Each process calls `train`.
Change it as you like: the model, the optimizer, the schedule, the step, the metrics.
"""

from __future__ import annotations

import parallelizer as pz
from parallelizer import training


def train(job: training.Job) -> training.Result:
    """The training of one rank, in an initialised process group; rank 0's result is printed at the end.

    After SIGTERM or SIGUSR1 the run saves a checkpoint and ends early.
    """
    setup, settings = job.setup, job.settings

    # The model on the meta device, made parallel in place by the compiled plan.
    mesh = pz.build_mesh(setup.mesh, setup.device)
    pz.seed_ranks(mesh, settings.seed)
    model = setup.build_model()
    whole = setup.whole_model(model)  # for a model whose values only its constructor can set, else None
    pz.apply(job.program, model, mesh)

    # Its parameters: from this run's newest checkpoint, from pretrained weights, or drawn from the seed.
    checkpoints = job.checkpoints(mesh)
    found = checkpoints.find()
    if found is None and job.weights is not None:
        pz.load_pretrained(model, job.weights, device=job.device)
    else:
        resumes = found is not None
        pz.materialize(model, device=job.device, seed=settings.seed, whole=whole, skip_saved=resumes)
    loss = setup.loss()
    optimizer = setup.build_optimizer(model)
    done, samples = checkpoints.load(found, model, optimizer) if found is not None else (0, 0)

    batches = job.batches(mesh)
    guards = job.guards(model, optimizer, loss)
    stopped, unread, after = 0, [], None
    # `asked` notes SIGTERM and SIGUSR1; `report` writes metrics.jsonl and the trackers, and shows the run.
    with training.stop_requests() as asked, job.reporting(mesh, checkpoints, done) as report:
        for step in range(done + 1, settings.steps + 1):
            report.begin(step)
            learning_rate = job.learning_rate(step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            parts = batches.training(samples)  # this rank's rows and tokens, in `train.accumulate` parts
            # A signal to one rank reaches all ranks with the step, so that they stop after the same one.
            words = guards.words(step, samples, stop=asked.signal)
            with report.step(model, optimizer, parts):
                # No rank applies this step if `after`, the step that has not been read yet, is not finite.
                taken = pz.train_step(
                    model, parts, loss, optimizer, setup.clip, skip_nonfinite=True, words=words, after=after
                )
            samples += setup.workload.batch_size
            unread.append((step, taken, parts, learning_rate))

            # A step is read while the device computes the next one, unless something needs it at once: a checkpoint, say.
            evaluates = step == settings.steps or (settings.eval_every and step % settings.eval_every == 0)
            due = checkpoints.is_due(step) or guards.at_once(step) or report.at_once(step)
            while len(unread) > (0 if evaluates or due or stopped else 1):
                number, earlier, its_parts, its_rate = unread.pop(0)
                measured = report.measured(earlier, its_rate)
                # Raises if the step is not finite, or if replicas differ.
                stopped = guards.after(number, earlier, its_parts) or stopped
                if evaluates and number == step:
                    report.doing("evaluation")
                    measured["validation_loss"] = pz.evaluate(model, batches.validation(), loss).item()
                report.tell(measured)
            after = taken if unread else None
            if stopped or checkpoints.is_due(step):
                report.doing("checkpoint")
                guards.before_saving(step)
                checkpoints.save(step, samples, model, optimizer, wait=bool(stopped))
            if stopped:
                break
        report.ended(stopped)

    if not stopped:
        pz.restore_buffers(model)  # buffers that the plan has split become whole again
        if report.validation_loss is None:  # all steps were trained before
            report.validation_loss = pz.evaluate(model, batches.validation(), loss).item()
        if settings.save is not None:
            pz.save_pretrained(model, settings.save, replace=job.saved_before)
            job.note_saved()
    return report.result()


if __name__ == "__main__":
    training.run(train)
