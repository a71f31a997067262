"""What Slurm projects do where no Slurm is: its programs are stand-ins that write down how they were called.

The real ones are in test_slurm.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.render import Answers, Renderer

SLURM: Answers = {"deployment": "slurm", "gpu": "h100", "num_gpus": 8, "num_machines": 2}
REGISTRY = {"image_registry": "registry.example.com:5000/team"}


def executable(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + content)
    path.chmod(0o755)


def run(
    *command: str, cwd: Path, code: int = 0, path: str = "/usr/bin:/bin", environment: dict[str, str] | None = None
) -> list[str]:
    """What the command prints, by line."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={"HOME": str(cwd.parent / "home"), "PATH": path, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout
    return done.stdout.splitlines()


# -- the job ----------------------------------------------------------------------------------------------------------


def sbatch_lines(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def test_what_a_job_asks_for(renderer: Renderer):
    answers = {
        **SLURM,
        **{"partition": "gpu", "account": "team-1", "qos": "high", "time_limit": "2-00:00:00"},
        **{"constraint": "h100&nvlink", "preemption_grace_seconds": 300, "sbatch_options": "--exclusive"},
    }
    text = renderer.contents(answers)["slurm/train.sbatch"][0].decode()
    assert sbatch_lines(text) == [
        "--job-name=my-project",
        "--partition=gpu",
        "--account=team-1",
        "--qos=high",
        "--time=2-00:00:00",
        "--constraint=h100&nvlink",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gres=gpu:8",
        "--cpus-per-task=96",
        "--mem=640G",
        "--output=slurm/logs/%x-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@360",
        "--exclusive",
    ]


def test_job_files(renderer: Renderer, variants: list[Answers]):
    """Plain values, before the first command, once each; the log's folder comes with the project."""
    wanted = [answers for answers in variants if answers.get("deployment") == "slurm"]
    assert wanted
    for answers in wanted:
        files = renderer.contents(answers)
        text = files["slurm/train.sbatch"][0].decode()
        lines = text.splitlines()
        last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
        assert all(line.startswith("#") for line in lines[: last + 1])
        options = [line.split("=")[0] for line in sbatch_lines(text)]
        assert len(options) == len(set(options)), options
        assert not [line for line in sbatch_lines(text) if re.search(r"[$`\s]", line)]
        [log] = re.findall(r"--output=(\S+)/[^/]+$", text, re.MULTILINE)
        assert f"{log}/.gitignore" in files
        assert ("module load" in text) == bool(answers.get("modules"))
        knows = [name for name, (content, _) in files.items() if re.search(rb"\$\{?SLURM_", content)]
        assert knows == ["launch.sh"], "the one place that knows what Slurm says"


def test_only_slurm_projects_know_of_slurm(renderer: Renderer, variants: list[Answers]):
    for answers in variants[::5]:
        if answers.get("deployment") != "slurm":
            for name in ("launch.sh", "Makefile", "README.md"):
                text = renderer.contents(answers)[name][0].decode()
                assert not re.search(r"slurm|sbatch", text, re.IGNORECASE), (name, answers)


def test_modules_are_loaded_by_a_login_shell(renderer: Renderer):
    text = renderer.contents(SLURM | {"modules": "python/3.12 cuda/13.0"})["slurm/train.sbatch"][0].decode()
    assert text.startswith("#!/bin/bash -l\n")
    assert "\nmodule load python/3.12 cuda/13.0\n" in text


# -- containers: only how they are called can be seen here ------------------------------------------------------------


Started = Callable[[Answers], tuple[list[str], set[str], Path]]


@pytest.fixture
def started(tmp_path: Path, renderer: Renderer) -> Started:
    """How srun is called by a job of these answers, and the environment that it passes on."""

    def start(answers: Answers) -> tuple[list[str], set[str], Path]:
        project = renderer.render(SLURM | answers, tmp_path / "project")
        executable(
            tmp_path / "bin/srun", f'printf "%s\\n" "$@" >{tmp_path}/arguments\nexport -p >{tmp_path}/environment\n'
        )
        executable(tmp_path / "bin/scontrol", '[[ $* == "show hostnames gpu[03-04]" ]] && printf "gpu03\\ngpu04\\n"\n')
        slurm: dict[str, str] = {
            "SLURM_JOB_ID": "41234",
            "SLURM_JOB_NODELIST": "gpu[03-04]",
            "SLURM_JOB_NUM_NODES": "2",
        }
        slurm |= {"SLURM_CPUS_PER_TASK": "96"}
        named = {"VENV": ".venv", "VIRTUAL_ENV": "/host/venv", "PYTHONPATH": "/host/python"}
        path = f"{tmp_path}/bin:/usr/bin:/bin"
        run("./launch.sh", "train", "--epochs", "3", cwd=project, path=path, environment=slurm | named)
        exported = re.findall(r'^declare -x (\w+)="(.*)"$', (tmp_path / "environment").read_text(), re.MULTILINE)
        environment = {f"{name}={value}" for name, value in exported}
        return (tmp_path / "arguments").read_text().splitlines(), environment, project

    return start


def test_without_a_container(started: Started):
    arguments, environment, _ = started({"checkpoint_volume": "/mnt/ckpt"})
    assert arguments[:3] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert arguments[-5:] == ["./launch.sh", "--on-machine", "train", "--epochs", "3"]
    assert not [argument for argument in arguments if "container" in argument or argument == "apptainer"]
    expected = {
        "MAIN_PROCESS_IP=gpu03",
        f"MAIN_PROCESS_PORT={10000 + 41234 % 20000}",
        "SRUN_CPUS_PER_TASK=96",
        "VENV=.venv",
    }
    assert expected <= environment


def test_pyxis(started: Started, tmp_path: Path):
    volume = tmp_path / "ckpt"
    arguments, environment, project = started({"container_runtime": "pyxis", "checkpoint_volume": str(volume)})
    assert f"--container-image={project}/slurm/image.sqsh" in arguments
    assert "--container-workdir=/workspace" in arguments
    assert "--no-container-mount-home" in arguments
    [mounts] = [argument for argument in arguments if argument.startswith("--container-mounts=")]
    cache = project.parent / "home/.cache/my-project"
    assert mounts.partition("=")[2].split(",") == [
        f"{project}:/workspace",
        f"{volume}:/checkpoints",
        f"{project}/data:/data",
        f"{cache}:/cache",
    ]
    for folder in (volume, project / "data", cache):
        assert folder.is_dir(), "Enroot makes none"
    assert arguments[-5:] == ["./launch.sh", "--on-machine", "train", "--epochs", "3"]
    named = {name.partition("=")[0] for name in environment}
    assert not named & {"VENV", "VIRTUAL_ENV", "PYTHONPATH", "CHECKPOINT_DIR", "DATA_DIR"}, "the image has its own"


def test_apptainer(started: Started, tmp_path: Path):
    volume = tmp_path / "ckpt"
    arguments, _, project = started({"container_runtime": "apptainer", "checkpoint_volume": str(volume)})
    begin = arguments.index("apptainer")
    assert arguments[begin : begin + 3] == ["apptainer", "exec", "--nv"]
    binds = [arguments[number + 1] for number, argument in enumerate(arguments) if argument == "--bind"]
    assert binds == [f"{project}:/workspace", f"{volume}:/checkpoints", f"{project}/data:/data"]
    assert arguments[arguments.index("--pwd") + 1] == "/workspace"
    assert arguments[arguments.index("--home") + 1].endswith("/.cache/my-project:/cache")
    assert arguments[-6:] == ["slurm/image.sif", "./launch.sh", "--on-machine", "train", "--epochs", "3"]


@pytest.mark.parametrize(
    ("answers", "tool", "source"),
    [
        ({"container_runtime": "pyxis"}, "enroot import --output", "dockerd://my-project:TAG"),
        (
            {"container_runtime": "pyxis", **REGISTRY},
            "enroot import --output",
            "docker://registry.example.com:5000#team/my-project:TAG",
        ),
        ({"container_runtime": "apptainer"}, "apptainer build", "docker-daemon:my-project:TAG"),
        (
            {"container_runtime": "apptainer", **REGISTRY},
            "apptainer build",
            "docker://registry.example.com:5000/team/my-project:TAG",
        ),
    ],
)
def test_image(renderer: Renderer, tmp_path: Path, answers: Answers, tool: str, source: str):
    """Made from the Dockerfile that Docker projects have. The file of before stays until the new one is whole."""
    project = renderer.render(SLURM | answers, tmp_path / "project")
    assert run("make", "-n", "image", "IMAGE_TAG=TAG", cwd=project) == [f"slurm/image.sh {source}"]
    end = "sqsh" if answers["container_runtime"] == "pyxis" else "sif"
    image = project / f"slurm/image.{end}"
    image.write_text("old")
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / tool.split()[0]
    path = f"{folder}:/usr/bin:/bin"
    said = run("make", "image", "IMAGE_TAG=TAG", cwd=project, code=2, path=path)
    assert f"error: {program.name} was not found: call make image" in "\n".join(said)
    for code in (1, 0):
        program.write_text(f'#!/bin/bash\necho "$0 $*"\necho new >"${{@: -2:1}}"\nexit {code}\n')
        program.chmod(0o755)
        said = run("make", "image", "IMAGE_TAG=TAG", cwd=project, code=2 * code, path=path)
        assert f"{folder}/{tool} slurm/image.new.{end} {source}" in said
        assert image.read_text() == ("old" if code else "new\n")
    name = "registry.example.com:5000/team/my-project" if "image_registry" in answers else "my-project"
    assert run("make", "-n", "build", "IMAGE_TAG=TAG", cwd=project) == [
        f"scripts/docker.sh build --target train --tag {name}:TAG ."
    ]
    of_docker = renderer.contents(SLURM | {"deployment": "docker"})["Dockerfile"]
    assert renderer.contents(SLURM | answers)["Dockerfile"] == of_docker


# -- where something is missing --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["submit", "resume", "status", "logs", "cancel"])
def test_without_slurm_each_target_says_what_is_missing(renderer: Renderer, tmp_path: Path, target: str):
    project = renderer.render(SLURM, tmp_path / "project")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for name in ("make", "bash", "env", "dirname", "sh"):
        (nothing / name).symlink_to(
            next(Path(folder, name) for folder in ("/usr/bin", "/bin") if Path(folder, name).exists())
        )
    said = [line for line in run("make", target, cwd=project, code=2, path=str(nothing)) if line.startswith("error: ")]
    assert said == [
        "error: Slurm is missing here: sbatch was not found; log in to a machine of the cluster from which jobs are "
        "submitted"
    ]


def login_node(tmp_path: Path, **programs: str) -> str:
    """A path on which Slurm's programs find everything well, but for these; the options of runs are well, too."""
    for name in ("python", "accelerate"):
        executable(tmp_path / "project/.venv/bin" / name, "")
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "sacctmgr"):
        executable(tmp_path / "bin" / name, programs.get(name, ""))
    return f"{tmp_path}/bin:/usr/bin:/bin"


