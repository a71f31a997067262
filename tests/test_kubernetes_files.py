"""What Kubernetes projects do where no cluster is.

Manifests go through kubectl's own kustomize or Helm's own engine, the schemas of Kubernetes and the rules that these
do not know. For what `make submit` and the others say to a cluster, a stand-in for kubectl writes it down and answers.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from kubeflow_trainer_api import models  # type: ignore[import-untyped]
from kubernetes_validate.utils import all_versions  # type: ignore[import-untyped]

from tests.support.manifests import Object, job_of, kustomize, of_kind, pod_of, problems, read
from tests.support.render import Answers, Renderer
from tests.test_files import write
from tests.test_slurm_files import executable, run

KUBERNETES: Answers = {"deployment": "kubernetes", "gpu": "h100", "num_gpus": 8, "num_machines": 2}
NEWEST = all_versions()[-3:]
KUBEFLOW = "trainer.kubeflow.org/v1alpha1"


class Manifests:
    """The manifests of one variant, as kubectl would apply them, and what the answers ask of them."""

    def __init__(self, renderer: Renderer, answers: Answers, folder: Path) -> None:
        self.given = answers
        self.answers = renderer.answer(answers)
        wanted = ("kubernetes/", "accelerate_config")
        contents = {name: file for name, file in renderer.contents(answers).items() if name.startswith(wanted)}
        self.folder = write(contents, folder)
        self.documents = self.release({}) if self.kind == "helm" else kustomize(folder / "kubernetes")

    @property
    def kind(self) -> str:
        return str(self.answers["manifest_kind"])

    def release(self, values: Answers) -> list[Object]:
        """What the chart makes of these values, beside those that `make submit` gives it."""
        files = {"gpu": "accelerate_config.yaml", "cpu": "accelerate_config.cpu.yaml"}
        config = {key: (self.folder / name).read_text() for key, name in files.items()}
        with helm_python.Chart.load(self.folder / "kubernetes/chart") as chart:
            name, namespace = f"{self.answers['project_slug']}-main", self.answers["namespace"] or "default"
            rendered = chart.render({"config": config} | values, name=name, namespace=namespace)
        return [document for text in rendered.values() for document in read(text)]

    @property
    def machines(self) -> int:
        return int(self.answers.get("num_machines", 1))

    @property
    def gpus(self) -> int:
        return int(self.answers.get("num_gpus", 0))

    def problems(self, documents: list[Object] | None = None) -> list[str]:
        grace = self.answers["preemption_grace_seconds"]
        claim = self.answers["data_claim"]
        return problems(self.documents if documents is None else documents, self.machines, self.gpus, grace, claim)


@pytest.fixture(scope="module")
def manifests(renderer: Renderer, variants: list[Answers], tmp_path_factory: pytest.TempPathFactory) -> list[Manifests]:
    """Those of every variant of the list."""
    root = tmp_path_factory.mktemp("manifests")
    wanted = [answers for answers in variants if answers.get("deployment") == "kubernetes"]
    assert len(wanted) > 10
    return [Manifests(renderer, answers, root / f"{number:03}") for number, answers in enumerate(wanted)]


def make(renderer: Renderer, tmp_path: Path, **answers: Any) -> Manifests:
    return Manifests(renderer, KUBERNETES | answers, tmp_path / "project")


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from differences(first, second, f"{path}/{number}")
    elif one != other:
        yield f"{path}: {one!r} became {other!r}"


def validate_by_kubeflow(document: Object) -> None:
    """Its models leave out what they do not know, so all must come back; and the Job inside is Kubernetes' own."""
    model: Any = getattr(models, f"TrainerV1alpha1{document['kind']}")
    assert list(differences(document, model.from_dict(document).to_dict())) == []
    if document["kind"] == "TrainingRuntime":
        [replicated] = document["spec"]["template"]["spec"]["replicatedJobs"]
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "a"},
            "spec": replicated["template"]["spec"],
        }
        validate([job])


def validate(documents: list[Object]) -> None:
    for document in documents:
        if document["apiVersion"] == KUBEFLOW:
            validate_by_kubeflow(document)
            continue
        for version in NEWEST:
            kubernetes_validate.validate(document, version, strict=True)


# -- manifests --------------------------------------------------------------------------------------------------------


def test_schemas(manifests: list[Manifests]):
    seen = []
    for documents in (each.documents for each in manifests):
        new = [document for document in documents if document not in seen]
        validate(new)
        seen += new


def test_rules_that_schemas_do_not_know(manifests: list[Manifests]):
    for each in manifests:
        assert each.problems() == [], each.given


