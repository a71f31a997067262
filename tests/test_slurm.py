"""Rendered projects on a real Slurm cluster of two nodes: they train, are stopped in every way, and go on.

Of the rendered files nothing is edited but the CPU twin of the configuration, which gets two machines. Where it is
the life of a job that is looked at and not the training, a program that writes down how it was called stands in for
Python, so that a job takes a second.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from tests.support.render import Answers, Renderer
from tests.support.slurm import Cluster, missing

ACCURACY = 0.97
GRACE = 30

ANSWERS: Answers = {
    "deployment": "slurm",
    "gpu": "t4",
    "num_gpus": 2,
    "num_machines": 2,
    "precision": "fp16",
    "tracker": "none",
    "partition": "main",
    "time_limit": "0:10:00",
    "preemption_grace_seconds": GRACE,
}
SMOKE = "--log_every_steps 5 --save_every_steps 7"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert os.geteuid() == 0, "a cluster needs root: nox -s slurm asks for it"
    assert not missing(), f"{missing()} are not installed: nox -s slurm installs them"
    # A short path: a socket's name has at most 107 characters.
    folder = Path("/tmp", f"slurm-{os.getpid()}")
    folder.mkdir()
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@dataclass
class Project:
    """A rendered project, as a person at the cluster has it."""

    folder: Path
    cluster: Cluster
    venv: Path
    cpu: str = "CPU=yes"
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"VENV": str(self.venv), "OMP_NUM_THREADS": "1"} | self.environment | environment
        return self.cluster.run(*command, cwd=self.folder, environment=variables)

    def make(self, *arguments: str, **environment: str) -> str:
        done = self.command("make", "--no-print-directory", *arguments, **environment)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def refused(self, *arguments: str) -> str:
        """The one sentence with which a target ends."""
        done = self.command("make", "--no-print-directory", *arguments)
        assert done.returncode != 0, done.stdout
        said = [line for line in done.stdout.splitlines() if not line.startswith(("slurm/jobs.sh", "make: ***"))]
        assert len(said) == 1, done.stdout
        return said[0].removeprefix("error: ")

    def submit(self, run: str, *arguments: str, target: str = "submit", **environment: str) -> str:
        """The number of the job, of the last one of a chain."""
        printed = self.make(target, f"RUN={run}", "CONFIG=configs/smoke.yaml", self.cpu, *arguments, **environment)
        return re.findall(rf"^job (\d+) trains run '{run}'", printed, re.MULTILINE)[-1]

    def log(self, run: str, job: str) -> str:
        return (self.folder / f"slurm/logs/{run}-{job}.log").read_text()


def render(renderer: Renderer, folder: Path, answers: Answers, machines: int = 2) -> Path:
    project = renderer.render(answers | {"checkpoint_volume": str(folder / "checkpoints")}, folder / "project")
    config = project / "accelerate_config.cpu.yaml"
    text = config.read_text().replace("num_machines: 1\n", f"num_machines: {machines}\n")
    config.write_text(text.replace("num_processes: 2\n", f"num_processes: {2 * machines}\n"))
    return project


# -- training for real -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real(
    renderer: Renderer, cluster: Cluster, training_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Project:
    folder = render(renderer, tmp_path_factory.mktemp("real"), ANSWERS)
    return Project(folder, cluster, training_python.parent.parent)


def rows(run_dir: Path) -> list[dict[str, str]]:
    path = run_dir / "metrics.csv"
    text = path.read_text() if path.exists() else ""
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def weights(run_dir: Path) -> dict[str, str]:
    """Hashes of model and optimizer in the newest checkpoint; random states are made anew in each step."""
    folder = run_dir / (run_dir / "latest").read_text().strip()
    files = json.loads((folder / "MANIFEST.json").read_text())["files"]
    return {
        f"{folder.name}/{name}": entry["xxh3_128"]
        for name, entry in files.items()
        if name.startswith("state/") and "random_states" not in name
    }


@dataclass
class Finished:
    job: str
    state: str
    run_dir: Path
    log: str
    seen: dict[str, int] = field(default_factory=dict)  # what was done to it, at which step


@pytest.fixture(scope="session")
def in_one_go(real: Project) -> Finished:
    job = real.submit("one-go", f"ARGS={SMOKE}")
    state = real.cluster.wait_for_end(job)
    return Finished(job, state, real.folder.parent / "checkpoints/one-go", real.log("one-go", job))


class Victim:
    """A run that is stopped again and again."""

    def __init__(self, project: Project, run: str) -> None:
        self.project, self.cluster, self.run = project, project.cluster, run
        self.run_dir = project.folder.parent / "checkpoints" / run
        self.job = project.submit(run, f"ARGS={SMOKE}")
        self.seen: dict[str, int] = {}

    def step(self) -> int:
        return max((int(row["step"]) for row in rows(self.run_dir)), default=0)

    def ranks(self, *wanted: str) -> list[int]:
        """Its training processes, or those with these variables."""
        variables = {f"RUN_NAME={self.run}", *wanted}

        def is_one(pid: int) -> bool:
            found = set(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))
            return variables <= found and any(one.startswith("LOCAL_RANK=") for one in found)

        return self.cluster.processes(is_one)

    def stop(self, how: str, stop: Callable[[], None]) -> None:
        """Let it train some steps, stop it, and have it start again."""
        begun = self.step()
        turns = self.cluster.job(self.job)["Restarts"]
        self.cluster.wait(lambda: self.step() >= begun + 10, f"{self.run} trains after {list(self.seen)}")
        self.seen[how] = self.step()
        stop()
        self.cluster.wait(lambda: self.cluster.job(self.job)["Restarts"] > turns, f"another turn after: {how}")
        self.cluster.slurm(f"scontrol update jobid={self.job} TimeLimit=10")  # one of these ways shortens it
        self.cluster.release(self.job)

    def reach_time_limit(self) -> None:
        """Slurm looks at the clock twice a minute; until it has, the ranks stand still."""
        used = time.time() - started(self.cluster.job(self.job)["StartTime"])
        ranks = self.ranks()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        self.cluster.slurm(f"scontrol update jobid={self.job} TimeLimit={int(used + 105) // 60}")
        told = f"job {self.job}: stopped near the time limit"
        self.cluster.wait(lambda: told in self.project.log(self.run, self.job), "Slurm tells the job to save")
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)

    def lose_worker(self) -> None:
        [pid] = [pid for pid in self.ranks("RANK=3") if is_main(pid)]
        os.kill(pid, signal.SIGKILL)

    def lose_node(self) -> None:
        """The one that holds the job's own script, and rank 0; it is there again soon."""
        self.cluster.kill_node(1)
        self.cluster.start_node(1)


