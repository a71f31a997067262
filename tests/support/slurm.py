"""A real Slurm cluster of two nodes on this machine; each node has a network, a name and a /proc/mounts of its own.

Debian's slurm-wlm and munge, as root. Processors, memory and GPUs are made up, so that any request can be met; what
runs is real. Nothing of the machine's own configuration is touched: everything lies in one folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge", "iproute2", "util-linux")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
PREFIX = f"slurm{os.getpid() % 100000}"  # of the network namespaces
NETWORK = "10.77.0"
NODES = 2
GPUS = 16
TIMEOUT = 120

SLURM_CONF = """\
ClusterName=test
SlurmctldHost=ctl({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=5
SlurmdTimeout=30
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
GresTypes=gpu
NodeName=node[1-{nodes}] CPUs=640 Boards=1 SocketsPerBoard=1 CoresPerSocket=640 ThreadsPerCore=1 RealMemory=8000000 \
Gres=gpu:a100:{gpus} Feature=a100,nvlink State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=DEFAULT PreemptMode=OFF PriorityTier=1
PartitionName=main Nodes=ALL Default=YES DefaultTime=10 MaxTime=1-00:00:00 State=UP
PartitionName=gpu Nodes=ALL MaxTime=2-00:00:00 State=UP
PartitionName=private Nodes=ALL MaxTime=1:00:00 AllowAccounts=team-1 State=UP
PartitionName=low Nodes=ALL MaxTime=1:00:00 PreemptMode=REQUEUE GraceTime=60 State=UP
PartitionName=high Nodes=ALL MaxTime=1:00:00 PriorityTier=9 State=UP
"""


def missing() -> list[str]:
    """Programs that the cluster needs and this machine does not have."""
    return [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]


class Cluster:
    """Two nodes, node1 and node2, and a machine `ctl` from which jobs are submitted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "etc/slurm.conf")}

    # -- up and down --

    def start(self) -> None:
        for name in ("etc", "state", "log", "run", *(f"spool-node{number}" for number in range(1, NODES + 1))):
            (self.folder / name).mkdir(parents=True)
        for path in (self.folder, self.folder / "run"):
            path.chmod(0o755)
        key = self.folder / "etc/munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        for number in range(GPUS):
            self._run("mknod", str(self.folder / f"run/gpu{number}"), "c", "1", "3")
        self._write_configuration()
        self._make_networks()
        munge = {"key-file": "etc/munge.key", "socket": "run/munge.sock", "pid-file": "run/munged.pid"}
        munge |= {"log-file": "log/munged.log", "seed-file": "run/munge.seed"}
        self._run("munged", *(f"--{option}={self.folder / path}" for option, path in munge.items()))
        self._run(*self._inside("ctl"), "slurmctld", "-c")
        for number in range(1, NODES + 1):
            self.start_node(number)
        self.wait(lambda: self.slurm("sinfo -h -t idle -o %D -p main").strip() == str(NODES), "both nodes are idle")

    def stop(self) -> None:
        for number in range(1, NODES + 1):
            self.kill_node(number)
        for file in ("slurmctld.pid", "munged.pid"):
            path = self.folder / "run" / file
            if path.exists():
                pid = int(path.read_text())
                self._kill(pid)
                end = time.monotonic() + 20
                while Path(f"/proc/{pid}").exists() and time.monotonic() < end:  # it writes its state
                    time.sleep(0.1)
        for name in ("ctl", *(f"n{number}" for number in range(1, NODES + 1))):
            subprocess.run(["ip", "netns", "del", f"{PREFIX}-{name}"], check=False, capture_output=True)

    def start_node(self, number: int) -> None:
        self._run(*self._inside(f"n{number}"), "slurmd", "-N", f"node{number}")

    def kill_node(self, number: int) -> None:
        """The machine is gone: slurmd and all that it started, at once."""
        network = Path(f"/run/netns/{PREFIX}-n{number}")
        space = network.stat().st_ino if network.exists() else 0
        for pid in self.processes(lambda pid: Path(f"/proc/{pid}/ns/net").stat().st_ino == space):
            self._kill(pid, signal.SIGKILL)

    def _write_configuration(self) -> None:
        etc = self.folder / "etc"
        values = {"folder": self.folder, "network": NETWORK, "nodes": NODES, "gpus": GPUS}
        (etc / "slurm.conf").write_text(SLURM_CONF.format(**values))
        (etc / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=node[1-{NODES}] Name=gpu Type=a100 File={self.folder}/run/gpu[0-{GPUS - 1}]\n"
        )
        if self._version() >= (23, 11):
            (etc / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        hosts = ["127.0.0.1 localhost", f"{NETWORK}.1 ctl"]
        hosts += [f"{NETWORK}.{10 + number} node{number}" for number in range(1, NODES + 1)]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")

    @staticmethod
    def _version() -> tuple[int, ...]:
        path = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        printed = subprocess.run(
            ["slurmctld", "-V"], env=os.environ | path, capture_output=True, text=True, check=True
        ).stdout
        return tuple(map(int, printed.split()[-1].split(".")[:2]))

    def _make_networks(self) -> None:
        """One bridge in the network of `ctl`, and a cable from it to each node."""
        inside = ["nsenter", f"--net=/run/netns/{PREFIX}-ctl"]
        commands = [
            f"ip netns add {PREFIX}-ctl",
            *(f"{' '.join(inside)} ip {words}" for words in ("link set lo up", "link add br0 type bridge")),
            *(f"{' '.join(inside)} ip {words}" for words in (f"addr add {NETWORK}.1/24 dev br0", "link set br0 up")),
        ]
        for number in range(1, NODES + 1):
            node = f"{PREFIX}-n{number}"
            commands += [
                f"ip netns add {node}",
                f"ip -n {node} link set lo up",
                f"{' '.join(inside)} ip link add v{number} type veth peer name eth0 netns {node}",
                f"{' '.join(inside)} ip link set v{number} master br0 up",
                f"ip -n {node} addr add {NETWORK}.{10 + number}/24 dev eth0",
                f"ip -n {node} link set eth0 up",
            ]
        for command in commands:
            self._run(*command.split())

    def _inside(self, name: str) -> list[str]:
        """Words before a command that runs on a machine of the cluster. (`ip netns exec` would hide cgroups.)"""
        host = name if name == "ctl" else f"node{name[1:]}"
        script = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        unshare = ["unshare", "--uts", "--mount", "--propagation", "slave"]
        hosts = str(self.folder / "etc/hosts")
        return ["nsenter", f"--net=/run/netns/{PREFIX}-{name}", *unshare, "sh", "-c", script, hosts, host]

    def _run(self, *command: str) -> None:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        environment = os.environ | self.environment | {"PATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"

    @staticmethod
    def _kill(pid: int, number: signal.Signals = signal.SIGTERM) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    # -- use --

    def run(
        self, *command: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command as a person types it on `ctl`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return subprocess.run(
            [*self._inside("ctl"), *command],
            cwd=cwd,
            env=kept | self.environment | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )

    def slurm(self, command: str) -> str:
        """A command of Slurm; its output."""
        done = self.run(*command.split(), cwd=self.folder)
        assert done.returncode == 0, f"{command}:\n{done.stdout}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """What the controller says of a job; nothing once it has forgotten it."""
        done = self.run("scontrol", "show", "job", "--oneliner", job, cwd=self.folder)
        pairs = (word.partition("=") for word in done.stdout.split())
        return {name: value for name, _, value in pairs} if done.returncode == 0 else {}

    def state(self, job: str) -> str:
        return self.job(job).get("JobState", "")

    def release(self, job: str) -> None:
        """Start a job that waits its two minutes after a requeue."""
        self.wait(lambda: self.state(job) == "PENDING", f"job {job} is in the queue again")
        time.sleep(2)  # nodes still clean up after the turn before, whose files have the same names
        self.slurm(f"scontrol update jobid={job} StartTime=now")

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = TIMEOUT) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}\n{self._last_words()}"
            time.sleep(0.2)

    def wait_for_end(self, job: str) -> str:
        """The state in which a job ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.state(job) in ended, f"job {job} ends")
        return self.state(job)

    def processes(self, wanted: Callable[[int], bool]) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if wanted(int(path.name)):
                    found.append(int(path.name))
            except OSError:
                continue  # gone, or somebody else's
        return found

    def _last_words(self) -> str:
        jobs = self.run("squeue", cwd=self.folder).stdout
        log = (self.folder / "log/slurmctld.log").read_text().splitlines()[-15:]
        return "\n".join([jobs, *log])
