"""Both commands on machines that have nothing: `nox -s newcomer -- bookworm trixie`, as root.

For each suite a new system is made with debootstrap in build/newcomer/ (python3, git and certificates,
nothing else), a clone of this repository is put into it, and what a newcomer types is typed there:

    python3 bootstrap.py demo
    python3 bootstrap.py demo     once more: quick, nothing is installed
    python3 bootstrap.py test

The new system shares this machine's network, certificates, pip settings and wheels, so that installing
behaves as it does here. `noble` is Ubuntu 24.04, from Ubuntu's own archive.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOTS = ROOT / "build" / "newcomer"
PACKAGES = ["python3", "git", "ca-certificates"]
UBUNTU = ("noble",)
UBUNTU_KEYS = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
DEBOOTSTRAP_SCRIPTS = Path("/usr/share/debootstrap/scripts")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Runs in namespaces of its own: mounts and processes are gone when it ends, however it ends.
IN_NEW_SYSTEM = r"""
set -eu
root=$1 command=$2
shift 2
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for path in "$@"; do
  if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root${path%/*}"; : >>"$root$path"; fi
  mount --rbind -o ro "$path" "$root$path"
done
exec chroot "$root" /bin/bash -c "cd /root/copier-accelerate && exec $command"
"""


def fail(sentence: str) -> None:
    sys.exit(f"error: {sentence}")


def apt_mirror() -> str | None:
    """The Debian mirror that this machine itself uses."""
    for source in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if source.is_file():
            found = re.search(r"^(?:URIs:|deb(?: \[.*?\])?) +(\S+)", source.read_text(), re.MULTILINE)
            if found:
                return found[1]
    return None


def shared_with_host() -> list[str]:
    """What makes installing behave as on this machine: its names of machines, certificates and pip's settings."""
    places = ["/etc/hosts", "/etc/resolv.conf", "/etc/ssl/certs", "/usr/local/share/ca-certificates"]
    places += ["/etc/pip.conf", "/etc/xdg/pip", str(Path.home() / ".config/pip")]
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    # Certificates, constraints and folders of wheels or indexes that these settings name.
    # An index's pages link to files beside it.
    places += re.findall(r"(?:file://|')(/[\w./+-]+?)(?:/simple)?/?(?=[\s'])", pip.stdout)
    found: list[Path] = []
    for place in sorted({Path(place) for place in places if Path(place).exists()}):
        if not any(place.is_relative_to(above) for above in found):
            found.append(place)
    return [str(place) for place in found]


def make_system(suite: str, unverified: bool = False) -> Path:
    """A new system; what debootstrap made is kept, what was installed afterwards is not."""
    pristine = ROOTS / f"{suite}.tar"
    root = ROOTS / suite
    if root.exists():
        shutil.rmtree(root)
    ROOTS.mkdir(parents=True, exist_ok=True)
    if pristine.exists():
        root.mkdir()
        subprocess.run(["tar", "-xf", pristine, "-C", root], check=True)
        return root
    print(f"newcomer: making {suite} with debootstrap", flush=True)
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    if suite in UBUNTU:
        if not UBUNTU_KEYS.is_file() and not unverified:
            fail(f"{suite} needs Ubuntu's keys (package ubuntu-keyring), or --unverified for a throw-away machine")
        # Ubuntu has python3-venv in universe, which its installer turns on. An empty mirror means Ubuntu's own,
        # and an older debootstrap doesn't know the newest suites, which it makes like all of them since gutsy.
        command += ["--components=main,universe", "--no-check-gpg" if unverified else f"--keyring={UBUNTU_KEYS}"]
        command += [suite, str(root), "", str(DEBOOTSTRAP_SCRIPTS / "gutsy")]
    else:
        mirror = apt_mirror()
        command += [suite, str(root), *([mirror] if mirror else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-1500:])
        shutil.rmtree(root, ignore_errors=True)
        fail(f"debootstrap could not make {suite}: its last lines are above; is its archive reachable from here?")
    partial = pristine.with_suffix(".partial")
    subprocess.run(["tar", "-cf", partial, "-C", root, "."], check=True)
    partial.rename(pristine)
    return root


def install_sources(root: Path) -> None:
    """What a clone holds, with the uncommitted changes of the work tree as a commit."""
    home = root / "root" / "copier-accelerate"
    sys.path.insert(0, str(ROOT))
    from bootstrap import IDENTITY
    from tools.sources import export

    export(home)
    environment = {**os.environ, **IDENTITY}
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "sources"]):
        subprocess.run(["git", *command], cwd=home, check=True, env=environment)


def in_system(root: Path, command: str) -> float:
    """Runs a command there, its output shown as it comes."""
    environment = {"HOME": "/root", "PATH": PATH, "LANG": "C.UTF-8", "TERM": "dumb"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    print(f"\nnewcomer: {root.name}$ {command}", flush=True)
    started = time.monotonic()
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
    script = ["bash", "-c", IN_NEW_SYSTEM, "_", str(root), command, *shared_with_host()]
    done = subprocess.run([*namespaces, *script], env=environment, stdin=subprocess.DEVNULL)
    taken = time.monotonic() - started
    if done.returncode:
        fail(f"{root.name}: `{command}` ended with exit code {done.returncode}")
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=["bookworm", "trixie"])
    parser.add_argument("--keep", action="store_true", help="leave the systems in build/newcomer/ afterwards")
    parser.add_argument("--only", choices=["demo", "test"], help="just one of the two commands")
    parser.add_argument("--unverified", action="store_true", help="take Ubuntu's packages without its keys")
    options = parser.parse_args()
    if os.geteuid() != 0:
        fail("making a new system needs root: sudo -E .venv/bin/nox -s newcomer")
    if not shutil.which("debootstrap"):
        fail("debootstrap is missing: apt-get install debootstrap")

    demo, test = "python3 bootstrap.py demo", "python3 bootstrap.py test"
    commands = {"demo": [demo, demo], "test": [test], None: [demo, demo, test]}[options.only]
    times = []
    for suite in options.suites:
        root = make_system(suite, options.unverified)
        install_sources(root)
        times += [(suite, command, in_system(root, command)) for command in commands]
        if not options.keep:
            shutil.rmtree(root)
    print("\nnewcomer: all of it works")
    for suite, command, taken in times:
        print(f"  {suite:10} {command:28} {taken:6.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