def started(time_of_slurm: str) -> float:
    return time.mktime(time.strptime(time_of_slurm, "%Y-%m-%dT%H:%M:%S"))


def is_main(pid: int) -> bool:
    """Whether it is a rank itself, not one of its loader processes."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return b"LOCAL_RANK=" not in Path(f"/proc/{parent}/environ").read_bytes()


@pytest.fixture(scope="session")
def in_pieces(real: Project) -> Finished:
    victim = Victim(real, "in-pieces")
    scancel = f"scancel --signal=TERM {victim.job}"
    victim.stop("scancel --signal=TERM", lambda: void(victim.cluster.slurm(scancel)))
    victim.stop("time limit", victim.reach_time_limit)
    victim.stop("scontrol requeue", lambda: void(victim.cluster.slurm(f"scontrol requeue {victim.job}")))
    victim.stop("loss of a worker", victim.lose_worker)
    victim.stop("loss of a node", victim.lose_node)
    state = victim.cluster.wait_for_end(victim.job)
    return Finished(victim.job, state, victim.run_dir, real.log(victim.run, victim.job), victim.seen)


def void(_: object) -> None:
    pass


def test_two_nodes_train_and_learn(in_one_go: Finished, real: Project):
    assert in_one_go.state == "COMPLETED", in_one_go.log
    assert "4 process(es) on cpu, " in in_one_go.log
    assert real.cluster.job(in_one_go.job)["NodeList"] == "node[1-2]"
    accuracies = [float(row["accuracy"]) for row in rows(in_one_go.run_dir) if row["split"] == "eval"]
    losses = [float(row["loss"]) for row in rows(in_one_go.run_dir) if row["split"] == "train"]
    assert ACCURACY <= max(accuracies) <= 1
    assert losses[-1] < losses[0] / 3


def test_two_nodes_write_one_set_of_files(in_one_go: Finished):
    """Not one a node, and no line twice."""
    assert "job is training in" not in in_one_go.log
    steps = [int(row["step"]) for row in rows(in_one_go.run_dir) if row["split"] == "train"]
    assert steps == sorted(set(steps))
    for text in (in_one_go.log, (in_one_go.run_dir / "train.log").read_text()):
        lines = re.findall(r"step (\d+)/\d+  epoch \d+  loss", text)
        assert list(map(int, lines)) == steps
    assert len(list(in_one_go.run_dir.glob("step-*"))) <= 3, "two, and the best one"
    assert not list(in_one_go.run_dir.glob("*.tmp"))


def test_stopped_in_every_way_it_goes_on(in_pieces: Finished):
    assert in_pieces.state == "COMPLETED", in_pieces.log
    assert in_pieces.log.count("back in the queue, to go on from there") == 3, in_pieces.log
    assert in_pieces.log.count("first step done") == 1 + len(in_pieces.seen)
    went_on = re.findall(r"going on from \S+/step-(\d+)", in_pieces.log)
    assert len(went_on) == len(in_pieces.seen), "all in the same log"
    for (how, seen), step in zip(in_pieces.seen.items(), went_on, strict=True):
        saved = how in ("scancel --signal=TERM", "time limit")
        assert int(step) >= (seen if saved else seen - 12), f"{how}: from {step}, and it had been at {seen}"


def test_time_limit_has_all_ranks_save_the_same_step(in_pieces: Finished):
    saved = re.findall(r"told to stop \(.*\): saved \S+/step-(\d+)", in_pieces.log)
    assert len(saved) >= 2
    stop = in_pieces.log.split("stopped near the time limit: it saves")[1]
    assert re.search(r"\A.*?told to stop \(SIGUSR1\): saved .*?back in the queue", stop, re.DOTALL), stop


def test_the_end_is_the_same_bit_for_bit(in_one_go: Finished, in_pieces: Finished):
    assert weights(in_pieces.run_dir) == weights(in_one_go.run_dir)
    assert len(weights(in_one_go.run_dir)) >= 2, "model and optimizer"
    times = ("samples_per_second", "elapsed_seconds")
    one_go, pieces = (
        [{key: row[key] for key in row if key not in times} for row in rows(one.run_dir)]
        for one in (in_one_go, in_pieces)
    )
    assert pieces == one_go


def test_a_finished_run_does_nothing(in_one_go: Finished, real: Project):
    before = weights(in_one_go.run_dir)
    job = real.submit("one-go", f"ARGS={SMOKE}")
    assert real.cluster.wait_for_end(job) == "COMPLETED"
    log = real.log("one-go", job)
    assert "nothing to do" in log and "first step done" not in log
    assert real.cluster.job(job)["Restarts"] == "0"
    assert weights(in_one_go.run_dir) == before


def test_two_jobs_on_the_same_nodes_and_an_array(
    renderer: Renderer, real: Project, tmp_path_factory: pytest.TempPathFactory
):
    """Two runs on two nodes each, and beside them an array of four with a process each."""
    answers: Answers = {"deployment": "slurm", "gpu": "none", "tracker": "none"}
    folder = render(renderer, tmp_path_factory.mktemp("array"), answers, machines=1)
    single = Project(folder, real.cluster, real.venv, cpu="CPU=")
    (folder / "sweep.txt").write_text("".join(f"--learning_rate {rate}\n" for rate in (0.2, 0.1, 0.05, 0.02)))
    jobs = [real.submit(run, "ARGS=--max_steps 15") for run in ("left", "right")]
    array = single.submit("sweep", "ARRAY=sweep.txt", "ARGS=--max_steps 3")
    real.cluster.wait(lambda: all(real.cluster.state(job) == "RUNNING" for job in jobs), "both jobs run at once")
    for run, job in zip(("left", "right"), jobs, strict=True):
        assert real.cluster.wait_for_end(job) == "COMPLETED", real.log(run, job)
        assert (real.folder.parent / f"checkpoints/{run}/latest").read_text().strip() == "step-00000015"
    for task, rate in enumerate((0.2, 0.1, 0.05, 0.02), 1):
        assert real.cluster.wait_for_end(f"{array}_{task}") == "COMPLETED", single.log(f"sweep@{task}", array)
        config = yaml.safe_load((folder.parent / f"checkpoints/sweep-{task}/config.yaml").read_text())
        assert config["learning_rate"] == rate and config["run_name"] == f"sweep-{task}"


# -- the life of a job, with a stand-in for Python ---------------------------------------------------------------------

STAND_IN = """\
#!/bin/bash
# Writes down where it runs and how it was called; $DOES says what then.
note() { echo "$(hostname) $*" >>"$NOTES"; }
[[ $* != *".check_options "* ]] || exit 0 # by `make submit`
note "start $*"
case $DOES in
fail) exit 1 ;;
stop) exit 75 ;;
third)
  [[ $* != *"--run_name "*-3 ]] || exit 75
  while [[ ! -e $NOTES.done ]]; do sleep 0.1; done
  ;;
