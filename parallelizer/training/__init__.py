"""What a training recipe needs beside `parallelizer` itself:

    from parallelizer import training

    def train(job: training.Job) -> training.Result: ...

    if __name__ == "__main__":
        training.run(train)

`run` does what is not training: it composes and checks the configuration, starts or joins the ranks, and tells how the run
ended. `train` is called on every rank with a `Job`, which builds the parts of a run: `RunCheckpoints`, `Batches`, `Guards`
and `Reporting`. `run_sampling` and `SamplingJob` are the same for text from a checkpoint. `source_of` makes data of a
dataset, a DataLoader or an iterable, and `Source` is the base class of any other. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same for those who read and do not run: type checkers, editors, the documentation
    from parallelizer.optim import learning_rate as learning_rate
    from parallelizer.runtime.launch.stopping import stop_requests as stop_requests
    from parallelizer.training.batches import Batches as Batches
    from parallelizer.training.command import run as run
    from parallelizer.training.command import run_sampling as run_sampling
    from parallelizer.training.data.files import read_document as read_document
    from parallelizer.training.data.samples import source_of as source_of
    from parallelizer.training.data.source import Baseline as Baseline
    from parallelizer.training.data.source import Source as Source
    from parallelizer.training.data.source import fingerprint as fingerprint
    from parallelizer.training.guards import Guards as Guards
    from parallelizer.training.job.job import Job as Job
    from parallelizer.training.keep.checkpoints import RunCheckpoints as RunCheckpoints
    from parallelizer.training.sampling.draw import Sampler as Sampler
    from parallelizer.training.sampling.job import SamplingJob as SamplingJob
    from parallelizer.training.sampling.settings import Sampling as Sampling
    from parallelizer.training.sampling.stream import TextStream as TextStream
    from parallelizer.training.sampling.text import TextLogits as TextLogits
    from parallelizer.training.settings import Settings as Settings
    from parallelizer.training.trackers import TRACKERS as TRACKERS
    from parallelizer.training.trackers import Tracker as Tracker
    from parallelizer.training.watch.reporting import Reporting as Reporting
    from parallelizer.training.watch.result import Result as Result

_WHERE = {
    "Baseline": "training.data.source",
    "Batches": "training.batches",
    "Guards": "training.guards",
    "Job": "training.job.job",
    "Reporting": "training.watch.reporting",
    "Result": "training.watch.result",
    "RunCheckpoints": "training.keep.checkpoints",
    "Sampler": "training.sampling.draw",
    "Sampling": "training.sampling.settings",
    "SamplingJob": "training.sampling.job",
    "Settings": "training.settings",
    "Source": "training.data.source",
    "TRACKERS": "training.trackers",
    "TextLogits": "training.sampling.text",
    "TextStream": "training.sampling.stream",
    "Tracker": "training.trackers",
    "fingerprint": "training.data.source",
    "learning_rate": "optim",
    "read_document": "training.data.files",
    "run": "training.command",
    "run_sampling": "training.command",
    "source_of": "training.data.samples",
    "stop_requests": "runtime.launch.stopping",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'parallelizer.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"parallelizer.{_WHERE[name]}"), name)
