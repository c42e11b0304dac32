"""A SLURM cluster on namespaced hosts: controller on host 1, a node with pretended GPUs on each of the others."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from tests.cluster.hosts import HostSet, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
GPUS = 4
CORES = 4
CONTROLLER = 1
CONFIG = """
ClusterName=test
SlurmctldHost=host1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=15
KillWait=30
MinJobAge=600
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/jobs.txt
AccountingStorageType=accounting_storage/none
NodeName={nodes} CPUs={cores} RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_for_slurm() -> str | None:
    """Return why a SLURM cluster cannot be started here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"SLURM is not installed ({', '.join(missing)}): make test-cluster installs it" if missing else None


class SlurmCluster:
    """Runs until the end of the `with` statement; the hosts' own end also ends it."""

    def __init__(self, hosts: HostSet, directory: Path) -> None:
        self._hosts, self._directory = hosts, directory
        self.nodes = [host for host in hosts.hosts if host.number != CONTROLLER]
        self.env = {"SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        shutil.rmtree(self._directory, ignore_errors=True)
        (self._directory / "state").mkdir(parents=True)
        names = ",".join(node.name for node in self.nodes)
        text = CONFIG.format(directory=self._directory, nodes=names, cores=CORES, gpus=GPUS)
        (self._directory / "slurm.conf").write_text(text)
        # GPUs that are only counted are refused: they need device files.
        devices = f"/dev/tty[0-{GPUS - 1}]"
        (self._directory / "gres.conf").write_text(f"NodeName={names} Name=gpu Count={GPUS} File={devices}\n")
        key = self._directory / "munge.key"
        key.write_bytes(Path("/dev/urandom").open("rb").read(1024))
        key.chmod(0o400)
        self._start_munge(CONTROLLER)
        self._start(CONTROLLER, "slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node.number)
        self.wait_until_idle()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts.hosts:
            host.kill()

    def start_node(self, number: int) -> None:
        """Start the daemons of a node, also again after its host was restarted."""
        self._start_munge(number)
        (self._directory / f"host{number}").mkdir(exist_ok=True)
        self._start(number, "slurmd", "-D", "-N", f"host{number}")

    def run(self, *command: object, timeout: float = 60, check: bool = True) -> str:
        """Run a command where users log in, on the controller's host."""
        return self._hosts[CONTROLLER].run(*command, env=self.env, timeout=timeout, check=check)

    def job(self, number: int) -> dict[str, str]:
        """Return what `scontrol show job` says: `JobState`, `Reason`, `Restarts`, `BatchHost`, `NodeList`."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until_idle(self) -> None:
        """Wait until every node is up and has left its last job."""
        states = ("sinfo", "--noheader", "--Node", "--format=%T")
        wait_for(lambda: set(self.run(*states, check=False).split()) == {"idle"}, "idle nodes", timeout=60)

    def set_node_timeout(self, seconds: int) -> None:
        """Set after how long without an answer a node is down."""
        path = self._directory / "slurm.conf"
        path.write_text(re.sub(r"SlurmdTimeout=\d+", f"SlurmdTimeout={seconds}", path.read_text()))
        self.run("scontrol", "reconfigure")

    def _start_munge(self, number: int) -> None:
        key, log = f"--key-file={self._directory}/munge.key", self._directory / f"munge-host{number}.log"
        own = ("--socket=/tmp/munge.socket", "--pid-file=/tmp/munge.pid", "--seed-file=/tmp/munge.seed")
        host = self._hosts[number]
        self._start(number, "munged", "--foreground", "--force", key, f"--log-file={log}", *own)
        # Through the namespace's own /tmp: the socket is there when the daemon listens.
        wait_for(Path("/proc", str(host.pid), "root", "tmp", "munge.socket").exists, f"munged on {host.name}")

    def _start(self, number: int, *command: str) -> subprocess.Popen[str]:
        with open(self._directory / f"{command[0]}-host{number}.out", "ab") as output:
            return self._hosts[number].popen(*command, env=self.env, output=output)
