"""A real Docker engine, and an image that stands in for the production base image.

The engine is Debian's, as root, and keeps all that it makes in one folder. The image is made of this machine's own
Debian packages and of the PyTorch that the smoke tests train with, and gets the tag that the rendered Dockerfile names,
so that the Dockerfile is built as it stands, and nothing but Python packages is fetched.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

PACKAGES = ("docker.io", "docker-registry", "iptables", "iproute2", "openssh-client")
PROGRAMS = ("dockerd", "docker-registry", "containerd", "runc", "docker-init", "iptables", "ip", "ssh")
PATH_OF_ROOT = f"/usr/sbin:/sbin:{os.environ['PATH']}"
PATH_OF_IMAGE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMEOUT = 900
# What the production image has besides Python and PyTorch, as far as a project relies on it.
DEBIAN = (
    "bash",
    "ca-certificates",
    "findutils",
    "gawk",
    "git",
    "libgomp1",
    "make",
    "procps",
    "python3",
    "python3-venv",
)
PYTHON = ("torch", "torchvision", "pip")


def missing() -> list[str]:
    """Programs that the engine needs and this machine does not have."""
    return [name for name in PROGRAMS if not shutil.which(name, path=PATH_OF_ROOT)]


class Engine:
    """dockerd, on a socket of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "docker.sock"
        self.environment = {
            "DOCKER_HOST": f"unix://{self.socket}",
            "DOCKER_BUILDKIT": "1",
            "DOCKER_CONFIG": str(folder / "config"),
            "PATH": f"/usr/bin:{os.environ['PATH']}",  # Debian's client, which belongs to the engine
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, compose: str) -> None:
        """`compose` is Compose's program, which the command line takes as a plugin."""
        plugins = self.folder / "config/cli-plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        (plugins / "docker-compose").unlink(missing_ok=True)
        (plugins / "docker-compose").symlink_to(compose)
        options = {"data-root": "data", "exec-root": "exec", "pidfile": "docker.pid"}
        command = ["dockerd", "--host", f"unix://{self.socket}", "--bip", "172.31.250.1/24"]
        command += [f"--{option}={self.folder / path}" for option, path in options.items()]
        command += ["--default-address-pool", "base=172.31.251.0/24,size=28"]
        with (self.folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"PATH": PATH_OF_ROOT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + 60
        while self.docker("version", check=False).returncode:
            assert self._process.poll() is None and time.monotonic() < end, self.log()
            time.sleep(0.2)

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(60)
        subprocess.run(["ip", "link", "delete", "docker0"], env=os.environ | {"PATH": PATH_OF_ROOT}, check=False)

    def log(self) -> str:
        return (self.folder / "dockerd.log").read_text()[-4000:]

    def docker(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return call("docker", *arguments, environment=self.environment, check=check)


def call(
    *command: str, environment: Mapping[str, str], check: bool = True, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of an engine; what it prints is kept, and shown where it fails and must not."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout[-4000:]}"
    return done


# -- the image that stands in ------------------------------------------------------------------------------------------


def import_base_image(engine: Engine, tag: str, site_packages: Path) -> None:
    """Make the image, unless the engine has it."""
    if not engine.docker("image", "inspect", tag, check=False).returncode:
        return
    pour_base_image(["docker"], engine.environment, tag, site_packages)


def pour_base_image(engine: Sequence[str], environment: Mapping[str, str], tag: str, site_packages: Path) -> None:
    """Have the program of an engine, with its options, import the image while it is being written."""
    command = [*engine, "import", "--change", "WORKDIR /workspace", "--change", f"ENV PATH={PATH_OF_IMAGE}", "-", tag]
    with subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.PIPE) as process:
        assert process.stdin
        write_base_image(process.stdin, site_packages)
    assert process.returncode == 0, f"{tag} was not imported"


def write_base_image(stream: IO[bytes], site_packages: Path) -> None:
    """A file system with Debian's packages of this machine, and PyTorch where Debian's Python looks for packages."""
    folders = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}
    packages = debian_packages()
    kept = set(with_parents(debian_files(packages))) - {Path("/", folder) for folder in folders}
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for path in sorted(kept):
            archive.add(path, arcname=path.relative_to("/"), recursive=False)
        for folder, mode in folders.items():
            one = tarfile.TarInfo(folder)
            one.type, one.mode = tarfile.DIRTYPE, mode
            archive.addfile(one)
        status = io.BytesIO(dpkg_status(packages).encode())
        one = tarfile.TarInfo("var/lib/dpkg/status")
        one.size = len(status.getvalue())
        archive.addfile(one, status)
        version = ".".join(re.findall(r"python(\d+)\.(\d+)", str(site_packages))[-1])
        target = f"usr/local/lib/python{version}/dist-packages"
        for file in python_files(site_packages):
            archive.add(site_packages / file, arcname=f"{target}/{file}", recursive=False)


def python_files(site_packages: Path) -> Iterator[str]:
    """The files of PyTorch, and of all that it needs, relative to `site_packages`."""
    found = {
        re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one
        for one in importlib.metadata.distributions(path=[str(site_packages)])
    }
    todo, seen = list(PYTHON), set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen or name not in found:
            continue
        seen.add(name)
        needs = [need for need in found[name].requires or [] if "extra ==" not in need or need.startswith("nvidia-")]
        todo += [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs]
        for file in found[name].files or []:
            if not str(file).startswith("..") and (site_packages / file).exists():
                yield str(file)


def debian_packages() -> set[str]:
    """The packages, what they need, and what every Debian system has."""
    fields = "${Package}\t${Essential}\t${db:Status-Status}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    needs: dict[str, list[str]] = {}
    provided: dict[str, str] = {}
    essential = ["apt", "base-files", "base-passwd", "libc-bin"]
    for line in output("dpkg-query", "--show", f"--showformat={fields}").splitlines():
        package, is_essential, status, depends, provides = (line.split("\t") + [""] * 5)[:5]
        if status != "installed":
            continue
        needs.setdefault(package, []).extend(names(depends))
        essential += [package] if is_essential == "yes" else []
        for other in names(provides):
            provided.setdefault(other, package)
    todo, packages = [*DEBIAN, *essential], set()
    while todo:
        name = todo.pop()
        package = name if name in needs else provided.get(name, "")
        if package and package not in packages:
            packages.add(package)
            todo += needs[package]
    return packages


def dpkg_status(packages: set[str]) -> str:
    """What apt in the image takes to be installed."""
    every = Path("/var/lib/dpkg/status").read_text().split("\n\n")
    return "\n\n".join(one for one in every if one.partition("\n")[0].removeprefix("Package: ") in packages) + "\n"


def debian_files(packages: set[str]) -> Iterator[Path]:
    """Their files, and those that their installation made."""
    left_out = ("/usr/share/doc/", "/usr/share/info/", "/usr/share/locale/", "/usr/share/man/", "/var/lib/dpkg/")
    for line in output("dpkg", "--listfiles", *sorted(packages)).splitlines():
        if line.startswith("/") and line != "/." and not line.startswith(left_out):
            yield Path(line)
    for name in ("group", "ld.so.cache", "login.defs", "nsswitch.conf", "passwd", "shadow"):
        yield Path("/etc", name)
    for name in ("bin", "lib", "lib64", "root", "sbin"):
        yield Path("/", name)
    for name in ("/etc/alternatives", "/etc/apt", "/etc/pam.d", "/etc/ssl", "/usr/share/ca-certificates"):
        yield from Path(name).rglob("*")
    for name in ("/usr/bin", "/usr/lib/x86_64-linux-gnu"):  # chosen by update-alternatives, made by ldconfig
        yield from (path for path in Path(name).iterdir() if path.is_symlink())


def with_parents(paths: Iterable[Path]) -> Iterator[Path]:
    """Each path as it really is, and the folders above it."""
    for path in paths:
        real = path.parent.resolve() / path.name
        if (real.exists() or real.is_symlink()) and not real.is_socket():
            yield from (real, *real.parents[:-1])


def names(field: str) -> list[str]:
    """Package names of a field such as `libc6 (>= 2.36), debconf | debconf-2.0`, alternatives too."""
    return re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]+)", field)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
