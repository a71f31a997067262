"""The rendered image, built and run by a real Docker engine, without a change to any rendered file.

The base image is a stand-in with the tag of the real one (tests/support/docker.py); all else is as a person has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

import bootstrap
from tests.support.docker import Engine, import_base_image
from tests.support.render import Answers, Renderer

ANSWERS: Answers = {"gpu": "none", "deployment": "docker", "ci": "none", "jupyter": "yes", "ssh": "yes"}
SECRET = "s3cret-of-the-index"
# A few seconds of training on real digits, saved often.
OPTIONS = "--config configs/smoke.yaml --max_steps 60 --save_every_steps 5 --log_every_steps 5"
USER = 10001  # of the image
PREEMPTED = 75


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A running engine, which knows the base image of the default stack."""
    engine = Engine(Path(os.environ.get("DOCKER_FOLDER", bootstrap.BUILD / "docker")))
    engine.start(shutil.which("docker-compose") or "")
    try:
        yield engine
    finally:
        engine.stop()


class Project:
    """A rendered project; `make` talks to the engine, as an ordinary user with this id."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.engine = engine
        self.slug = folder.name
        self.environment = {**os.environ, **engine.environment, "HOST_UID": "", "HOST_GID": ""}

    def command(self, *command: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )

    def run(self, *command: str, code: int = 0, environment: Mapping[str, str] = MappingProxyType({})) -> str:
        done = self.command(*command, environment=environment)
        print(f"$ {' '.join(command)}\n{done.stdout}")
        assert done.returncode == code, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def build(self, *flags: str, code: int = 0) -> str:
        return self.run("make", "build", f"BUILD_FLAGS={' '.join([*flags, *build_flags()])}", code=code)

    def compose(self, *arguments: str, code: int = 0, environment: Mapping[str, str] = MappingProxyType({})) -> str:
        return self.run("docker", "compose", *arguments, code=code, environment=environment)

    def inside(self, *command: str, flags: str = "--rm", code: int = 0) -> str:
        """What a command in the container of `train` says."""
        return self.compose("run", *flags.split(), "-T", "train", *command, code=code)

    def started(self, *command: str, flags: str = "") -> str:
        """The name of a container that runs this beside the tests."""
        return self.compose("run", "--detach", *flags.split(), "train", *command).splitlines()[-1]


def build_flags() -> list[str]:
    """pip's settings of this machine, where it has some: inside the image they are given as a person gives them."""
    flags = [f"--build-arg={name}" for name in ("PIP_INDEX_URL",) if os.environ.get(name)]
    if certificate := os.environ.get("PIP_CERT"):
        flags += [f"--secret=id=ca,src={certificate}", "--build-arg=PIP_CERT=/run/secrets/ca"]
    return flags


