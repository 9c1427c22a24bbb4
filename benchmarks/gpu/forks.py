"""What a forked child can still do after its parent asked for devices, in three ways."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.cases import Case, Row, Where

ASKED = {
    "nothing": "",
    "is_available": "torch.cuda.is_available()",
    "is_available by NVML": "os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'; torch.cuda.is_available()",
    "device_count": "torch.cuda.device_count()",
    "initialised": "torch.cuda.init()",
    "a backward on the CPU": "torch.ones(2, requires_grad=True).sum().backward()",
}
DOES = {
    "backward": "x = torch.ones(2, requires_grad=True); (x * x).sum().backward()",
    "fake backward": """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    x = torch.ones(2, requires_grad=True); (x * x).sum().backward()
""",
}
PROGRAM = """
import os, sys, torch
{asked}
pid = os.fork()
if pid == 0:
    try:
        {hidden}
        exec({does!r})
        os._exit(0)
    except BaseException as error:
        print(type(error).__name__, str(error)[:160], flush=True)
        os._exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print('status', status)
"""


def after(where: Where) -> Iterator[Row]:
    """One row for each question in the parent and each work in the child."""
    for asked, question in ASKED.items():
        if where.device == "cpu" and "cuda" in question:
            continue  # nothing that it could have begun
        for does, work in DOES.items():
            for hidden in (False, True):
                hide = "os.environ['CUDA_VISIBLE_DEVICES'] = ''" if hidden else "pass"
                text = PROGRAM.format(asked=question, does=work, hidden=hide)
                try:
                    done = subprocess.run(
                        [sys.executable, "-c", text],
                        capture_output=True,
                        text=True,
                        timeout=30,
                        env=dict(os.environ),
                    )
                    said = " ".join((done.stdout + done.stderr).split())[-200:]
                except subprocess.TimeoutExpired:
                    said = "hangs"
                yield {"parent asked": asked, "child does": does, "devices hidden": hidden, "outcome": said}


CASES = (Case("forks", after, limit=240),)
