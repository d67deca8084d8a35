"""JobSets on Google Kubernetes Engine."""

import json
from collections.abc import Sequence

from bert_jax.runtime.chips import CHIPS_PER_VM
from bert_jax.tools.launch.engines import base
from bert_jax.tools.launch.engines.base import Job, State
from bert_jax.tools.launch.plan import STOP_SECONDS, Plan, read_output

_KEPT_SECONDS = 7 * 24 * 3600  # in which a JobSet that has ended can be asked for its state


def plan(
    job: Job,
    *,
    image: str,
    accelerator: str = "",
    queue: str = "",
    service_account: str = "",
    spot: bool = False,
    restarts: int = 100,
) -> Plan:
    """Plan a JobSet on the current cluster of kubectl, with one job per TPU slice.

    JobSet (https://jobset.sigs.k8s.io) must be installed in the cluster, as xpk and Cluster Toolkit do.
    """
    variables, nodes, resources, annotations = dict(job.environment), {}, {}, {}
    slices = machines = 1
    base.check_accelerator("gke", job, accelerator)
    if accelerator:
        topology = base.tpu_topology(job, accelerator)
        chips, slices = topology.chips // topology.slices, topology.slices
        on_a_machine = min(chips, CHIPS_PER_VM)
        machines = chips // on_a_machine
        variables["BERT_JAX_DISTRIBUTED"] = "auto"
        # The nodes of a slice may become available long after those of another.
        variables.setdefault("BERT_JAX_JOIN_SECONDS", "3600")
        nodes = {
            "cloud.google.com/gke-tpu-accelerator": topology.chip.gke,
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, topology.shape)),
        }
        resources = {"limits": {"google.com/tpu": on_a_machine}}
        # Each job has a node pool, that is a slice, for itself.
        exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        annotations = {exclusive: "cloud.google.com/gke-nodepool"}
    if spot:
        nodes["cloud.google.com/gke-spot"] = "true"
    container = {
        "name": "bert-jax",
        "image": image,
        # Kubernetes expands $(NAME), and turns $$ into $.
        "command": [part.replace("$", "$$") for part in ["bert-jax", *job.command]],
        "env": [{"name": k, "value": v.replace("$", "$$")} for k, v in variables.items()],
        "resources": resources,
    }
    pod = {
        **({"serviceAccountName": service_account} if service_account else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(STOP_SECONDS),
        "nodeSelector": nodes,
        "containers": [container],
    }
    if slices > 1:  # between slices, a host's own network is faster than that of Kubernetes
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    # A pod that fails fails its job, which restarts all jobs, but for statuses that are final.
    final = {"operator": "In", "values": [*base.FINAL]}
    slice_job = {
        "parallelism": machines,
        "completions": machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": {"spec": pod},
    }
    # JobSet labels the jobs and pods with its name, but not itself; `status` selects by it.
    labels = {"jobset.sigs.k8s.io/jobset-name": job.name}
    if queue:
        labels["kueue.x-k8s.io/queue-name"] = queue
    replicated = {"name": "slice", "replicas": slices, "template": {"spec": slice_job}}
    stop = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, "labels": labels, "annotations": annotations},
        "spec": {
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "failurePolicy": {"maxRestarts": restarts, "rules": [stop]},
            "replicatedJobs": [replicated],
        },
    }
    path = str(base.state_folder(job.name) / "jobset.yaml")
    label = f"--selector=jobset.sigs.k8s.io/jobset-name={job.name}"
    return Plan(
        files={path: base.to_yaml(manifest)},
        setup=[["kubectl", "apply", f"--filename={path}"]],
        retry_statuses=frozenset({1}),  # as after "too many requests"
        restarts=3,
        logs=["kubectl", "logs", "--follow", label, "--prefix", "--tail=100",
              "--max-log-requests=1000"],
        stop=[["kubectl", "delete", "jobset", job.name]],
    )  # fmt: skip


def ask(name: str, query: Sequence[str]) -> State:
    """Ask for the conditions of a JobSet, and for the phases and exit codes of its pods.

    https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/#jobset-x-k8s-io-v1alpha2-JobSetStatus
    """
    text, error = read_output(["kubectl", "get", "jobset", name, "--output=json"])
    if text is None:
        return State("lost" if "NotFound" in error else "unknown", text=error)
    conditions = json.loads(text).get("status", {}).get("conditions", [])
    ended = {each["type"]: each for each in conditions if each["status"] == "True"}
    if "Completed" in ended:
        return State("done", 0)
    label = f"--selector=jobset.sigs.k8s.io/jobset-name={name}"
    text, error = read_output(["kubectl", "get", "pods", label, "--output=json"])
    pods = [pod.get("status", {}) for pod in json.loads(text)["items"]] if text else []
    if "Failed" in ended:
        output, _ = read_output(["kubectl", "logs", label, "--prefix", "--tail=5"])
        states = (each["state"] for pod in pods for each in pod.get("containerStatuses", []))
        exits = [state["terminated"]["exitCode"] for state in states if "terminated" in state]
        status = next((code for code in exits if code in base.FINAL), max(exits, default=0))
        message = ended["Failed"].get("message", "")
        return State("failed", status or None, f"{message}\n{output or ''}")
    if any(pod.get("phase") == "Running" for pod in pods):
        return State("running")
    conditions = (each for pod in pods for each in pod.get("conditions", []))
    reasons = [each.get("message", "") for each in conditions if each["status"] == "False"]
    return State("waiting", text=next(filter(None, reasons), error))
