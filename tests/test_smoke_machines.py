"""Several machines, played by several launchers on this one: real processes, which find each other over TCP."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.render import Renderer
from tests.test_smoke import ACCURACY, environment

SECONDS = 600


@pytest.fixture
def project(renderer: Renderer, tmp_path: Path) -> Path:
    """Two machines with one GPU each. There is none here, so Accelerate is told to use the CPU."""
    answers = {"num_machines": 2, "num_gpus": 1, "deployment": "local", "checkpoint_volume": str(tmp_path / "shared")}
    return renderer.render(answers, tmp_path / "project")


def start(project: Path, rank: int, port: int, *command: str) -> subprocess.Popen[bytes]:
    machine = {"MACHINE_RANK": str(rank), "MAIN_PROCESS_IP": "127.0.0.1", "MAIN_PROCESS_PORT": str(port)}
    with (project.parent / f"machine-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command or ["./launch.sh", "train", "--config", "configs/smoke.yaml"],
            cwd=project,
            env=environment(project) | machine | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def logs(project: Path) -> list[str]:
    return [(project.parent / f"machine-{rank}.log").read_text() for rank in range(2)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def test_machines_train_stop_and_go_on_together(project: Path) -> None:
    port = free_port()
    machines = [start(project, rank, port) for rank in range(2)]
    try:
        deadline = time.monotonic() + SECONDS
        while "step 20/" not in logs(project)[0]:
            assert all(machine.poll() is None for machine in machines) and time.monotonic() < deadline, logs(project)
            time.sleep(0.5)
        machines[1].send_signal(signal.SIGTERM)  # the scheduler takes one machine away
        assert [machine.wait(SECONDS) for machine in machines] == [75, 75], logs(project)
        assert "2 process(es)" in logs(project)[0]
        assert "told to stop (by another rank): saved " in logs(project)[0]

        machines = [start(project, rank, port) for rank in reversed(range(2))]
        assert [machine.wait(SECONDS) for machine in machines] == [0, 0], logs(project)
    finally:
        for machine in machines:
            if machine.poll() is None:
                os.kill(machine.pid, signal.SIGKILL)
    with (project.parent / "shared" / "smoke" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float([row for row in rows if row["split"] == "eval"][-1]["accuracy"]) >= ACCURACY
    assert "is finished after" in logs(project)[0]


def test_a_taken_port_is_one_sentence(project: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert start(project, 0, port).wait(SECONDS) == 1
    sentence = "set MAIN_PROCESS_PORT to a free one, the same on all machines"
    text = (project.parent / "machine-0.log").read_text()
    assert text.splitlines()[-1] == f"error: port {port} is taken on this machine: {sentence}"
    assert "Traceback" not in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_that_stays_alone_says_so(project: Path, rank: int) -> None:
    """After 15 minutes, here after two seconds."""
    port = free_port()
    command = ["scripts/run.sh", "python", "-m", "my_project.launch", "--config_file", "accelerate_config.yaml"]
    command += ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    command += ["--rdzv_conf", "timeout=2", "--module", "my_project.train"]
    assert start(project, rank, port, *command).wait(SECONDS) == 1
    text = (project.parent / f"machine-{rank}.log").read_text()
    assert text.splitlines()[-1].startswith(f"error: the machines did not meet at 127.0.0.1:{port} (")
    assert text.splitlines()[-1].endswith("): start all of them, with the same MAIN_PROCESS_IP and MAIN_PROCESS_PORT")
    assert "Traceback" not in text
