"""Pods of a rendered Job, run by Podman as a node would run them.

No cluster is needed: what the Job controller adds to a pod, and what a kubelet makes of its volumes, is done here and
nowhere else. The image is the one that the rendered Dockerfile gives on the base image of tests/support/docker.py.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from pathlib import Path

import yaml

from tests.support.docker import PATH_OF_ROOT, call, pour_base_image
from tests.support.manifests import Object, of_kind

PACKAGES = ("podman", "runc", "catatonit", "netavark", "aardvark-dns", "iptables")
PROGRAMS = ("podman", "runc", "catatonit", "iptables")
NETWORK, SUBNET = "kubernetes-test", "10.90.91"


def missing() -> list[str]:
    return [name for name in PROGRAMS if not shutil.which(name, path=PATH_OF_ROOT)]


SETTINGS = """\
[containers]
log_driver = "k8s-file"
[engine]
events_logger = "file"
[engine.runtimes]
here = ["{runtime}"]
"""
# runc, without the limits of open files and processes: a test machine that is a container may not set them.
RUNTIME = """\
#!/bin/bash
for ((i = 1; i < $#; i++)); do
  [[ ${!i} != --bundle ]] || { next=$((i + 1)) && sed -i 's/,"rlimits":[[][^]]*[]]//' "${!next}/config.json"; }
done
exec runc "$@"
"""


class Node:
    """Podman, with all that it makes in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.options = ["--root", str(folder / "root"), "--runroot", str(folder / "run"), "--runtime", "here"]
        self.options += ["--cgroup-manager", "cgroupfs", "--network-config-dir", str(folder / "networks")]
        (folder / "containers.conf").write_text(SETTINGS.format(runtime=folder / "runtime"))
        (folder / "runtime").write_text(RUNTIME)
        (folder / "runtime").chmod(0o755)
        self.environment = {"PATH": PATH_OF_ROOT, "CONTAINERS_CONF": str(folder / "containers.conf")}

    def podman(self, *arguments: str, check: bool = True, cwd: Path | None = None) -> str:
        command = ("podman", *self.options, *arguments)
        return call(*command, environment=self.environment, check=check, cwd=cwd).stdout.strip()

    def start(self) -> None:
        if NETWORK not in self.podman("network", "ls", "--format", "{{.Name}}").split():
            self.podman("network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)

    def stop(self) -> None:
        self.podman("pod", "rm", "--all", "--force", check=False)
        self.podman("network", "rm", "--force", NETWORK, check=False)

    # -- the image --

    def import_base_image(self, tag: str, site_packages: Path) -> None:
        if tag in self.podman("images", "--format", "{{.Repository}}:{{.Tag}}").split():
            return
        pour_base_image(["podman", *self.options], self.environment, tag, site_packages)

    def build(self, project: Path, tag: str, *flags: str) -> None:
        self.podman("build", "--network", "host", "--target", "train", "--tag", tag, *flags, ".", cwd=project)

    # -- pods --

    def play(self, documents: list[Object]) -> list[str]:
        """Start the pods of a Job, one for each index, and give their names."""
        names = []
        for index, pod in enumerate(self.pods(documents)):
            name = pod["metadata"]["name"]
            file = self.folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump(pod))
            self.podman("play", "kube", "--network", NETWORK, "--ip", address(index), str(file))
            names.append(name)
        return names

    def pods(self, documents: list[Object]) -> list[Object]:
        job = of_kind(documents, "Job")
        config = of_kind(documents, "ConfigMap")["data"]
        name, spec = job["metadata"]["name"], job["spec"]
        services = [document["metadata"]["name"] for document in documents if document["kind"] == "Service"]
        found = []
        for index in range(spec["completions"]):
            template = copy.deepcopy(spec["template"])
            pod = template["spec"]
            assert services == [pod["subdomain"]], "the Service that gives them names"
            hosts = {f"{name}-{one}.{pod['subdomain']}": address(one) for one in range(spec["completions"])}
            pod["hostAliases"] = [{"ip": ip, "hostnames": [host]} for host, ip in hosts.items()]
            [container] = pod["containers"]
            container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
            container["env"].append({"name": "HOSTNAME", "value": f"{name}-{index}"})
            container["imagePullPolicy"] = "Never"
            self._mount_config(pod, container, config)
            metadata = {"name": f"{name}-{index}", "labels": template["metadata"]["labels"]}
            found.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
        return found

    def _mount_config(self, pod: Object, container: Object, config: dict[str, str]) -> None:
        """One file of a ConfigMap (subPath) is a file that the kubelet writes; this Podman does not."""
        for number, mount in enumerate(mount for mount in container["volumeMounts"] if "subPath" in mount):
            file = self.folder / mount["subPath"]
            file.write_text(config[mount.pop("subPath")])
            mount["name"] = f"config-{number}"
            pod["volumes"].append({"name": mount["name"], "hostPath": {"path": str(file), "type": "File"}})
        pod["volumes"] = [volume for volume in pod["volumes"] if "configMap" not in volume]

    def wait(self, names: list[str], seconds: float = 300) -> list[int]:
        """The exit codes of their containers, in this order."""
        deadline = time.monotonic() + seconds
        while True:
            states = [self.state(name) for name in names]
            if all(state["Status"] == "exited" for state in states):
                return [int(state["ExitCode"]) for state in states]
            logs = "\n".join(self.log(name) for name in names)
            assert time.monotonic() < deadline, f"still running: {states}\n{logs}"
            time.sleep(0.3)

    def state(self, name: str) -> Object:
        found: Object = json.loads(self.podman("inspect", "--format", "{{json .State}}", f"{name}-train"))
        return found

    def log(self, name: str) -> str:
        return self.podman("logs", f"{name}-train", check=False)

    def remove(self, names: list[str]) -> None:
        self.podman("pod", "rm", "--force", *names)

    def volume(self, claim: str) -> Path:
        return Path(self.podman("volume", "inspect", "--format", "{{.Mountpoint}}", claim))


def address(index: int) -> str:
    return f"{SUBNET}.{10 + index}"