def test_manifests_are_made_of_what_is_expected(manifests: list[Manifests]):
    for each in manifests:
        kinds = {(document["apiVersion"], document["kind"]) for document in each.documents}
        expected = {("v1", "ConfigMap"), ("v1", "PersistentVolumeClaim")}
        if each.kind == "kubeflow":
            expected |= {(KUBEFLOW, "TrainJob"), (KUBEFLOW, "TrainingRuntime")}
        else:
            expected |= {("batch/v1", "Job")} | ({("v1", "Service")} if each.machines > 1 else set())
        assert kinds == expected
        namespaces = {document["metadata"].get("namespace", "") for document in each.documents}
        assert namespaces == {"" if each.kind == "helm" else each.answers["namespace"]}


def test_what_a_job_asks_for(renderer: Renderer, tmp_path: Path):
    made = make(
        renderer,
        tmp_path,
        **{"namespace": "ml", "storage_class": "fast", "volume_size": "2Ti", "data_claim": "datasets"},
        **{"image_pull_secret": "key", "priority_class": "low", "queue": "research", "shm_size": "64gb"},
        **{"node_selector": "gpu.example.com/model=h100,on=true", "tolerations": "spot=true:NoExecute,gpu:NoSchedule"},
        **{"preemption_grace_seconds": 300, "image_registry": "registry.example.com:5000/team"},
    )
    job, pod = of_kind(made.documents, "Job"), pod_of(made.documents)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert pod["priorityClassName"] == "low"
    assert pod["imagePullSecrets"] == [{"name": "key"}]
    assert pod["nodeSelector"] == {"gpu.example.com/model": "h100", "on": "true"}
    assert pod["tolerations"] == [
        {"key": "spot", "operator": "Equal", "value": "true", "effect": "NoExecute"},
        {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
    ]
    assert pod["terminationGracePeriodSeconds"] == 330
    [container] = pod["containers"]
    assert container["image"].startswith("registry.example.com:5000/team/my-project:v0.1.0-torch")
    assert container["imagePullPolicy"] == "Always"
    # Three quarters of what a Slurm job asks for, and /dev/shm.
    assert container["resources"]["requests"] == {"cpu": "72", "memory": f"{480 + 64}Gi", "nvidia.com/gpu": 8}
    volume = of_kind(made.documents, "PersistentVolumeClaim")
    assert volume["metadata"]["name"] == "my-project-checkpoints"
    assert volume["spec"]["storageClassName"] == "fast"
    assert volume["spec"]["resources"]["requests"]["storage"] == "2Ti"
    data = {volume["name"]: volume for volume in pod["volumes"]}["data"]
    assert data["persistentVolumeClaim"] == {"claimName": "datasets", "readOnly": True}


def test_names_for_every_slug(renderer: Renderer, tmp_path: Path):
    for slug in ("0-9", "123", "no", "1e5", "x" * 40, "9" * 40):
        made = Manifests(renderer, KUBERNETES | {"project_slug": slug}, tmp_path / slug)
        assert made.problems() == []
        validate(made.documents)


# One fault each, as people make them: the schemas or the rules must find it.
FAULTS: dict[str, Callable[[list[Object]], Any]] = {
    "no shm": lambda all: pod_of(all)["containers"][0]["volumeMounts"].remove({"name": "shm", "mountPath": "/dev/shm"}),
    "shm on a disk": lambda all: pod_of(all)["volumes"][3]["emptyDir"].pop("medium"),
    "shm as large as the memory": lambda all: pod_of(all)["volumes"][3]["emptyDir"].update(sizeLimit="640Gi"),
    "restartPolicy OnFailure": lambda all: pod_of(all).update(restartPolicy="OnFailure"),
    "a number as a variable": lambda all: pod_of(all)["containers"][0]["env"].append({"name": "A", "value": 1}),
    "no fsGroup": lambda all: pod_of(all)["securityContext"].pop("fsGroup"),
    "ReadWriteOnce": lambda all: of_kind(all, "PersistentVolumeClaim")["spec"].update(accessModes=["ReadWriteOnce"]),
    "GiB": lambda all: of_kind(all, "PersistentVolumeClaim")["spec"]["resources"]["requests"].update(storage="1GiB"),
    "fewer GPUs allowed": lambda all: pod_of(all)["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": 4}),
    "a short grace": lambda all: pod_of(all).update(terminationGracePeriodSeconds=30),
    "root": lambda all: pod_of(all)["securityContext"].update(runAsUser=0),
    "disruptions count": lambda all: job_of(all)["podFailurePolicy"]["rules"].pop(0),
    "an unknown action": lambda all: job_of(all)["podFailurePolicy"]["rules"][0].update(action="Retry"),
    "a volume that is not there": lambda all: pod_of(all)["volumes"].pop(),
    "another Service": lambda all: of_kind(all, "Service")["metadata"].update(name="other"),
    "an address of its own": lambda all: of_kind(all, "Service")["spec"].pop("clusterIP"),
    "one pod at a time": lambda all: job_of(all).update(parallelism=1),
    "no numbers": lambda all: job_of(all).pop("completionMode"),
    "one retry": lambda all: job_of(all).update(backoffLimit=1),
    "a misspelt key": lambda all: pod_of(all).update(terminationGracePeriod=150),
    "a long name": lambda all: of_kind(all, "Job")["metadata"].update(name="x" * 53),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(renderer: Renderer, tmp_path: Path, fault: str):
    made = make(renderer, tmp_path)
    assert made.problems() == []
    documents = copy.deepcopy(made.documents)
    FAULTS[fault](documents)
    assert documents != made.documents
    try:
        validate(documents)
    except kubernetes_validate.ValidationError:
        return
    assert made.problems(documents)


# -- the chart --------------------------------------------------------------------------------------------------------


def comparable(documents: list[Object]) -> dict[str, Any]:
    """What the kinds say alike: without the names that they make themselves."""
    job = copy.deepcopy(job_of(documents))
    job["template"]["metadata"].pop("annotations", None)
    pod = job["template"]["spec"]
    pod["volumes"][0]["configMap"]["name"] = "config"
    if "subdomain" in pod:
        pod["subdomain"] = pod["containers"][0]["env"][0]["value"] = "service"
    config, volume = of_kind(documents, "ConfigMap"), of_kind(documents, "PersistentVolumeClaim")
    found: dict[str, Any] = {"job": job, "config": config["data"]}
    found |= {"volume": volume["spec"], "claim": volume["metadata"]["name"]}
    found["queue"] = of_kind(documents, "Job")["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
    services = [document["spec"] for document in documents if document["kind"] == "Service"]
    return found | {"services": [{**service, "selector": None} for service in services]}


def test_the_chart_says_what_the_plain_kind_says(renderer: Renderer, manifests: list[Manifests], tmp_path: Path):
    charts = [each for each in manifests if each.kind == "helm"]
    assert len(charts) > 5
    for number, each in enumerate(charts):
        plain = Manifests(renderer, each.given | {"manifest_kind": "job"}, tmp_path / str(number))
        assert comparable(each.documents) == comparable(plain.documents), each.given


def test_charts_pass_helm_lint(manifests: list[Manifests]):
    for each in manifests:
        if each.kind == "helm":
            found = helm_python.lint(each.folder / "kubernetes/chart", strict=True)
            assert not found["errors"], found
            assert {message["error"] for message in found["messages"]} <= {"icon is recommended"}


def test_other_values_make_another_job_and_keep_the_volume(renderer: Renderer, tmp_path: Path):
    made = make(renderer, tmp_path, manifest_kind="helm")
    other = made.release({"args": ["train", "--epochs", "3"]})
    jobs = [of_kind(documents, "Job")["metadata"]["name"] for documents in (made.documents, made.release({}), other)]
    assert jobs[0] == jobs[1] != jobs[2]
    config = made.release({"config": {"gpu": "num_processes: 8", "cpu": ""}})
    assert of_kind(config, "Job")["metadata"]["name"] != jobs[0], "the configuration counts too"
    volume = of_kind(other, "PersistentVolumeClaim")
    assert volume == of_kind(made.documents, "PersistentVolumeClaim")
    assert volume["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize(
    "values",
    [
        {"machine": 2},
        {"machines": "2"},
        {"machines": 0},
        {"resources": {"gpus": 8.5}},
        {"resources": {"memory": "64GiB"}},
        {"resources": {"disk": "1Gi"}},
        {"image": {"tag": ""}},
        {"image": {"tag": "latest"}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"args": []},
        {"args": ["train", 3]},
        {"args": "train"},
        {"shmSize": "16gb"},
        {"stopSeconds": 5},
        {"checkpoints": {"claim": "A_b"}},
        {"checkpoints": {"accessMode": "ReadWriteOnce"}},  # of two machines
        {"nodeSelector": {"on": True}},
        {"tolerations": [{"key": "a", "operator": "Equals", "effect": "NoSchedule"}]},
        {"queue": "A B"},
    ],
    ids=str,
)
def test_bad_values_are_refused(renderer: Renderer, tmp_path: Path, values: Answers):
    made = make(renderer, tmp_path, manifest_kind="helm")
    with pytest.raises(helm_python.HelmError, match="don't meet the specifications of the schema"):
        made.release(values)


# -- launch.sh --------------------------------------------------------------------------------------------------------


def test_only_launch_sh_knows_what_kubernetes_says(renderer: Renderer, variants: list[Answers]):
    for answers in variants:
        files = renderer.contents(answers) if answers.get("deployment") == "kubernetes" else {}
        knows = [name for name, (text, _) in files.items() if re.search(rb"\$\{?(JOB_COMPLETION_INDEX|PET_)", text)]
        assert knows == (["launch.sh"] if answers.get("num_machines", 1) > 1 else []) or not files


@pytest.fixture
def launched(renderer: Renderer, tmp_path: Path) -> Callable[..., list[str]]:
    """What launch.sh passes on in a pod of these answers, or says; getent knows the hosts that are named."""

    def launch(code: int = 0, hosts: str = "", kind: str = "job", **environment: str) -> list[str]:
        project = renderer.render(KUBERNETES | {"manifest_kind": kind}, tmp_path / "project")
        for name in ("python", "accelerate"):
            executable(project / ".venv/bin" / name, 'printf "%s\\n" "$@"\nenv\n')
        known = "|".join(hosts.split()) or "nobody"
        executable(tmp_path / "bin/getent", f"case $2 in {known}) ;; *) exit 2 ;; esac\n")
        variables = {"HOSTNAME": "my-project-wide-1", "MACHINES_SERVICE": "my-project"} | environment
        path = f"{tmp_path}/bin:/usr/bin:/bin"
        return run("./launch.sh", "train", "--epochs", "3", cwd=project, code=code, path=path, environment=variables)

    return launch


def test_a_pod_knows_its_machine(launched: Callable[..., list[str]]):
    address = "my-project-wide-0.my-project"
    lines = launched(hosts=address, JOB_COMPLETION_INDEX="1")
    assert lines[0] == f"machine 1 of 2 (the first is 0), waiting for the others at {address}:29500"
    assert lines[lines.index("--machine_rank") + 1] == "1"
    assert lines[lines.index("--main_process_ip") + 1] == address
    assert lines[lines.index("--main_process_port") + 1] == "29500"
    begin = lines.index("my_project.train")
    assert lines[begin : begin + 3] == ["my_project.train", "--epochs", "3"]


def test_a_pod_of_kubeflow_knows_its_machine(launched: Callable[..., list[str]]):
    """It is a pod of an Indexed Job too, whose names are others; what torch would read itself is gone."""
    address = "wide-node-0-0.wide"
    pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1"}
    pet |= {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1"}
    lines = launched(hosts=address, kind="kubeflow", **pet)
    assert lines[lines.index("--machine_rank") + 1] == "1"
    assert lines[lines.index("--main_process_ip") + 1] == address
    assert lines[lines.index("--main_process_port") + 1] == "29400"
    assert not [line for line in lines if line.startswith("PET_")]


def test_a_pod_waits_for_machine_0_but_not_for_ever(launched: Callable[..., list[str]]):
    assert launched(code=1, JOB_COMPLETION_INDEX="1", MACHINE_WAIT_SECONDS="1") == [
        "error: machine 0 (my-project-wide-0.my-project) has no address after 1 seconds: make status shows what its "
        "pod waits for"
    ]


def test_without_kubernetes_the_machines_are_told(launched: Callable[..., list[str]]):
    lines = launched(MACHINE_RANK="0", MAIN_PROCESS_IP="10.0.0.1")
    assert lines[lines.index("--main_process_ip") + 1] == "10.0.0.1"


# -- jobs.sh ----------------------------------------------------------------------------------------------------------

RUNNING = "{status: {}}"
DONE = '{status: {conditions: [{type: SuccessCriteriaMet, status: "True"}, {type: Complete, status: "True"}]}}'
FAILED = '{status: {conditions: [{type: Complete, status: "False"}, {type: Failed, status: "True"}]}}'
STOPPING = '{metadata: {name: x, deletionTimestamp: "2026-01-01T00:00:00Z"}, status: {}}'

# Answers as a cluster does, where the test says so, and writes down what it was asked. kustomize and jsonpath are
# the real ones.
KUBECTL = r"""
fake={fake} real={real}
case " $* " in *" kustomize "*) exec "$real" "$@" ;; esac
printf '%s\n' "$*" >>"$fake/calls"
if [[ -f $fake/refusal ]]; then cat "$fake/refusal" >&2; exit 1; fi
case " $* " in
*" apply "*) cat >"$fake/applied"; echo "job.batch/x created" ;;
*" get job "* | *" get trainjob "*)
  [[ ! -f $fake/job ]] || exec "$real" annotate --local --filename "$fake/job" a=b --output "${{!#}}" ;;
*" get pods "*index=0*) cat "$fake/pods" 2>/dev/null ;;
*" get pods "*Unschedulable*) echo "a-0: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu." ; echo "a-1: " ;;
*" get pods "*) cat "$fake/pods" 2>/dev/null ;;
*" get jobs "*) [[ ! -f $fake/job ]] || cat "$fake/job" ;;
*" get jobs,pods "* | *" get trainjobs,pods "*) cat "$fake/table" 2>/dev/null || echo "No resources found." >&2 ;;
*" get events "*) printf '%s\n' "my-project-a: exceeded quota" "other-b: no" ;;
*" logs "*) echo "step 1" ;;
*" delete "*) rm -f "$fake/job"; echo "deleted" ;;
*" exec "*tensorboard*) until grep -q port-forward "$fake/calls"; do sleep 0.1; done ;;
*" exec "*) echo "in the pod" ;;
esac
exit 0
"""

HELM = r"""
fake={fake}
printf 'helm %s\n' "$*" >>"$fake/calls"
if [[ -f $fake/refusal ]]; then cat "$fake/refusal" >&2; exit 1; fi
while (($#)); do
  case $1 in
  --values) cp "$2" "$fake/values" ;;
  template) echo "what Helm makes of it" ;;
  uninstall) rm -f "$fake/job" ;;
  esac
  shift
done
"""


class Cluster:
    """A project beside a stand-in for a cluster."""

    def __init__(self, renderer: Renderer, folder: Path, **answers: Any) -> None:
        self.folder = renderer.render(KUBERNETES | answers, folder / "project")
        self.fake = folder / "fake"
        self.fake.mkdir()
        real = shutil.which("kubectl")
        assert real
        executable(folder / "bin/kubectl", KUBECTL.format(fake=self.fake, real=real))
        executable(folder / "bin/helm", HELM.format(fake=self.fake))
        self.path = f"{folder}/bin:/usr/bin:/bin"

    def answers(self, name: str, text: str) -> None:
        (self.fake / name).write_text(text + "\n")

    def job(self, state: str) -> None:
        empty = "template: {spec: {restartPolicy: Never, containers: [{name: a, image: b}]}}"
        metadata = "" if "metadata" in state else "metadata: {name: x}, "
        self.answers("job", f"{{apiVersion: batch/v1, kind: Job, {metadata}spec: {{{empty}}}, {state[1:]}")

    def make(self, *arguments: str, code: int = 0, **environment: str) -> list[str]:
        return run("make", "--no-print-directory", *arguments, cwd=self.folder, code=code, path=self.path,
                   environment=environment)  # fmt: skip

    def refused(self, *arguments: str, **environment: str) -> str:
        lines = self.make(*arguments, code=2, **environment)
        [sentence] = [line for line in lines if line.startswith("error: ")]
        return sentence.removeprefix("error: ")

    @property
    def calls(self) -> list[str]:
        path = self.fake / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def applied(self) -> list[Object]:
        return read((self.fake / "applied").read_text())


@pytest.fixture
def cluster(renderer: Renderer, tmp_path: Path) -> Cluster:
    return Cluster(renderer, tmp_path, namespace="ml", queue="research")


def test_submit(cluster: Cluster):
    lines = cluster.make("submit", "RUN=wide", "ARGS=--data.name '$$HOME;`id` \"a' --epochs 3")
    assert lines[-2] == "job my-project-wide runs train of run 'wide'"
    assert "kubectl --namespace ml apply --filename -" in lines, "what it runs"
    job, pod = of_kind(cluster.applied, "Job"), pod_of(cluster.applied)
    assert job["metadata"]["name"] == "my-project-wide"
    labels = job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]
    assert all(one["app.kubernetes.io/instance"] == "my-project-wide" for one in labels)
    assert pod["containers"][0]["command"] == ["./launch.sh"]
    config = ["train", "--config", "configs/train.yaml", "--run_name", "wide"]
    assert pod["containers"][0]["args"] == [*config, "--data.name", '$HOME;`id` "a', "--epochs", "3"]
    assert {document["metadata"]["namespace"] for document in cluster.applied} == {"ml"}
    assert problems(cluster.applied, 2, 8, 120) == []
    validate(cluster.applied)
    assert not list(cluster.folder.glob(".submit.*")), "nothing is left behind"


def test_submit_shows_what_it_would_apply(cluster: Cluster):
    lines = cluster.make("submit", "RUN=wide", "DRY_RUN=yes", "IMAGE_TAG=mine")
    assert cluster.calls == [], "the cluster is not asked"
    shown = read("\n".join(line for line in lines if not line.startswith(("kubectl", "kubernetes/jobs.sh"))))
    assert of_kind(shown, "Job")["metadata"]["name"] == "my-project-wide"
    assert pod_of(shown)["containers"][0]["image"] == "my-project:mine"


def test_a_rehearsal_needs_no_gpu_and_one_machine(cluster: Cluster):
    cluster.make("submit", "CPU=yes", "CONFIG=configs/smoke.yaml")
    job = job_of(cluster.applied)
    assert (job["completions"], job["parallelism"]) == (1, 1)
    [container] = pod_of(cluster.applied)["containers"]
    assert container["args"] == ["--cpu", "train", "--config", "configs/smoke.yaml", "--run_name", "smoke"]
    assert "nvidia.com/gpu" not in str(container["resources"])
    validate(cluster.applied)


@pytest.mark.parametrize(
    ("run", "name"),
    [("wide", "my-project-wide"), ("Wide", "my-project-wide-"), ("a_b.c", "my-project-a-b-c-"), ("x" * 50, "")],
)
def test_names_of_jobs(cluster: Cluster, run: str, name: str):
    cluster.make("submit", f"RUN={run}")
    found = of_kind(cluster.applied, "Job")["metadata"]["name"]
    assert found.startswith(name) and len(found) <= 43
    assert (found == name) == (run == "wide"), "runs of different names have jobs of different names"
    assert problems(cluster.applied, 2, 8, 120) == []


def test_submit_again(cluster: Cluster):
    cluster.job(RUNNING)
    assert cluster.refused("submit", "RUN=wide").startswith("run 'wide' has a job already, my-project-wide: make logs")
    cluster.job(STOPPING)
    assert "is being stopped and still saves" in cluster.refused("submit", "RUN=wide")
    for state in (DONE, FAILED):
        cluster.job(state)
        cluster.make("submit", "RUN=wide")
        assert "--namespace ml delete job my-project-wide --ignore-not-found --cascade foreground" in cluster.calls


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["RUN=-a"], "the run cannot be called '-a' in Kubernetes"),
        (["RUN=" + "a" * 51], "use at most 50 letters"),
        (["CONFIG=configs/none.yaml"], "the configuration 'configs/none.yaml' does not exist"),
    ],
)
def test_refused_before_the_cluster_is_asked(cluster: Cluster, arguments: list[str], sentence: str):
    assert sentence in cluster.refused("submit", *arguments)
    assert cluster.calls == []


