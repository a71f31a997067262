"""What a manifest must be besides valid: rules that no schema knows, each as a sentence about what is wrong."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

QUANTITY = re.compile(r"[1-9]\d*(m|Mi|Gi|Ti)?")
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
HOST = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")

SAVED, TERMINATED, MISUSED = 75, 143, 2


def read(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def kustomize(folder: Path) -> list[Object]:
    """What kubectl itself makes of a folder with a kustomization."""
    done = subprocess.run(
        ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return read(done.stdout)


def of_kind(documents: list[Object], kind: str) -> Object:
    [found] = [document for document in documents if document["kind"] == kind]
    return found


def pod_of(documents: list[Object]) -> Object:
    """The specification of the pods that train."""
    return job_of(documents)["template"]["spec"]


def job_of(documents: list[Object]) -> Object:
    """The specification of the Job: its own, or that which Kubeflow makes it from."""
    kinds = {document["kind"] for document in documents}
    if "TrainingRuntime" not in kinds:
        return of_kind(documents, "Job")["spec"]
    [replicated] = of_kind(documents, "TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def problems(documents: list[Object], machines: int, gpus: int, grace: int, claim: str = "") -> list[str]:
    """All that is wrong with the manifests of a project; `claim` is one that exists."""
    found = list(_names(documents))
    job = job_of(documents)
    found += _job(job, machines)
    found += _pod(job["template"]["spec"], gpus, grace)
    found += _references(documents, machines, claim)
    return found


def _names(documents: list[Object]) -> Iterator[str]:
    for document in documents:
        kind, name = document["kind"], document["metadata"]["name"]
        if not LABEL.fullmatch(name):
            yield f"{kind} cannot be called {name}"
        if kind == "Job" and len(name) > 52:
            yield f"the name of the Job, {name}, leaves no room for those of its pods"
        if kind == "Service" and not HOST.fullmatch(name):
            yield f"a host cannot be called {name}"
        metadata = [document["metadata"]]
        if kind in ("Job", "TrainingRuntime"):
            metadata.append(job_of(documents)["template"]["metadata"])
        for labels in (each.get("labels", {}) for each in metadata):
            for key, value in labels.items():
                if not isinstance(value, str) or not KEY.fullmatch(key) or not VALUE.fullmatch(value):
                    yield f"{kind} cannot have the label {key}={value!r}"
            if labels.get("app.kubernetes.io/name") is None and "trainer.kubeflow.org/framework" not in labels:
                yield f"{kind} does not say which project it belongs to"


def _job(job: Object, machines: int) -> Iterator[str]:
    if "ttlSecondsAfterFinished" in job:  # a Job's own; Kubeflow sets the rest from the TrainJob
        if job.get("completionMode") != "Indexed":
            yield "the pods get no number"
        if not job.get("completions") == job.get("parallelism") == machines:
            yield "as many pods as machines must run at the same time"
    if job["template"]["spec"].get("restartPolicy") != "Never":
        yield "podFailurePolicy needs restartPolicy Never"
    if not 3 * machines <= job.get("backoffLimit", 6) <= 10 * machines:
        yield "backoffLimit must survive three crashes that end all pods, and not go on for ever"
    if job.get("podReplacementPolicy") != "Failed":
        yield "a new pod may start while the old one saves"
    rules = job.get("podFailurePolicy", {}).get("rules", [])
    names = {container["name"] for container in job["template"]["spec"]["containers"]}
    for rule in rules:
        codes = rule.get("onExitCodes")
        if rule["action"] not in ("Ignore", "FailJob", "Count"):
            yield f"{rule['action']} is no action of this Job"
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "a rule looks at exit codes or at conditions"
        if codes and (codes.get("containerName", "train") not in names or 0 in codes["values"]):
            yield "a rule about exit codes names no container, or success"
        if codes and codes["values"] != sorted(set(codes["values"])):
            yield "exit codes must be sorted"
        for condition in rule.get("onPodConditions", []):
            if not isinstance(condition.get("status"), str):
                yield "the status of a condition must be text"
    if not any(
        rule["action"] == "Ignore" and condition["type"] == "DisruptionTarget"
        for rule in rules
        for condition in rule.get("onPodConditions", [])
    ):
        yield "disruptions count as failures"
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    if by_code != {SAVED: "Ignore", TERMINATED: "Ignore", MISUSED: "FailJob"}:
        yield "exit codes do not mean what docs/checkpoints.md says"


def _pod(pod: Object, gpus: int, grace: int) -> Iterator[str]:
    if pod.get("terminationGracePeriodSeconds") != grace + 30:
        yield "the grace period is not the time to save and some to end"
    if pod.get("automountServiceAccountToken") is not False:
        yield "a token for the cluster is mounted"
    context = pod.get("securityContext", {})
    if not (context.get("runAsNonRoot") is True and context.get("runAsUser", 0) >= 10001 <= context["runAsGroup"]):
        yield "the pod may run as root, or as a user of the node"
    if context.get("fsGroup") != 10001 or context.get("fsGroupChangePolicy") != "OnRootMismatch":
        yield "volumes belong to somebody else"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "no seccomp profile"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    if len(volumes) != len(pod["volumes"]):
        yield "two volumes have one name"
    [container] = pod["containers"]
    yield from _container(container, gpus)
    mounts = container["volumeMounts"]
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"there is no volume {mount['name']}"
    unused = volumes.keys() - {mount["name"] for mount in mounts}
    if unused:
        yield f"nothing mounts {', '.join(sorted(unused))}"
    paths = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in mounts}
    if len(paths) != len(mounts):
        yield "two volumes are mounted on one path"
    for path in ("/checkpoints", "/data", "/dev/shm", "/cache", "/tmp"):
        if path not in paths:
            yield f"{path} is not mounted"
    if "persistentVolumeClaim" not in paths.get("/checkpoints", {}):
        yield "checkpoints do not outlive the pod"
    shm = paths.get("/dev/shm", {}).get("emptyDir", {})
    memory = container["resources"]["limits"]["memory"]
    if shm.get("medium") != "Memory" or not QUANTITY.fullmatch(str(shm.get("sizeLimit"))):
        yield "/dev/shm is not a memory of a certain size"
    elif int(shm["sizeLimit"].removesuffix("Gi")) + 4 > int(memory.removesuffix("Gi")):
        yield "/dev/shm counts as memory, and leaves too little of it"
    for toleration in pod.get("tolerations", []):
        if ("value" in toleration) != (toleration.get("operator") == "Equal"):
            yield "a toleration compares with nothing, or has a value that it ignores"
    for key, value in pod.get("nodeSelector", {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            yield f"the node selector {key} is not text"


def _container(container: Object, gpus: int) -> Iterator[str]:
    for variable in container.get("env", []):
        if not isinstance(variable.get("value"), str):
            yield f"the value of {variable['name']} is not text"
        if re.search("KEY|TOKEN|PASSWORD|SECRET", variable["name"]):
            yield f"{variable['name']} belongs in a Secret"
    for source in container.get("envFrom", []):
        if source["secretRef"].get("optional") is not True:
            yield "a Secret that need not be there is needed"
    for word in [*container.get("command", []), *container.get("args", [])]:
        if not isinstance(word, str):
            yield f"{word!r} of the command is not text"
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "the container may gain rights"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "the container has capabilities"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "the container can change its image"
    requests, limits = (container["resources"][name] for name in ("requests", "limits"))
    for quantity in [*requests.values(), *limits.values()]:
        if not QUANTITY.fullmatch(str(quantity)):
            yield f"{quantity} is no quantity"
    if not requests.get("nvidia.com/gpu", 0) == limits.get("nvidia.com/gpu", 0) == gpus:
        yield "GPUs asked for and allowed must be those of the machine"
    if requests.get("memory") != limits.get("memory"):
        yield "memory asked for and allowed must be the same"
    if not re.search(r":[\w.-]+$", container["image"]) or container["image"].endswith(":latest"):
        yield "the image has no tag"


def _references(documents: list[Object], machines: int, claim: str) -> Iterator[str]:
    pod = pod_of(documents)
    there = {kind: {one["metadata"]["name"]: one for one in documents if one["kind"] == kind} for kind in
             ("ConfigMap", "PersistentVolumeClaim", "Service")}  # fmt: skip
    keys: set[str] = set()
    for volume in pod["volumes"]:
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            if name not in there["ConfigMap"]:
                yield f"there is no ConfigMap {name}"
            else:
                keys |= there["ConfigMap"][name]["data"].keys()
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            if name not in there["PersistentVolumeClaim"] and name != claim:
                yield f"there is no claim {name}"
    mounted = {mount["subPath"]: mount for mount in pod["containers"][0]["volumeMounts"] if "subPath" in mount}
    if mounted.keys() != keys:
        yield "not all of the configuration is mounted"
    for key, mount in mounted.items():
        if mount["mountPath"] != f"/workspace/{key}":
            yield f"{key} is not where the project looks for it"
    for volume in there["PersistentVolumeClaim"].values():
        modes = volume["spec"]["accessModes"]
        if modes != (["ReadWriteMany"] if machines > 1 else ["ReadWriteOncePod"]):
            yield f"a volume for {machines} machines cannot be {modes}"
        if not QUANTITY.fullmatch(str(volume["spec"]["resources"]["requests"]["storage"])):
            yield "the size of the volume is no quantity"
    kinds = {document["kind"] for document in documents}
    if "TrainingRuntime" in kinds:
        yield from _trainjob(documents, machines)
        return  # Kubeflow makes a Service for each TrainJob
    if (machines > 1) != bool(there["Service"]) or (machines > 1) != ("subdomain" in pod):
        yield "several machines, and only they, need a Service by which they find each other"
    for name, service in there["Service"].items():
        if service["spec"].get("clusterIP") != "None" or service["spec"].get("publishNotReadyAddresses") is not True:
            yield "the Service does not give names to pods that are about to start"
        variables = {one["name"]: one["value"] for one in pod["containers"][0].get("env", [])}
        if not name == pod.get("subdomain") == variables.get("MACHINES_SERVICE"):
            yield "pod and launch.sh look for another Service"
        labels = job_of(documents)["template"]["metadata"]["labels"]
        if not service["spec"]["selector"].items() <= labels.items():
            yield "the Service does not select the pods"


def _trainjob(documents: list[Object], machines: int) -> Iterator[str]:
    runtime, trainjob = of_kind(documents, "TrainingRuntime"), of_kind(documents, "TrainJob")
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    if trainjob["spec"]["runtimeRef"] != reference:
        yield "the TrainJob is of another runtime"
    policy, trainer = runtime["spec"]["mlPolicy"], trainjob["spec"]["trainer"]
    if "torch" not in policy or not policy["numNodes"] == trainer["numNodes"] == machines:
        yield "as many nodes as machines must be told where they meet"
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") != "trainer" or replicated["name"] != "node":
        yield "Kubeflow does not find the pods that train"
    if [container["name"] for container in pod_of(documents)["containers"]] != ["node"]:
        yield "Kubeflow puts the command into the container called node"
    if len(trainjob["metadata"]["name"]) > 43:
        yield "the name of the TrainJob leaves no room for those of its pods"
