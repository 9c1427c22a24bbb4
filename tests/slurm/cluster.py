"""A real Slurm on loopback: munge, one controller and the daemons of two nodes, all of this machine, in one folder.

Debian's packages slurmctld, slurmd and munge; it must be root that starts them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.recipes.runs import ROOT

NODES = ("na", "nb")
"""Names that no host has, which is allowed: Slurm knows the nodes' addresses."""

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
JobRequeue=1
RequeueExit=75
KillWait=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None when there can."""
    programs = [p for p in ("slurmctld", "slurmd", "munged", "srun", "sbatch") if shutil.which(p) is None]
    if programs:
        return f"{' and '.join(programs)} not found: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "Slurm's daemons are started here by root alone"


class Slurm:
    """The running cluster; `stop` leaves no process of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        host = socket.gethostname().partition(".")[0]
        controller, *ports = _free_ports(1 + len(NODES))
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000 State=UNKNOWN"
            for node, port in zip(NODES, ports, strict=True)
        )
        self.config = folder / "slurm.conf"
        self.config.write_text(
            CONFIG.format(host=host, controller=controller, folder=folder, nodes=nodes, names=",".join(NODES))
        )
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    @property
    def environment(self) -> dict[str, str]:
        """What commands of Slurm's need: no job that this process is in, and the cluster's configuration."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
        }
        bin = str(Path(sys.executable).parent)
        return kept | {
            "SLURM_CONF": str(self.config),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{bin}:{kept['PATH']}",
        }

    def start(self) -> None:
        """Raises RuntimeError, with what the daemons wrote, when the nodes do not come up."""
        munge = self.folder / "munge"
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        wait_for((munge / "socket").exists, 10)
        self._daemon("slurmctld", "-D", "-i", "-c")
        for node in NODES:
            self._daemon("slurmd", "-D", "-c", "-N", node)
        try:
            wait_for(lambda: self.run("sinfo", "-h", "-o", "%t %D").strip() == f"idle {len(NODES)}", 20)
        except TimeoutError:
            written = "\n".join(p.read_text(errors="replace") for p in self.folder.glob("*.out"))
            raise RuntimeError(f"Slurm's nodes did not come up:\n{written}") from None

    def stop(self) -> None:
        """End every job and daemon."""
        with suppress(subprocess.SubprocessError):
            self.run("scancel", "--state=RUNNING", "--signal=KILL", "--full", "--me", check=False)
            self.run("scancel", "--me", check=False)
            wait_for(lambda: not self.run("squeue", "-h", check=False).strip(), 10)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, timeout: float = 60.0) -> str:
        """One of Slurm's commands; what it writes to stdout. Raises CalledProcessError with its stderr."""
        ended = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=timeout
        )
        if check and ended.returncode:
            raise RuntimeError(f"{command} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
        return ended.stdout

    def submit(self, script: Path, *options: str, cwd: Path) -> str:
        """The number of a new batch job."""
        return self.run("sbatch", "--parsable", *options, str(script), cwd=cwd).strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` tells: JobState, Restarts, ExitCode and so on."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(
        self, number: str, states: Sequence[str] = ("COMPLETED",), timeout: float = 60.0
    ) -> dict[str, str]:
        """The job once it is in one of these states. Raises TimeoutError."""
        try:
            wait_for(lambda: self.job(number)["JobState"] in states, timeout)
        except TimeoutError:
            raise TimeoutError(
                f"{self.job(number)}\n{self.run('squeue', '-l')}\n{self.run('sinfo')}"
            ) from None
        return self.job(number)

    def requeued(self, number: str, times: int = 1, timeout: float = 60.0) -> None:
        """Wait until the job has been requeued so often; it starts then, without the two minutes that Slurm lets
        pass.
        """
        wait_for(lambda: int(self.job(number)["Restarts"]) >= times, timeout)

        # slurmd removes the script of the last life a moment later: one that starts before then finds none, and fails.
        time.sleep(5)

        def begun() -> bool:  # what is left of its last life may be in the way for a moment
            self.run("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)
            return self.job(number)["JobState"] not in ("PENDING", "COMPLETING", "REQUEUED")

        wait_for(begun, timeout)

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{len(self._daemons)}-{command[0]}.out", "wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                    preexec_fn=_end_with_parent,
                )
            )


_prctl = ctypes.CDLL(None).prctl


def _end_with_parent() -> None:
    """A test run that is killed stops nothing: its daemons end with it (PR_SET_PDEATHSIG)."""
    _prctl(1, signal.SIGTERM)


def wait_for(holds: Callable[[], bool], timeout: float) -> None:
    """Raises TimeoutError when it does not come to hold."""
    until = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