def test_options_are_looked_at_where_the_project_is_set_up(cluster: Cluster):
    executable(cluster.folder / ".venv/bin/accelerate", "")
    executable(cluster.folder / ".venv/bin/python", 'echo "error: checked $*"\nexit 1\n')
    said = cluster.refused("submit", "RUN=wide", "ARGS=--x 3")
    assert (
        said
        == "checked -m my_project.check_options --num_processes 16 --config configs/train.yaml --run_name wide --x 3"
    )
    assert cluster.refused("submit", "CPU=yes").startswith("checked -m my_project.check_options --num_processes 2 ")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            'E1203 07:34:34 1 memcache.go:381] "Unhandled Error"\n'
            "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
            "The connection to the server localhost:8080 was refused - did you specify the right host or port? "
            "(kubectl config current-context names the cluster, kubectl get pods tries it)",
        ),
        (
            'Error from server (NotFound): namespaces "ml" not found',
            "(make it: kubectl create namespace ml)",
        ),
        (
            'Error from server (Forbidden): jobs.batch is forbidden: User "a" cannot create resource',
            "(ask the people who run the cluster for the right to do this in your namespace)",
        ),
        (
            'The PersistentVolumeClaim "a" is invalid: spec: Forbidden: spec is immutable after creation',
            "(the claim my-project-checkpoints is there with other settings",
        ),
    ],
)
@pytest.mark.parametrize("target", ["submit", "status", "logs", "cancel"])
def test_a_cluster_that_refuses(cluster: Cluster, target: str, words: str, advice: str):
    cluster.answers("refusal", words)
    said = cluster.refused(target)
    assert said.startswith("the cluster does not do it: ") and advice in said