def render(renderer: Renderer, folder: Path, answers: Answers) -> Path:
    renderer.render({**answers, "project_slug": folder.name}, folder)
    for command in (["init", "-q"], ["add", "--all"], ["commit", "-qm", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    for path in (folder, *folder.rglob("*")):  # what a clone of the user who runs it is
        os.chown(path, USER, USER, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def project(
    renderer: Renderer, engine: Engine, training_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """A project whose image is built, from its Dockerfile as it was rendered."""
    parent = tmp_path_factory.mktemp("docker")
    project = Project(render(renderer, parent / "by-docker", ANSWERS), engine)
    base = (project.folder / "Dockerfile").read_text().split("FROM ")[1].split()[0]
    version = ".".join(map(str, sys.version_info[:2]))
    import_base_image(engine, base, training_python.parents[1] / f"lib/python{version}/site-packages")
    project.build()
    try:
        yield project
    finally:
        project.compose("--profile", "*", "down", "--volumes", "--remove-orphans")


def wait(condition: Callable[[], object], what: str, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


def logs(engine: Engine, container: str) -> str:
    return engine.docker("logs", container).stdout


def state(engine: Engine, container: str) -> dict[str, object]:
    return json.loads(engine.docker("inspect", "--format", "{{json .State}}", container).stdout)


RESULT = """
import hashlib, sys
from pathlib import Path
from safetensors import safe_open
run = Path(sys.argv[1])
folder = run / (run / "latest").read_text().strip()
for file in sorted(folder.rglob("*.safetensors")):
    with safe_open(file, "pt") as tensors:
        for name in sorted(tensors.keys()):
            print(folder.name, name, hashlib.sha256(tensors.get_tensor(name).numpy().tobytes()).hexdigest())
"""


def weights(project: Project, run: str) -> list[str]:
    """A hash of each weight at the end of a run."""
    said = project.inside("python", "-c", RESULT, f"/checkpoints/{run}").splitlines()
    found = [line for line in said if line.startswith("step-")]
    assert len(found) > 10
    return found


# -- the image ---------------------------------------------------------------------------------------------------------


def test_a_change_of_the_code_builds_only_the_last_layer(project: Project):
    package = next((project.folder / "src").iterdir())
    (package / "added.py").write_text('"""New."""\n')
    said = project.build()
    (package / "added.py").unlink()
    steps = [line for line in said.splitlines() if " RUN " in line and line.startswith("#")]
    assert len(steps) == 2 and said.count("CACHED") == 3, said  # these, and WORKDIR


def test_what_is_in_the_image(project: Project):
    """Code and environment, for a user without a name; nothing that should stay outside."""
    outside = ["data/raw.bin", "checkpoints/run/weights.bin", ".env", "src/__pycache__/x.pyc", ".venv/pip.txt"]
    for name in outside:
        (project.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (project.folder / name).write_text(SECRET)
    project.build()
    for name in outside:
        (project.folder / name).unlink()
    image = image_of(project)
    listed = project.engine.docker(
        "run", "--rm", image, "find", "/workspace", "-type", "f", "-printf", "%P\\n"
    ).stdout.splitlines()
    assert not {*outside, ".git/HEAD"} & set(listed), listed
    assert {"launch.sh", "accelerate_config.yaml", "requirements/template.txt"} <= set(listed)
    assert project.engine.docker("run", "--rm", image, "id", "-u").stdout.strip() == str(USER)
    found = project.engine.docker("run", "--rm", image, "sh", "-c", f"grep -rl {SECRET} /workspace || echo none").stdout
    assert found.strip() == "none"


def image_of(project: Project) -> str:
    config = json.loads(project.compose("config", "--format", "json"))
    return str(config["services"]["train"]["image"])


def test_secrets_leave_no_trace(project: Project, tmp_path: Path):
    """A pip.conf with a password is there while pip runs, and nowhere in the image, its history or what was said."""
    conf = tmp_path / "pip.conf"
    conf.write_text(f"[global]\nextra-index-url = http://user:{SECRET}@127.0.0.1:1/simple\nretries = 0\ntimeout = 1\n")
    said = project.build(f"--secret=id=pip,src={conf}", "--no-cache", "--progress=plain")
    image = image_of(project)
    assert "127.0.0.1:1" in said  # it was read
    assert SECRET not in said
    assert SECRET not in project.engine.docker("history", "--no-trunc", image).stdout
    assert SECRET not in project.engine.docker("inspect", image).stdout
    search = f"grep -rl {SECRET} /etc /opt /run /cache /workspace /root 2>/dev/null || echo none"
    assert project.engine.docker("run", "--rm", "--user=0", image, "sh", "-c", search).stdout.strip() == "none"


@pytest.mark.parametrize(
    ("requirement", "sentence"),
    [
        ("torch==2.13.0 --hash=sha256:" + "0" * 64, "torch"),
        ("colorlog==6.9.0", "hash"),
        ("colorlog==6.9.0 --hash=sha256:" + "0" * 64, "THESE PACKAGES DO NOT MATCH THE HASHES"),
    ],
)
def test_builds_that_must_fail(project: Project, requirement: str, sentence: str):
    file = project.folder / "requirements/project.txt"
    before = file.read_text()
    file.write_text(f"{before}{requirement}\n")
    try:
        assert sentence in project.build(code=2)
    finally:
        file.write_text(before)


# -- training ----------------------------------------------------------------------------------------------------------


def test_two_processes_train_and_a_stop_changes_nothing(project: Project):
    """`docker stop` has them save within the grace period; the next start ends as a run that was left alone."""
    command = ["./launch.sh", "--cpu", "train", *OPTIONS.split()]
    whole = project.inside(*command, "--run_name", "whole")
    assert "2 process(es) on cpu" in whole and "finished after 60 steps" in whole

    container = project.started(*command, "--run_name", "stopped")
    wait(lambda: "step 20/60" in logs(project.engine, container), "step 20")
    project.engine.docker("stop", container)
    assert state(project.engine, container)["ExitCode"] == PREEMPTED, logs(project.engine, container)
    assert "told to stop (SIGTERM)" in logs(project.engine, container)
    project.engine.docker("rm", container)
    said = project.inside(*command, "--run_name", "stopped")
    assert "going on from /checkpoints/stopped/step-" in said
    assert weights(project, "stopped") == weights(project, "whole")
    listed = project.run("make", "checkpoints", "RUN=stopped", "CONFIG=configs/smoke.yaml")
    assert "latest" in listed and "no " not in listed.split("scores")[1]


def test_compose_up_alone_trains(project: Project):
    project.compose("up", "--detach", "train")
    wait(lambda: "first step done" in project.compose("logs", "train"), "the first step")
    project.compose("stop", "train")
    said = project.compose("logs", "train")
    assert "told to stop" in said
    container = project.compose("ps", "--all", "--quiet", "train").strip()
    assert state(project.engine, container)["ExitCode"] == PREEMPTED


def test_make_train_gives_files_to_its_user(project: Project):
    """A folder of the host, that belongs to the user who calls make."""
    ids = {"HOST_UID": "12345", "HOST_GID": "12345"}
    folder = project.folder.parent / "runs"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    override = project.folder / "compose.override.yaml"
    override.write_text(f"services:\n  train:\n    volumes:\n      - {folder}:/checkpoints\n")
    try:
        project.run("make", "train", "CONFIG=configs/smoke.yaml", "ARGS=--max_steps 3", "RUN=mine", environment=ids)
        assert {path.stat().st_uid for path in folder.rglob("*")} == {12345}
        os.chown(folder, 0, 0)  # as a share does whose root is nobody, or a folder that Docker made
        folder.chmod(0o755)
        said = project.run(
            "make", "train", "CONFIG=configs/smoke.yaml", "ARGS=--max_steps 3", "RUN=other", code=2, environment=ids
        )
        assert "error: " in said and "Traceback" not in said and "/checkpoints" in said.split("error: ")[1]
    finally:
        override.unlink()


def test_a_read_only_root_file_system(project: Project):
    image = image_of(project)
    said = project.engine.docker(
        *["run", "--rm", "--read-only", "--tmpfs=/tmp", "--tmpfs=/cache:mode=1777", "--tmpfs=/checkpoints:mode=1777"],
        *["--shm-size=1g", "--cap-drop=ALL", "--security-opt=no-new-privileges", image],
        *["./launch.sh", "--cpu", "train", *OPTIONS.split(), "--max_steps", "3"],
    ).stdout
    assert "finished after 3 steps" in said


def test_two_containers_train_together(project: Project, renderer: Renderer):
    """Over a bridge network: two machines of two processes, the CPU's twin of the configuration told so."""
    engine = project.engine
    machines = {"gpu": "a100-80gb", "num_gpus": 2, "num_machines": 2}
    two = render(renderer, project.folder.parent / "two-machines", ANSWERS | machines)
    twin = two / "accelerate_config.cpu.yaml"
    text = twin.read_text().replace("num_machines: 1", "num_machines: 2")
    twin.write_text(text.replace("num_processes: 2", "num_processes: 4"))
    engine.docker("network", "create", "machines")
    containers = []
    try:
        for rank in range(2):
            containers.append(
                engine.docker(
                    *["run", "--detach", "--network=machines", f"--name=machine-{rank}", "--shm-size=1g"],
                    *[f"--env=MACHINE_RANK={rank}", "--env=MAIN_PROCESS_IP=machine-0", f"--volume={two}:/workspace"],
                    *["--volume=two-machines:/checkpoints", image_of(project)],
                    *["./launch.sh", "--cpu", "train", *OPTIONS.split(), "--max_steps", "10"],
                ).stdout.strip()
            )
        wait(lambda: not any(state(engine, one)["Running"] for one in containers), "both are done", 300)
        said = [logs(engine, one) for one in containers]
        assert [state(engine, one)["ExitCode"] for one in containers] == [0, 0], said
        assert "4 process(es) on cpu" in logs(engine, containers[0])
        assert "finished after 10 steps" in logs(engine, containers[0])
    finally:
        for one in containers:
            engine.docker("rm", "--force", one)
        engine.docker("network", "rm", "machines")
        engine.docker("volume", "rm", "two-machines")


# -- registries, and machines without a network ------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="session")
def registry(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a registry on this machine."""
    folder, port = tmp_path_factory.mktemp("registry"), free_port()
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        wait(lambda: answers("127.0.0.1", port), "the registry answers", 30)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_pin_and_push(renderer: Renderer, engine: Engine, registry: str, tmp_path: Path):
    """With an image of a few bytes instead of the large ones: these commands do not look inside."""
    given = ANSWERS | {"base_registry": f"{registry}/mirror", "image_registry": f"{registry}/team"}
    project = Project(render(renderer, tmp_path / "by-registry", given), engine)
    dockerfile = (project.folder / "Dockerfile").read_text()
    [tag] = re.findall(r"^FROM (\S+) AS train$", dockerfile, re.MULTILINE)
    assert tag.startswith(f"{registry}/mirror/pytorch/pytorch:")
    (tmp_path / "tiny.tar").write_bytes(b"\0" * 10240)
    engine.docker("import", str(tmp_path / "tiny.tar"), tag)
    engine.docker("push", tag)
    engine.docker("rmi", tag)
    for _ in range(2):  # a second time, from a digest to a digest
        said = project.run("make", "pin")
        [digest] = re.findall(
            r"^FROM \S+@(sha256:[0-9a-f]{64}) AS train$", (project.folder / "Dockerfile").read_text(), re.M
        )
        assert f"Dockerfile: {tag}@{digest}" in said
    engine.docker("rmi", tag)
    engine.docker("pull", f"{tag}@{digest}")
    image = image_of(project)
    engine.docker("tag", f"{tag}@{digest}", image)
    assert f"scripts/docker.sh push {image}" in project.run("make", "push")
    engine.docker("rmi", image)
    engine.docker("pull", image)


def test_pin_of_an_image_that_no_registry_has(project: Project):
    said = project.run("make", "pin", code=2)
    assert "could not be pulled, so its digest is not known; Dockerfile stays as it is" in said
    assert "@sha256" not in (project.folder / "Dockerfile").read_text()


def test_without_a_network(project: Project, tmp_path: Path):
    """Wheels that were fetched before, from a folder that this machine serves; docs/docker.md says so."""
    wheels = tmp_path / "wheels"
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", f"--dest={wheels}"]
    fetch += ["--python-version=3.11", "--only-binary=:all:"]
    subprocess.run([*fetch, "--requirement=requirements/template.txt"], cwd=project.folder, check=True)
    port = free_port()
    serve = [sys.executable, "-m", "http.server", "--bind=127.0.0.1", f"--directory={wheels}", str(port)]
    with subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait(lambda: answers("127.0.0.1", port), "the wheels are served", 30)
            links = f"--build-arg=PIP_FIND_LINKS=http://127.0.0.1:{port}"
            flags = f"BUILD_FLAGS=--network=host --build-arg=PIP_NO_INDEX=1 {links} --progress=plain --no-cache"
            said = project.run("make", "build", "IMAGE_TAG=offline", flags)
        finally:
            server.terminate()
    assert "Looking in indexes" not in said and f"Looking in links: http://127.0.0.1:{port}" in said


# -- services ----------------------------------------------------------------------------------------------------------


def own_address() -> str:
    """An address of this machine that is not the loopback's."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    return next(one for one in found if "." in one)


def answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 2):
        return True
    return False


def get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):  # Docker's own door is open before the service is up
        return 0


@contextlib.contextmanager
def service(project: Project, name: str, port: int, **environment: str) -> Iterator[None]:
    """A service that is up. None is before somebody asks for it, and none answers from outside this machine."""
    assert name not in project.compose("ps", "--all", "--services").split()
    project.compose("up", "--detach", name, environment=environment)
    try:
        wait(lambda: answers("127.0.0.1", port), f"{name} answers")
        assert not answers(own_address(), port)
        yield
    finally:
        print(project.compose("logs", name, environment=environment))
        project.compose("rm", "--stop", "--force", name, environment=environment)


def test_tensorboard(project: Project):
    with service(project, "tensorboard", 6006):
        wait(lambda: get("http://127.0.0.1:6006/") == 200, "TensorBoard's page")


def test_jupyter_wants_its_token(project: Project):
    with service(project, "jupyter", 8888, JUPYTER_TOKEN=SECRET):
        wait(lambda: get("http://127.0.0.1:8888/login") == 200, "Jupyter's page")
        assert get("http://127.0.0.1:8888/api/contents") == 403
        assert get(f"http://127.0.0.1:8888/api/contents?token={SECRET}") == 200


def test_ssh_takes_keys_only(project: Project, tmp_path: Path):
    tag = image_of(project).replace(":", "-ssh:")
    project.run("scripts/docker.sh", "build", "--target=ssh", f"--tag={tag}", *build_flags(), ".")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    public = key.with_suffix(".pub")
    public.chmod(0o644)
    settings = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes")
    login = ["ssh", "-p", "2222", *(word for setting in settings for word in ("-o", setting))]

    def logged_in(*options: str, user: str = "dev") -> subprocess.CompletedProcess[str]:
        command = [*login, *options, f"{user}@127.0.0.1", "id -u; accelerate --help >/dev/null && echo accelerate"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    with service(project, "ssh", 2222, SSH_AUTHORIZED_KEYS=str(public)):
        wait(lambda: logged_in("-i", str(key)).returncode == 0, "the key opens it")
        assert logged_in("-i", str(key)).stdout.split() == [str(USER), "accelerate"]
        refused = [
            logged_in("-o", "IdentityFile=none", "-o", "PubkeyAuthentication=no"),
            logged_in("-i", str(key), user="root"),
        ]
        for one in refused:
            assert one.returncode == 255 and "Permission denied (publickey)" in one.stderr, one