def test_an_account_that_is_not_yours(renderer: Renderer, tmp_path: Path):
    """Where the cluster keeps accounts; the real one of test_slurm.py does not."""
    project = renderer.render(SLURM | {"account": "team-2", "partition": "gpu"}, tmp_path / "project")
    path = login_node(
        tmp_path,
        scontrol='[[ $2 == config ]] && echo "AccountingStorageType   = accounting_storage/slurmdbd"; exit 0',
        sacctmgr='[[ $* == *account=* ]] || printf "team-1\\nteam-3\\n"',
        sbatch="[[ $* == *--test-only* ]] || echo 7",
    )
    said = run("slurm/jobs.sh", "submit", "train", "--run_name", "a", cwd=project, code=1, path=path)
    assert said == ["error: there is no account 'team-2' that you may use; yours are: team-1 team-3"]
    executable(tmp_path / "bin/sacctmgr", "echo team-2\n")
    said = run("slurm/jobs.sh", "submit", "train", "--run_name", "a", cwd=project, path=path)
    assert said[0] == "job 7 trains run 'a'"


def test_an_image_that_is_missing(renderer: Renderer, tmp_path: Path):
    project = renderer.render(SLURM | {"container_runtime": "apptainer"}, tmp_path / "project")
    said = run("slurm/jobs.sh", "submit", "train", "--run_name", "a", cwd=project, code=1, path=login_node(tmp_path))
    assert said == ["error: slurm/image.sif is missing: make image writes it"]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("run_name: wide  # as in the paper", "wide"),
        ('run_name: "wide"', "wide"),
        ("run_name: 'wide'", "wide"),
        ("epochs: 3", "main"),
    ],
)
def test_the_name_of_the_run(renderer: Renderer, tmp_path: Path, file: str, name: str):
    project = renderer.render(SLURM, tmp_path / "project")
    (project / "run.yaml").write_text(file + "\n")
    path = login_node(tmp_path, sbatch="[[ $* == *--test-only* ]] || echo 7")
    command = ["slurm/jobs.sh", "submit", "train", "--config", "run.yaml"]
    assert run(*command, cwd=project, path=path)[0] == f"job 7 trains run '{name}'"
    assert run(*command, "--run_name", "other", cwd=project, path=path)[0] == "job 7 trains run 'other'"
    assert run(*command, "--run_name=other", cwd=project, path=path)[0] == "job 7 trains run 'other'"