@pytest.mark.parametrize("target", ["submit", "resume", "status", "logs", "cancel", "shell", "checkpoints", "evaluate"])
def test_without_kubectl(cluster: Cluster, target: str, tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    for name in ("make", "bash", "env", "dirname", "sh"):
        (tmp_path / "nothing" / name).symlink_to(Path("/usr/bin", name))
    cluster.path = str(tmp_path / "nothing")
    assert cluster.refused(target).startswith(
        "kubectl was not found: install it (https://kubernetes.io/docs/tasks/tools)"
    )


def test_status(cluster: Cluster):
    assert cluster.make("status")[-1] == "this project has no job"
    cluster.answers("table", "NAME       STATUS\njob.batch/my-project-a   Running")
    lines = cluster.make("status")
    assert lines[-4:] == [
        "NAME       STATUS",
        "job.batch/my-project-a   Running",
        "a-0: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
        "my-project-a: exceeded quota",
    ]


def test_logs(cluster: Cluster):
    assert cluster.refused("logs", "RUN=wide").startswith("run 'wide' has no job: make status shows the jobs")
    cluster.job(RUNNING)
    cluster.answers("pods", "2026-01-02T my-project-wide-0-new Running\n2026-01-01T my-project-wide-0-old Failed")
    assert cluster.make("logs", "RUN=wide")[-2:] == [
        "kubectl --namespace ml logs --follow my-project-wide-0-new",
        "step 1",
    ]
    cluster.answers("pods", "2026-01-02T my-project-wide-0-new Pending")
    said = cluster.refused("logs", "RUN=wide", POD_WAIT_SECONDS="1")
    assert said == "the pod of job my-project-wide has not begun: make status shows what it waits for"


def test_cancel_and_resume(cluster: Cluster):
    assert cluster.refused("cancel", "RUN=wide").startswith("run 'wide' has no job")
    cluster.job(RUNNING)
    lines = cluster.make("cancel", "RUN=wide")
    delete = "kubectl --namespace ml delete job my-project-wide --ignore-not-found --cascade foreground --wait=false"
    assert delete in lines
    assert lines[-1].startswith("job my-project-wide saves and ends, in 150 seconds at most: make resume RUN=wide")
    cluster.make("resume", "RUN=wide")
    assert pod_of(cluster.applied)["containers"][0]["args"][-2:] == ["--resume", "latest"]


def test_a_shell_beside_the_run(cluster: Cluster):
    cluster.answers("pods", "2026-01-01T my-project-a-0-x Running\n2026-01-01T my-project-b-0-y Running")
    cluster.make("shell", "RUN=b")
    assert cluster.calls[-1] == "--namespace ml exec --stdin my-project-b-0-y --container train -- bash"
    assert not (cluster.fake / "applied").exists()


def test_a_pod_for_what_needs_the_volume(cluster: Cluster):
    """Where none runs, one without GPUs is made, and removed."""
    cluster.fake.joinpath("pods").write_text("")
    executable(cluster.folder.parent / "bin/sleep", f'echo "2026 my-project-shell-0-x Running" >{cluster.fake}/pods\n')
    lines = cluster.make("plot", "RUN=wide")
    assert (cluster.folder / "loss.png").read_text() == "in the pod\n", "nothing but the picture"
    assert any(line.startswith("job my-project-shell waits for a pod") for line in lines)
    assert [call.split()[2] for call in cluster.calls if " get " not in call] == ["apply", "exec", "delete"]
    job, [container] = job_of(cluster.applied), pod_of(cluster.applied)["containers"]
    assert (container["command"], container["args"]) == (["sleep"], ["3600"])
    assert job["completions"] == 1 and "nvidia.com/gpu" not in str(container["resources"])
    labels = job["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "shell", "the Service of the runs does not select it"


def test_modules_that_are_no_training(cluster: Cluster):
    cluster.make("evaluate", "RUN=wide")
    assert of_kind(cluster.applied, "Job")["metadata"]["name"] == "my-project-wide-evaluate"
    arguments = pod_of(cluster.applied)["containers"][0]["args"]
    assert arguments[:5] == ["evaluate", "--checkpoint", "best", "--config", "configs/train.yaml"]
    cluster.answers("pods", "2026 my-project-main-gpu-check-0-x Succeeded")
    assert cluster.make("gpu-check")[-1] == "step 1", "its log is followed"
    [container] = pod_of(cluster.applied)["containers"]
    assert container["command"] == ["scripts/run.sh"]
    assert container["args"][:3] == ["python", "-m", "my_project.gpu_check"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert job_of(cluster.applied)["backoffLimit"] == 0
    said = run("kubernetes/jobs.sh", "submit", "nonsense", cwd=cluster.folder, code=1, path=cluster.path)
    assert said == ["error: there is no module 'nonsense': name a file of src/my_project without its .py"]


# -- jobs.sh of a chart -----------------------------------------------------------------------------------------------


@pytest.fixture
def helm(renderer: Renderer, tmp_path: Path) -> Cluster:
    return Cluster(renderer, tmp_path, namespace="ml", manifest_kind="helm")


def values(cluster: Cluster) -> Answers:
    found: Answers = yaml.safe_load((cluster.fake / "values").read_text())
    return found


def test_submit_a_release(helm: Cluster, renderer: Renderer, tmp_path: Path):
    lines = helm.make("submit", "RUN=wide", "ARGS=--data.name 'a \"b'")
    assert lines[-2] == "job my-project-wide runs train of run 'wide'"
    [call] = [call for call in helm.calls if call.startswith("helm ")]
    words = call.split()
    assert words[:7] == ["helm", "--namespace", "ml", "upgrade", "--install", "my-project-wide", "kubernetes/chart"]
    assert call.endswith(
        "--set-file config.gpu=accelerate_config.yaml --set-file config.cpu=accelerate_config.cpu.yaml"
    )
    config = ["train", "--config", "configs/train.yaml", "--run_name", "wide"]
    assert values(helm)["args"] == [*config, "--data.name", 'a "b']
    made = Manifests(renderer, KUBERNETES | {"manifest_kind": "helm"}, tmp_path / "chart")
    documents = made.release(values(helm))
    assert made.problems(documents) == []
    assert pod_of(documents)["containers"][0]["args"] == values(helm)["args"]
    assert not list(helm.folder.glob(".submit.*")), "nothing is left behind"


def test_a_rehearsal_of_a_release(helm: Cluster, renderer: Renderer, tmp_path: Path):
    helm.make("submit", "CPU=yes", "IMAGE_TAG=mine")
    made = Manifests(renderer, KUBERNETES | {"manifest_kind": "helm"}, tmp_path / "chart")
    documents = made.release(values(helm))
    validate(documents)
    [container] = pod_of(documents)["containers"]
    assert container["image"] == "my-project:mine" and container["args"][0] == "--cpu"
    assert "nvidia.com/gpu" not in str(container["resources"])
    assert job_of(documents)["completions"] == 1
    assert of_kind(documents, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_release_that_is_there(helm: Cluster):
    helm.answers("job", "2026-01-01job,2026-01-02,\n2026-01-03job,,")
    assert any("is there: with other options or values it is replaced" in line for line in helm.make("submit"))
    assert not [call for call in helm.calls if "uninstall" in call]
    helm.answers("job", "2026-01-01job,,SuccessCriteriaMet Complete")
    helm.make("submit")
    assert [call.split()[3] for call in helm.calls if call.startswith("helm ")] == ["upgrade", "uninstall", "upgrade"]
    helm.answers("job", "2026-01-01job,,")
    assert "helm --namespace ml uninstall my-project-main --ignore-not-found --cascade foreground" in helm.make(
        "cancel"
    )


def test_a_release_is_shown_before_it_is_made(helm: Cluster):
    assert helm.make("submit", "DRY_RUN=yes")[-1] == "what Helm makes of it"
    assert [call.split()[3] for call in helm.calls] == ["template"]


def test_without_helm(helm: Cluster, tmp_path: Path):
    (tmp_path / "bin/helm").unlink()
    assert helm.refused("submit") == "helm was not found: install it (https://helm.sh/docs/intro/install)"
    helm.answers("refusal", "Error: Kubernetes cluster unreachable: connection refused")
    executable(tmp_path / "bin/helm", "exit 0\n")
    assert helm.refused("submit").startswith("the cluster does not do it: Error: Kubernetes cluster unreachable")


# -- jobs.sh of Kubeflow ----------------------------------------------------------------------------------------------


def test_submit_a_trainjob(renderer: Renderer, tmp_path: Path):
    cluster = Cluster(renderer, tmp_path, namespace="ml", manifest_kind="kubeflow", queue="research")
    cluster.make("submit", "RUN=wide", "ARGS=--epochs 3", "IMAGE_TAG=mine")
    assert problems(cluster.applied, 2, 8, 120) == []
    validate(cluster.applied)
    trainjob = of_kind(cluster.applied, "TrainJob")
    assert trainjob["metadata"]["name"] == "my-project-wide"
    assert trainjob["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    trainer = trainjob["spec"]["trainer"]
    config = ["train", "--config", "configs/train.yaml", "--run_name", "wide"]
    assert trainer["args"] == [*config, "--epochs", "3"] and trainer["image"] == "my-project:mine"

    cluster.make("submit", "CPU=yes")
    validate(cluster.applied)
    trainer = of_kind(cluster.applied, "TrainJob")["spec"]["trainer"]
    assert trainer["numNodes"] == 1 and trainer["args"][0] == "--cpu"
    assert trainer["resourcesPerNode"]["limits"] == {"memory": "4Gi"}

    cluster.answers("pods", "2026 my-project-main-doctor-node-0-0-x Succeeded")
    assert cluster.make("doctor")[-1] == "step 1"
    validate(cluster.applied)
    runtime = of_kind(cluster.applied, "TrainingRuntime")["metadata"]["name"]
    assert runtime == of_kind(cluster.applied, "TrainJob")["spec"]["runtimeRef"]["name"] == "my-project-once"
    assert job_of(cluster.applied)["backoffLimit"] == 0

    cluster.job(RUNNING)
    assert cluster.refused("submit").startswith("run 'main' has a job already")
    lines = cluster.make("cancel")
    delete = (
        "kubectl --namespace ml delete trainjob my-project-main --ignore-not-found --cascade foreground --wait=false"
    )
    assert delete in lines


def test_a_cluster_without_kubeflow(renderer: Renderer, tmp_path: Path):
    cluster = Cluster(renderer, tmp_path, manifest_kind="kubeflow")
    cluster.answers("refusal", 'error: the server doesn\'t have a resource type "trainjob"')
    assert "Kubeflow Trainer 2 is not installed in this cluster" in cluster.refused("submit")


def test_a_tracker_is_shown_on_this_machine(cluster: Cluster):
    cluster.answers("pods", "2026-01-01T my-project-a-0-x Running")
    cluster.make("tensorboard")
    told = sorted(call for call in cluster.calls if " get " not in call)
    command = "tensorboard --logdir /checkpoints"
    assert told == [
        f"--namespace ml exec --stdin my-project-a-0-x --container train -- scripts/run.sh {command}",
        "--namespace ml port-forward my-project-a-0-x 6006",
    ]