wait)
  trap 'sleep 1; note saved; exit 75' USR1 TERM
  while [[ ! -e $NOTES.done ]]; do sleep 0.1; done
  ;;
esac
exit 0
"""


@dataclass
class Bench(Project):
    """A project whose Python is the stand-in."""

    def notes(self, word: str = "start") -> list[tuple[str, list[str]]]:
        """(host, arguments) of each time that the stand-in wrote this word."""
        path = Path(self.environment["NOTES"])
        lines = [line.split() for line in (path.read_text() if path.exists() else "").splitlines()]
        return [(host, arguments) for host, found, *arguments in lines if found == word]

    def wait_for(self, word: str, times: int) -> None:
        self.cluster.wait(lambda: len(self.notes(word)) >= times, f"{times} x {word}", 30)

    def another_turn(self, job: str, turn: int) -> None:
        self.cluster.wait(lambda: self.cluster.job(job)["Restarts"] == str(turn), f"turn {turn} of job {job}", 30)
        self.cluster.release(job)

    def let_go(self) -> None:
        Path(self.environment["NOTES"] + ".done").touch()


def bench_of(folder: Path, cluster: Cluster) -> Bench:
    venv = folder.parent / "venv"
    for name, content in {"python": STAND_IN, "accelerate": "#!/bin/bash\n"}.items():
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / name).write_text(content)
        (venv / "bin" / name).chmod(0o755)
    return Bench(folder, cluster, venv, environment={"NOTES": str(folder.parent / "notes"), "DOES": ""})


@pytest.fixture
def bench(renderer: Renderer, cluster: Cluster, tmp_path: Path) -> Iterator[Bench]:
    bench = bench_of(render(renderer, tmp_path, ANSWERS), cluster)
    yield bench
    bench.let_go()
    cluster.slurm("scancel --user root")
    cluster.wait(lambda: not cluster.slurm("squeue -h").strip(), "all jobs are gone")


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def check_machines(bench: Bench) -> None:
    """Each machine has its own rank; both know the same first host and port."""
    job = bench.submit("machines")
    assert bench.cluster.wait_for_end(job) == "COMPLETED"
    started = sorted(bench.notes())
    assert [host for host, _ in started] == ["node1", "node2"]
    assert [option(arguments, "--machine_rank") for _, arguments in started] == ["0", "1"]
    assert {option(arguments, "--main_process_ip") for _, arguments in started} == {"node1"}
    [port] = {option(arguments, "--main_process_port") for _, arguments in started}
    assert 10000 <= int(port) < 30000


def check_number_of_processes(bench: Bench) -> None:
    """The configuration counts all machines; the job asks for one task and all GPUs of each."""
    hardware = yaml.safe_load((bench.folder / "platform.yaml").read_text())["hardware"]
    config = yaml.safe_load((bench.folder / "accelerate_config.yaml").read_text())
    assert config["num_processes"] == hardware["num_gpus"] * hardware["num_machines"]
    asked = dict(
        re.findall(r"^#SBATCH --([a-z-]+)=(.+)$", (bench.folder / "slurm/train.sbatch").read_text(), re.MULTILINE)
    )
    assert asked["nodes"] == str(config["num_machines"]) and asked["ntasks-per-node"] == "1"
    assert asked["gres"] == f"gpu:{hardware['num_gpus']}"


def check_ports(bench: Bench) -> None:
    """Two jobs on the same nodes meet at different ports, and so does the next turn of one."""
    for run in ("one", "other"):
        bench.submit(run, DOES="wait")
    bench.wait_for("start", 4)
    ports = {option(arguments, "--main_process_port") for _, arguments in bench.notes()}
    assert len(ports) == 2


def check_saving(bench: Bench) -> None:
    """Told to save, the job stays until all machines have, and then gets another turn."""
    job = bench.submit("saving", DOES="wait")
    bench.wait_for("start", 2)
    bench.cluster.slurm(f"scancel --batch --signal=USR1 {job}")
    bench.cluster.wait(lambda: bench.cluster.job(job)["Restarts"] == "1", "another turn", 30)
    assert len(bench.notes("saved")) == 2
    bench.let_go()
    bench.cluster.release(job)
    assert bench.cluster.wait_for_end(job) == "COMPLETED"
    assert len(bench.notes()) == 4


CHECKS = [check_machines, check_number_of_processes, check_ports, check_saving]

# What people write instead; each is found by one of the checks.
MUTATIONS = {
    "double quotes around $SLURM_NODEID": (
        "slurm/job.sh",
        './launch.sh --on-machine "$@" &',
        'bash -c "SLURM_NODEID=$SLURM_NODEID exec ./launch.sh --on-machine \\$*" - "$@" &',
        check_machines,
    ),
    "num_processes of one machine": (
        "accelerate_config.yaml",
        "num_processes: 4",
        "num_processes: 2",
        check_number_of_processes,
    ),
    "a fixed port": (
        "launch.sh",
        "MAIN_PROCESS_PORT=$((10000 + (SLURM_JOB_ID + 5003 * ${SLURM_RESTART_COUNT:-0}) % 20000))",
        "MAIN_PROCESS_PORT=29500",
        check_ports,
    ),
    "no wait after the trap": ("slurm/job.sh", "[[ -n $interrupted ]] || break", "break", check_saving),
}


@pytest.mark.parametrize("check", CHECKS)
def test_what_mutations_are_compared_with(bench: Bench, check: Callable[[Bench], None]):
    check(bench)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_found(bench: Bench, name: str):
    file, right, wrong, check = MUTATIONS[name]
    path = bench.folder / file
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    with pytest.raises(AssertionError):
        check(bench)


def test_arguments_arrive_unchanged(bench: Bench):
    job = bench.submit("words", "ARGS=--data.name '$$HOME;`id` a' --epochs 3")
    assert bench.cluster.wait_for_end(job) == "COMPLETED"
    _, arguments = bench.notes()[0]
    assert " ".join(arguments).endswith(
        "--module my_project.train --config configs/smoke.yaml --run_name words --data.name $HOME;`id` a --epochs 3"
    )


def test_a_failure_is_tried_thrice_and_says_why(bench: Bench):
    job = bench.submit("bad", DOES="fail")
    for turn in (1, 2):
        bench.another_turn(job, turn)
    assert bench.cluster.wait_for_end(job) == "FAILED"
    assert bench.cluster.job(job)["Restarts"] == "2"
    assert len(bench.notes()) == 6
    end = bench.log("bad", job).splitlines()[-2:]
    assert end == [
        f"job {job}: not tried again: three times in a row run 'bad' ended with exit code 1 and the start as its "
        "newest checkpoint",
        f"job {job}: the log says why; once that is mended, make submit goes on from there",
    ]
    again = bench.submit("bad")  # mended
    assert bench.cluster.wait_for_end(again) == "COMPLETED"


def test_failures_with_progress_between_them_go_on(bench: Bench):
    job = bench.submit("slow", DOES="fail")
    run_dir = bench.folder.parent / "checkpoints/slow"
    run_dir.mkdir(parents=True)
    for turn in range(1, 5):
        (run_dir / "latest").write_text(f"step-{turn:08}\n")
        bench.another_turn(job, turn)


def test_stops_do_not_count_as_failures(bench: Bench):
    job = bench.submit("preempted", DOES="stop")
    for turn in range(1, 5):
        bench.another_turn(job, turn)


def test_preemption_by_a_job_that_goes_first(bench: Bench):
    job = bench.submit("low", "SBATCH=--partition=low --exclusive", DOES="wait")
    bench.wait_for("start", 2)
    first = bench.cluster.slurm("sbatch --parsable -p high -N 2 --exclusive -o /dev/null --wrap true").strip()
    assert bench.cluster.wait_for_end(first) == "COMPLETED"
    assert len(bench.notes("saved")) == 2
    bench.let_go()
    bench.cluster.release(job)
    assert bench.cluster.wait_for_end(job) == "COMPLETED"


def test_cancel_lets_it_save_and_ends_it(bench: Bench):
    job = bench.submit("cancelled", DOES="wait")
    bench.wait_for("start", 2)
    assert f"job {job} saves and ends" in bench.make("cancel", "RUN=cancelled")
    assert bench.cluster.wait_for_end(job) == "COMPLETED"
    assert len(bench.notes("saved")) == 2
    assert bench.cluster.job(job)["Restarts"] == "0"
    assert "stopped as you asked" in bench.log("cancelled", job)
    waiting = bench.submit("cancelled", "SBATCH=--begin=now+1hour")
    assert f"job {waiting} will not start" in bench.make("cancel", "RUN=cancelled")
    assert bench.cluster.wait_for_end(waiting) == "CANCELLED"
    assert bench.refused("cancel", "RUN=cancelled").startswith("run 'cancelled' has no job")


def test_cancel_while_a_job_is_being_started(bench: Bench):
    """Slurm loses a signal for a job that has no process yet."""
    job = bench.submit("early", DOES="wait")
    bench.cluster.wait(lambda: bench.cluster.state(job) == "RUNNING", "it runs, as Slurm says")
    bench.make("cancel", "RUN=early")
    assert bench.cluster.wait_for_end(job) == "COMPLETED"
    assert bench.cluster.job(job)["Restarts"] == "0"
    (bench.folder / "slurm/logs/late.cancel").touch()  # as if it were started only now
    assert bench.command("slurm/job.sh", "train", JOB_ID="late", ARRAY_TASK="", NUM_MACHINES="2").returncode == 0
    assert not list((bench.folder / "slurm/logs").glob("*.cancel"))


def test_one_task_of_an_array_is_requeued_alone(bench: Bench):
    """The last one has the number of the whole array. A file that was written on Windows, with remarks."""
    (bench.folder / "sweep.txt").write_bytes(b"# rates\r\n--epochs 1\r\n\r\n  # more\r\n--epochs 2\r\n--epochs 3\r\n")
    array = bench.submit("sweep", "ARRAY=sweep.txt", DOES="third")
    bench.another_turn(f"{array}_3", 1)
    bench.wait_for("start", 8)  # three tasks on two machines, and one of them again
    for task in (1, 2):
        job = bench.cluster.job(f"{array}_{task}")
        assert (job["JobState"], job["Restarts"]) == ("RUNNING", "0")
    given = [tuple(arguments[-4:]) for _, arguments in bench.notes()]
    assert sorted(set(given)) == [("--epochs", str(task), "--run_name", f"sweep-{task}") for task in (1, 2, 3)]


def test_in_a_folder_behind_a_link(bench: Bench):
    """As home folders are on many clusters."""
    link = bench.folder.parent / "link"
    link.symlink_to(bench.folder)
    behind = replace(bench, folder=link, environment=bench.environment | {"PWD": str(link)})
    job = behind.submit("linked", DOES="wait")
    bench.wait_for("start", 2)
    assert "has a job already" in behind.refused("submit", "RUN=linked")
    assert job in behind.make("status")
    assert "saves and ends" in behind.make("cancel", "RUN=linked")


def test_submitted_from_an_interactive_allocation(bench: Bench):
    """What Slurm told that one is not for the job."""
    allocation = ["salloc", "--quiet", "--nodes=1", "--ntasks-per-node=1", "--mem-per-cpu=100"]
    done = bench.command(*allocation, "make", "submit", "RUN=inside", "CONFIG=configs/smoke.yaml", bench.cpu)
    assert done.returncode == 0, done.stdout
    [job] = re.findall(r"^job (\d+) trains", done.stdout, re.MULTILINE)
    assert bench.cluster.wait_for_end(job) == "COMPLETED", bench.log("inside", job)
    assert len(bench.notes()) == 2


def test_scancel_is_final(bench: Bench):
    job = bench.submit("killed", DOES="wait")
    bench.wait_for("start", 2)
    bench.cluster.slurm(f"scancel {job}")
    assert bench.cluster.wait_for_end(job) == "CANCELLED"
    assert "back in the queue" not in bench.log("killed", job)


def test_a_chain_where_jobs_are_not_requeued(bench: Bench):
    last = bench.submit("chain", "CHAIN=3", DOES="stop")
    jobs = [str(int(last) - 2), str(int(last) - 1), last]
    assert [bench.cluster.job(job)["Requeue"] for job in jobs] == ["0"] * 3
    assert [bench.cluster.wait_for_end(job) for job in jobs] == ["FAILED"] * 3
    assert len(bench.notes()) == 6
    ends = [bench.cluster.job(job) for job in jobs]
    assert ends[0]["EndTime"] <= ends[1]["StartTime"] and ends[1]["EndTime"] <= ends[2]["StartTime"]
    assert "the next job of the chain goes on from there" in bench.log("chain", jobs[0])


def test_a_chain_ends_with_the_run_and_with_three_failures(bench: Bench):
    last = bench.submit("finished", "CHAIN=2")
    assert bench.cluster.wait_for_end(last) == "COMPLETED"
    last = bench.submit("failing", "CHAIN=4", DOES="fail")
    assert bench.cluster.wait_for_end(last) == "FAILED"
    assert len(bench.notes()) == 4 + 6, "the fourth does not start anything"


def test_a_cluster_that_does_not_requeue(bench: Bench):
    job = bench.submit("stubborn", "SBATCH=--no-requeue", DOES="stop")
    assert bench.cluster.wait_for_end(job) == "FAILED"
    assert "make submit CHAIN=5" in bench.log("stubborn", job)


def test_in_an_interactive_allocation(bench: Bench):
    """Typed on a login node, it runs on the machines of the allocation all the same."""
    allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1"]
    assert bench.command(*allocation, "make", "train").returncode == 0
    assert sorted(host for host, _ in bench.notes()) == ["node1", "node2"]
    on_a_machine = ["srun", "--overlap", "--nodes=1", "--ntasks=1"]
    assert bench.command(*allocation, *on_a_machine, "make", "train").returncode == 0
    assert sorted(host for host, _ in bench.notes()[2:]) == ["node1", "node2"]
    config = bench.folder / "accelerate_config.cpu.yaml"
    config.write_text(config.read_text().replace("num_machines: 2", "num_machines: 1"))
    assert bench.command(*allocation, "make", "smoke").returncode == 0
    assert [host for host, _ in bench.notes()[4:]] == ["node1"]
    done = bench.command("salloc", "--quiet", "--nodes=1", "./launch.sh", "train")
    assert done.returncode == 2
    assert "error: this job has 1 machines, and accelerate_config.yaml is for 2" in done.stdout


def test_by_hand_without_a_scheduler(bench: Bench):
    here = {"MACHINE_RANK": "1", "MAIN_PROCESS_IP": "10.0.0.1"}
    assert bench.command("./launch.sh", "train", **here).returncode == 0
    [(host, arguments)] = bench.notes()
    assert host == "ctl" and option(arguments, "--machine_rank") == "1"
    assert option(arguments, "--main_process_port") == "29500"
    done = bench.command("./launch.sh", "train")
    assert done.returncode == 2 and done.stdout.startswith("error: MACHINE_RANK is ''")


def test_status_and_logs(bench: Bench):
    assert bench.make("status").splitlines()[-1] == "no job of this project is waiting or running"
    assert bench.refused("logs", "RUN=shown").startswith("run 'shown' has no log in slurm/logs")
    job = bench.submit("shown", DOES="wait")
    bench.wait_for("start", 2)
    shown = bench.make("status").splitlines()[-1].split()
    assert shown[:3] == [job, "shown", "RUNNING"] and shown[-1] == "node[1-2]"
    assert "has a job already" in bench.refused("submit", "RUN=shown")
    bench.let_go()
    bench.cluster.wait_for_end(job)
    (bench.folder / f"slurm/logs/shown-{job}.log").write_text("what it said\n")
    followed = bench.command("timeout", "2", "make", "--no-print-directory", "logs", "RUN=shown").stdout
    assert "what it said" in followed.splitlines()
    for name, number in {"shown-2": 77, "shown@3": 78}.items():  # of another run; of a task in an array
        (bench.folder / f"slurm/logs/{name}-{number}.log").write_text(f"{name}\n")
        os.utime(bench.folder / f"slurm/logs/{name}-{number}.log", (4e9, 4e9 + number))
    for run, word in {"shown": "shown@3", "shown-3": "shown@3", "shown-2": "shown-2"}.items():
        followed = bench.command("timeout", "2", "make", "--no-print-directory", "logs", f"RUN={run}").stdout
        assert {"shown-2", "shown@3"} & set(followed.splitlines()) == {word}


def test_resume_needs_something_to_go_on_with(bench: Bench):
    job = bench.submit("resumed", target="resume")
    assert bench.cluster.wait_for_end(job) == "COMPLETED"
    assert bench.notes()[0][1][-2:] == ["--resume", "latest"]


# -- found before the job waits in vain --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "SBATCH=--partition=gpus",
            r"invalid partition specified: gpus \(the partitions are: main gpu private low high",
        ),
        ("SBATCH=--partition=private --account=team-2", "account 'team-2' may not use partition private, .*: team-1"),
        ("SBATCH=--gres=gpu:99", "no machine has that many GPUs, cores or memory"),
        ("SBATCH=--cpus-per-task=9999", "no machine has that many GPUs, cores or memory"),
        ("SBATCH=--nodes=9", "no machine has that many"),
        ("SBATCH=--constraint=h100", "--constraint names a feature that no machine has"),
        ("SBATCH=--time=2-00:00:01 --partition=gpu", "2-00:00:01 is above the 2-00:00:00 of partition gpu"),
        ("SBATCH=--time=1441", "a time limit of 1441 is above the 1-00:00:00 of partition main"),
        ("SBATCH=--time=2", "a time limit of 2 is too short: a job is told to save 90 seconds .* at least 3 minutes"),
        ("SBATCH=-p gpu", "'-p' is no option of sbatch as it is needed here: write them as --name=value"),
        ("SBATCH=--time 2:00:00", "'2:00:00' is no option of sbatch as it is needed here: write them as --name=value"),
        ("SBATCH=--time=soon", "Invalid --time specification"),
        ("SBATCH=--signal=what", "Invalid --signal specification"),
        ("SBATCH=--nonsense", "unrecognized option '--nonsense'"),
        ("SBATCH=--output=elsewhere/%j.log", "the folder of the log, elsewhere, is missing .*: mkdir -p elsewhere"),
        ("CONFIG=configs/none.yaml", "the configuration 'configs/none.yaml' does not exist"),
        ("RUN=a/b", "the run cannot be called 'a/b' in Slurm"),
        ("SBATCH=--array=1-3", "several runs in one job are given with ARRAY=sweep.txt"),
        ("ARRAY=none.txt", "ARRAY is 'none.txt': give a file with the options of one run in each line"),
        ("CHAIN=many", "CHAIN is 'many': give a number of jobs from 1 to 99"),
    ],
)
def test_refused_at_submit(bench: Bench, arguments: str, sentence: str):
    said = bench.refused("submit", arguments)
    assert re.search(sentence, said), said
    assert bench.cluster.slurm("squeue -h").strip() == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("ARGS=--learning_rat 3", "unknown option --learning_rat: did you mean --learning_rate?"),
        (
            "ARGS=--global_batch_size 30",
            "global_batch_size 30 does not divide by 4 processes x 1 accumulation steps: give a multiple of 4",
        ),
        ("ARRAY=sweep.txt", "line 2: epochs is 0: give 1 or more"),
        ("VENV=nowhere", "Accelerate is not installed in {folder}/nowhere: run make setup"),
    ],
)
def test_options_are_refused_at_submit(real: Project, arguments: str, sentence: str):
    (real.folder / "sweep.txt").write_text("--epochs 1\n\n--epochs 0\n")
    assert real.refused("submit", "RUN=wrong", real.cpu, arguments) == sentence.format(folder=real.folder)
    assert real.refused("resume", "RUN=wrong", real.cpu, arguments) == sentence.format(folder=real.folder)
    assert "wrong" not in real.cluster.slurm("squeue -h -o %j").split()


def test_arrays_that_are_refused(bench: Bench):
    (bench.folder / "named.txt").write_text("--epochs 1\n--epochs 2 --run_name mine\n")
    said = bench.refused("submit", "RUN=wide", "ARRAY=named.txt")
    assert said == "named.txt gives a --run_name: leave it out, the runs are called wide-1 to wide-2"
    (bench.folder / "long.txt").write_text("--epochs 1\n" * 1001)
    said = bench.refused("submit", "RUN=wide", "ARRAY=long.txt")
    assert said == "long.txt has 1001 lines, and a job of this cluster at most 1000 tasks: divide the file"
    assert bench.cluster.slurm("squeue -h").strip() == ""


def test_a_controller_that_does_not_answer(bench: Bench):
    """It may have jobs of the run all the same, so nothing is said about those."""
    elsewhere = bench.folder.parent / "slurm.conf"
    conf = Path(bench.cluster.environment["SLURM_CONF"]).read_text()
    elsewhere.write_text(conf + "SlurmctldPort=9\n")
    bench.environment["SLURM_CONF"] = str(elsewhere)
    for target in ("status", "cancel"):
        said = bench.refused(target, "RUN=a")
        assert said.startswith("Slurm does not say which jobs there are (") and "ping" in said
    assert bench.refused("submit", "ARRAY=none.txt").startswith("ARRAY is 'none.txt'")
    (bench.folder / "slurm/logs/a-7.log").write_text("what it said\n")
    followed = bench.command("timeout", "15", "make", "--no-print-directory", "logs", "RUN=a").stdout
    assert "what it said" in followed.splitlines()


def test_a_job_file_that_slurm_would_read_otherwise(bench: Bench):
    path = bench.folder / "slurm/train.sbatch"
    text = path.read_text()
    path.write_text(text.replace("set -euo pipefail\n", "set -euo pipefail\n#SBATCH --mem=1G\n"))
    assert re.search(r"#SBATCH in line \d+ comes after a command", bench.refused("submit"))
    path.write_text(text.replace("#SBATCH --mem=", "#SBATCH --mem=$MEMORY"))
    assert "Slurm does not expand variables" in bench.command("make", "submit").stdout
    path.write_text(text)
    shutil.rmtree(bench.folder / "slurm/logs")
    assert bench.refused("submit").startswith("the folder of the log, slurm/logs, is missing or not writable")


def test_every_variant_is_accepted(renderer: Renderer, cluster: Cluster, variants: list[Answers], tmp_path: Path):
    """By sbatch itself, in every form that the answers give the job."""
    wanted = [answers for answers in variants if answers.get("deployment") == "slurm"]
    gpus = renderer.choices("gpu", {})
    wanted += [{"deployment": "slurm", "gpu": gpu, "num_gpus": n} for gpu in gpus if gpu != "none" for n in (1, 8)]
    forms = {renderer.contents(answers)["slurm/train.sbatch"][0].decode() for answers in wanted}
    assert len(forms) > 60
    for text in forms:
        (tmp_path / "train.sbatch").write_text(text)
        done = cluster.run("sbatch", "--test-only", "train.sbatch", cwd=tmp_path)
        assert done.returncode == 0, f"{done.stdout}\n{text}"
