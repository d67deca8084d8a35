"""Fakes of gcloud, kubectl and sky that keep state between calls and run workloads on this machine.

A machine (worker of a slice, pod, or node of SkyPilot) is a new home folder and the processes whose
environment names it, by which they are killed. The programs that `Clouds` makes call `main`.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

# Messages for `Clouds.fail`, of gcloud 528, kubectl 1.32, and SkyPilot 0.14.1, whose queue fails with the
# last one while it has no controller: before the first job, and ten minutes after the last.
_GCLOUD = "ERROR: (gcloud.compute.tpus.queued-resources.{verb})"
GCLOUD_QUOTA = (
    f"{_GCLOUD} RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Requests' and limit 'Requests per "
    "minute' of service 'tpu.googleapis.com' for consumer 'project_number:1'."
)
KUBECTL_TOO_MANY = (
    "Error from server (TooManyRequests): the server has received too many requests and has asked us "
    "to try again later ({verb} jobsets.jobset.x-k8s.io)"
)
KUBECTL_UNAVAILABLE = (
    "Error from server (ServiceUnavailable): the server is currently unable to handle the request "
    "({verb} jobsets.jobset.x-k8s.io)"
)
SKY_STOPPED = "sky.exceptions.ClusterNotUpError: No in-progress managed jobs."

_CHECKOUT = os.path.abspath(f"{__file__}/../../..")  # stands for /opt/bert_jax of images
_CLIENTS = "gcloud kubectl sky".split()
_WORKER = "bert-jax pip python python3 sudo systemctl systemd-run uv".split()
_SLICE_STATES = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
_JOBSET_STATES = ["CREATED", "PENDING", "RUNNING"]
_SKY_STATES = ["PENDING", "STARTING", "RUNNING"]
_QUEUED = ("WAITING_FOR_RESOURCES", "PENDING", "RECOVERING")
# Reaps a workload ($2…), and writes its process id and exit status to $1.pid and $1.exit.
_REAPER = 'trap : TERM; bash -c \'echo $$ >"$0.pid"; exec "$@"\' "$@"; echo $? >"$1.exit"'


class Clouds:
    """Fake clouds, with the homes of machines in `homes` and the logs of workloads in `logs`.

    Args:
        folder: an existing folder.
        bert_jax: command that the program `bert-jax` of machines stands for.
        unreachable: exit status of ssh and scp to a slice that is not ACTIVE. That of gcloud 528 is 0: it
            goes on with those nodes that are ready, of which there are none.

    Attributes:
        environment: variables for programs that call the fakes.
    """

    def __init__(self, folder, bert_jax, unreachable=255):
        import yaml

        self.folder = folder = os.path.abspath(folder)
        modules = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(yaml.__path__[0])]
        for name in ("bin", "worker", "homes", "logs"):
            os.makedirs(f"{folder}/{name}")
        with open(f"{folder}/fake", "w") as file:
            file.write(f"#!{sys.executable} -SE\nimport sys\nsys.path += {modules}\n")
            file.write(f"import clouds\nclouds.main({folder!r})\n")
        os.chmod(f"{folder}/fake", 0o755)
        for path in [f"bin/{name}" for name in _CLIENTS] + [f"worker/{name}" for name in _WORKER]:
            os.symlink(f"{folder}/fake", f"{folder}/{path}")
        self.environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        with _opened(folder) as state:
            state |= {"folder": folder, "bert_jax": bert_jax, "unreachable": unreachable}
            state |= {"hold": False, "closed": 0, "failures": [], "units": {}, "count": 0}

    def calls(self, tool=""):
        """Return the calls so far, each as program and arguments; those of a program if it is given."""
        with open(f"{self.folder}/calls.jsonl", "a+") as file:
            file.seek(0)
            return [call for call in map(json.loads, file) if tool in ("", call[0])]

    def hold(self, is_held):
        """Leave slices, pods and jobs that wait for machines waiting, or no longer."""
        with _opened(self.folder) as state:
            state["hold"] = is_held

    def fail(self, tool, pattern, times, stderr, status=1):
        """Let the next `times` calls of a program fail whose joined arguments contain `pattern`."""
        with _opened(self.folder) as state:
            state["failures"].append([tool, pattern, times, stderr, status])

    def preempt(self, name):
        """Kill the machines of the newest slice, JobSet or job of SkyPilot of this name."""
        with _opened(self.folder) as state:
            job = next(job for job in reversed(state["jobs"]) if job["name"] == name)
            _kill(f"{job['machine']}\0")
            if job["tool"] == "gcloud":
                job["states"] = ["SUSPENDING", "SUSPENDED"]
            elif job["states"][0] == "RUNNING":
                _end(job, 137, is_preempted=True)

    def states(self):
        """Return the state of each slice, JobSet (as one of SkyPilot's) and job of SkyPilot by name."""
        with _opened(self.folder) as state:
            return {job["name"]: job["states"][0] for job in state["jobs"]}

    def close(self):
        """Kill what runs on machines, and let nothing start."""
        with _opened(self.folder) as state:
            state["closed"] = 1
        _kill(f"{self.folder}/")


def main(folder):
    """Run the program as which this process was started."""
    tool, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
    with open(f"{folder}/calls.jsonl", "a") as file:
        file.write(json.dumps([tool, *arguments]) + "\n")
    words, flags, rest = [], {}, iter(arguments)
    for part in rest:
        name, equals, value = part.lstrip("-").partition("=")
        if part.startswith("-"):
            flags[name] = value if equals or name not in ("output", "tail") else next(rest)
        else:
            words.append(part)
    verb = words[3 if tool == "gcloud" else 0] if words else ""
    with _opened(folder) as state:
        for failure in [[tool, "", state["closed"], "the test is over", 1], *state["failures"]]:
            if failure[0] == tool and failure[1] in " ".join(arguments) and failure[2] > 0:
                failure[2] -= 1
                print(failure[3].replace("{verb}", verb), file=sys.stderr)
                sys.exit(failure[4])
        run = {"gcloud": _gcloud, "kubectl": _kubectl, "sky": _sky}.get(tool)
        then = run(state, verb, words, flags) if run else _worker(state, tool, words, arguments)
    sys.exit(then() if callable(then) else then)  # without the lock


# States: https://docs.cloud.google.com/tpu/docs/queued-resources. Messages and exit statuses: those of
# https://docs.cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources, run against a server.
def _gcloud(state, verb, words, flags):
    name, error = words[-1].partition(":")[0], _GCLOUD.replace("{verb}", verb)
    path = f"projects/{flags.get('project', 'p')}/locations/{flags['zone']}/queuedResources/{name}"
    job = _find(state, "gcloud", name)
    if verb == "create":
        if job:
            sys.exit(f"{error} ALREADY_EXISTS: Resource '{path}' already exists")
        job = _add(state, "gcloud", name, _SLICE_STATES)
        job["machine"] = _new_machine(state, name)
        return print(f"Created queued_resource [{name}].", file=sys.stderr)
    if not job:
        details = f"- '@type': type.googleapis.com/google.rpc.ResourceInfo\n  resourceName: {path}"
        sys.exit(f"{error} NOT_FOUND: Resource '{path}' was not found\n{details}")
    now, machine = job["states"][0], job["machine"]
    if verb == "delete":
        _kill(f"{machine}\0")
        state["jobs"].remove(job)
        return print(f"Deleted queued_resource [{name}].", file=sys.stderr)
    if verb == "describe":
        print(now if flags.get("format") == "value(state.state)" else f"state={now}")
        return _advance(state, job)
    if now != "ACTIVE":
        text = "Could not prepare all 1 nodes, attempting to ssh into the rest."
        print(f"WARNING: {text}", file=sys.stderr)
        return state["unreachable"]
    if verb == "scp":
        for source in words[4:-1]:
            shutil.copy(source, machine)
        return 0
    # gcloud splits at spaces, ssh joins, the login shell reads. A kill is a lost connection.
    command = ["bash", "-c", " ".join(flags["command"].split(" "))]
    options = {"env": _environment(state, machine), "cwd": machine, "stdin": subprocess.DEVNULL}
    return lambda: 255 if (status := subprocess.call(command, **options)) < 0 else status


# https://www.freedesktop.org/software/systemd/man/latest/systemctl.html#Exit%20status, systemd-run.html
# there, and https://docs.astral.sh/uv/reference/cli/
def _worker(state, tool, words, arguments):
    python, machine = [sys.executable], os.environ.get("FAKE_MACHINE", "")
    programs = {"sudo": [], "bert-jax": state["bert_jax"], "python": python, "python3": python}
    run = state["units"].get(machine)
    is_active = bool(run) and _exit_status(run) is None
    if words[:1] == ["venv"]:  # python3 -m venv FOLDER, uv venv … FOLDER
        os.makedirs(words[-1], exist_ok=True)
        os.symlink(f"{state['folder']}/worker", f"{words[-1]}/bin")
    elif (
        tool == "uv"
    ):  # pip install … PACKAGE, which would come from the internet if it were no path
        return 0 if words[-1].startswith((".", "/")) else 1
    elif tool in programs:
        command = [*programs[tool], *arguments]
        return lambda: os.execvp(command[0], command)
    elif tool == "systemd-run":
        log = re.search(r"=StandardOutput=append:(\S+)", " ".join(arguments))[1]
        run = _start(state, machine, words, "/", {"FAKE_UNIT": machine}, log)
        state["units"][machine] = run
    elif words[0] == "is-active":
        return 0 if is_active else 3
    elif words[0] == "show":
        print(run["pid"] if is_active else 0)
    elif words[0] == "stop" and is_active:
        _signal(f"FAKE_UNIT={machine}\0", signal.SIGTERM)
        return lambda: _wait(run)
    return 0


# JobSets: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/, and the controller's failure_policy.go
# Pods: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#PodStatus
def _kubectl(state, verb, words, flags):
    if verb == "apply":
        manifest = _load(flags["filename"])
        name = manifest["metadata"]["name"]
        job = _find(state, "kubectl", name)
        if job and job["spec"] != manifest:
            sys.exit(f'The JobSet "{name}" is invalid: spec.replicatedJobs: field is immutable')
        if not job:
            _add(state, "kubectl", name, _JOBSET_STATES, manifest)
        return print(f"jobset.jobset.x-k8s.io/{name} {'unchanged' if job else 'created'}")
    name = flags["selector"].partition("=")[2] if "selector" in flags else words[2]
    job = _find(state, "kubectl", name)
    if not job and "selector" not in flags:
        sys.exit(f'Error from server (NotFound): jobsets.jobset.x-k8s.io "{name}" not found')
    is_seen = bool(job) and job["states"][0] != "CREATED"  # by the controller
    if verb == "logs" and is_seen and job["run"]:
        prefix = f"[pod/{name}-slice-0-0-x7k2p/bert-jax] "
        return _logs(job["run"], flags.get("tail", 10), prefix)
    if verb == "logs" and is_seen:
        sys.exit('Error from server (BadRequest): container "bert-jax" is waiting to start')
    if verb == "logs":
        return print("No resources found in default namespace.", file=sys.stderr)
    status, pods = _kubernetes(job) if is_seen else ({}, [])
    items = {"apiVersion": "v1", "kind": "List", "items": pods}
    print(json.dumps(items if words[1] == "pods" else job["spec"] | status, indent=4))
    return _advance(state, job) if job else None


def _kubernetes(job):
    """Return the status of a JobSet, and its pods."""
    now, status = job["states"][0], job["exit"]
    numbers = {"ready": now == "RUNNING", "active": not job["end"], "suspended": False}
    numbers |= {"succeeded": now == "SUCCEEDED", "failed": now == "FAILED"}
    replicated = {"name": "slice", **{key: int(value) for key, value in numbers.items()}}
    jobset = {"restarts": job["restarts"], "replicatedJobsStatus": [replicated]}
    pod = {"phase": "Running", "conditions": []}
    container = {"name": "bert-jax", "state": {"running": {}}}
    if job["end"]:
        kind, pod["phase"] = ("Failed", "Failed") if status else ("Completed", "Succeeded")
        end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(job["end"]))
        condition = {"type": kind, "status": "True", "lastTransitionTime": end}
        reason = job["reason"] or "AllJobsCompleted jobset completed successfully"
        condition["reason"], _, condition["message"] = reason.partition(" ")
        jobset |= {"conditions": [condition], "terminalState": kind}
        terminated = {"exitCode": status, "reason": "Error" if status else "Completed"}
        container["state"] = {"terminated": terminated}
        if job["is_preempted"]:
            pod["conditions"].append({"type": "DisruptionTarget", "status": "True"})
    if now in ("PENDING", "RECOVERING"):
        text = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        pod = {"phase": "Pending", "conditions": [condition | {"message": text}]}
    else:
        pod["containerStatuses"] = [container]
    labels = {"jobset.sigs.k8s.io/jobset-name": job["name"]}
    metadata = {"name": f"{job['name']}-slice-0-0-x7k2p", "labels": labels}
    return {"status": jobset}, [{"kind": "Pod", "metadata": metadata, "status": pod}]


# https://docs.skypilot.co/en/latest/reference/cli.html#managed-jobs-cli; records: ManagedJobRecord of
# sky/schemas/api/responses.py; exit statuses of `logs`: JobExitCode of sky/exceptions.py
def _sky(state, verb, words, flags):
    jobs = [job for job in state["jobs"] if job["tool"] == "sky"]
    if words[1] == "launch":
        task = _load(words[-1])
        job = _add(state, "sky", task["name"], _SKY_STATES, task)
        return print(f"\n📋 Useful Commands\nManaged Job ID: {job['id']}")
    if words[1] == "queue":
        if not jobs:
            sys.exit(SKY_STOPPED)
        hidden = () if "verbose" in flags else ("failure_reason", "details", "start_at")
        records = [_record(job) | dict.fromkeys(hidden) for job in reversed(jobs)]
        print(json.dumps(records, indent=2))
        for job in jobs:
            _advance(state, job)
        return 0
    # By name, the real ones find only jobs that have not ended.
    found = [job for job in jobs if job["name"] == flags.get("name") and not job["end"]]
    found += [job for job in jobs if str(job["id"]) in words[2:]]
    if not found:
        print(f"No running managed job found with name {flags.get('name')!r}.")
        return 102
    job, run = found[0], found[0]["run"]
    if not run:
        return 0
    prefix = f"({job['name']}, pid={run['pid']}) "
    return _logs(run, flags.get("tail", 1000), prefix, failure=100)


def _record(job):
    names = {"job_id": job["id"], "task_id": 0, "job_name": job["name"], "task_name": job["name"]}
    times = {"submitted_at": job["time"], "start_at": job["start"], "end_at": job["end"]}
    details = f"Failure: {job['reason']}" if job["reason"] else None
    record = {"status": job["states"][0], "recovery_count": job["restarts"], "details": details}
    return names | record | times | {"failure_reason": job["reason"]}


def _advance(state, job):
    """Let what has been queried go on to its next state, if any, and start what then runs."""
    if not job["states"][1:] or (state["hold"] and job["states"][0] in _QUEUED):
        return
    was, now = job["states"].pop(0), job["states"][0]
    if now != "RUNNING":
        return
    job["start"] = job["start"] or time.time()
    job["machine"] = machine = _new_machine(state, f"{job['name']}-{job['id']}")
    if job["tool"] == "kubectl":
        pod = job["spec"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        variables, reference = {"JOB_COMPLETION_INDEX": "0"}, re.compile(r"\$\$|\$\((\w+)\)")

        def expand(text):
            return reference.sub(lambda m: variables.get(m[1], m[0]) if m[1] else "$", text)

        for each in pod["containers"][0]["env"]:
            variables[each["name"]] = expand(each["value"])
        command, cwd = [expand(part) for part in pod["containers"][0]["command"]], _CHECKOUT
    else:
        task, cwd = job["spec"], f"{machine}/sky_workdir"
        os.makedirs(cwd)
        if "workdir" in task:
            copy = 'git ls-files -zco --exclude-standard | xargs -0 cp --parents -t "$0"'
            subprocess.run(["bash", "-c", copy, cwd], cwd=task["workdir"])
        for part in ("setup", "run"):
            with open(f"{machine}/{part}.sh", "w") as file:
                file.write(task.get(part, "").replace("/opt/bert_jax", _CHECKOUT))
        variables = {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NODE_RANK": "0"}
        variables |= {"SKYPILOT_NUM_NODES": "1", **task.get("envs", {})}
        script = "bash ~/setup.sh || { touch ~/setup_failed; exit 1; }; exec bash ~/run.sh"
        command = ["bash", "-c", script]
        job["restarts"] += was == "RECOVERING"
    job["run"] = _start(state, machine, command, cwd, variables)


def _end(job, status, is_preempted=False):
    """Do what a controller does when the process of a job has ended."""
    job.update(exit=status, is_preempted=is_preempted)
    spec = job["spec"]
    if job["tool"] == "kubectl":
        rules = spec["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
        restarts = job["restarts"] < spec["spec"]["failurePolicy"]["maxRestarts"]
        reason = "ReachedMaxRestarts jobset failed due to reaching max number of restarts"
        if any(status in rule["onExitCodes"]["values"] for rule in rules):
            restarts = False
            reason = "FailJobSetFailurePolicyAction applying FailJobSet failure policy action"
        reason, failed = f"{reason} (first failed job: {job['name']}-slice-0)", "FAILED"
    else:
        recovery = spec["resources"].get("job_recovery", {})
        restarts = is_preempted or status in recovery.get("recover_on_exit_codes", [])
        is_setup = os.path.exists(f"{job['machine']}/setup_failed")
        reason = "Job failed (FAILED_SETUP)" if is_setup else f"Job exited with exit code {status}"
        hint = f"To see the details, run: sky jobs logs --controller {job['id']}"
        failed = "FAILED_SETUP" if is_setup else "FAILED"
        reason = f"{reason} (user program failure). {hint}"
    if status and restarts:
        job.update(states=["RECOVERING", "RUNNING"], run=None)
        job["restarts"] += job["tool"] == "kubectl"
    else:
        ended = failed if status else "SUCCEEDED"
        job.update(states=[ended], end=time.time(), reason=reason if ended == failed else None)


@contextlib.contextmanager
def _opened(folder):
    """Yield the state, up to date and locked, and save it."""
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads(_read(f"{folder}/state.json") or '{"jobs": []}')
        for job in state["jobs"]:
            is_running = job["states"][0] == "RUNNING"
            if is_running and (status := _exit_status(job["run"])) is not None:
                _end(job, status)
        try:
            yield state
        finally:
            with open(f"{folder}/new", "w") as file:
                json.dump(state, file)
            os.replace(f"{folder}/new", f"{folder}/state.json")


def _read(path):
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""


def _load(path):
    import yaml

    with open(path) as file:
        return yaml.safe_load(file)


def _find(state, tool, name):
    found = [job for job in state["jobs"] if (job["tool"], job["name"]) == (tool, name)]
    return found[-1] if found else None


def _add(state, tool, name, states, spec=None):
    state["count"] += 1
    job = {"tool": tool, "name": name, "id": state["count"], "states": [*states], "spec": spec}
    job |= {"time": time.time(), "restarts": 0, "machine": "", "is_preempted": False}
    state["jobs"].append(job | dict.fromkeys(("start", "end", "exit", "reason", "run")))
    return state["jobs"][-1]


def _new_machine(state, name):
    machine = f"{state['folder']}/homes/{name}"
    shutil.rmtree(machine, ignore_errors=True)
    os.makedirs(machine)
    return machine


def _environment(state, machine):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("BERT_JAX")}
    path = f"{state['folder']}/worker:{os.environ['PATH']}"
    return inherited | {"HOME": machine, "FAKE_MACHINE": machine, "PATH": path}


def _start(state, machine, command, cwd, variables, output=""):
    """Start a process on a machine, detached from this one."""
    log = f"{state['folder']}/logs/{os.path.basename(machine)}-{time.time_ns()}"
    options = {"cwd": cwd, "env": _environment(state, machine) | variables}
    command = ["bash", "-c", _REAPER, "bash", log, *command]
    with open(output or log, "a") as file:
        options |= {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        reaper = subprocess.Popen(command, start_new_session=True, **options)
    while not _read(f"{log}.pid"):
        time.sleep(0.002)
    return {"log": log, "reaper": reaper.pid, "pid": int(_read(f"{log}.pid"))}


def _exit_status(run):
    """Return the exit status of a process, 137 if its machine is gone, or None while it runs."""
    is_running = bool(_read(f"/proc/{run['reaper']}/cmdline"))  # empty for zombies
    status = _read(f"{run['log']}.exit")
    return int(status) if status else None if is_running else 137


def _wait(run):
    while _exit_status(run) is None:
        time.sleep(0.02)


def _signal(mark, number):
    """Send a signal to all processes whose environment has the mark; return whether there are any."""
    found = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if mark.encode() in file.read():
                os.kill(int(pid), number)
                found = True
    return found


def _kill(machine):
    while _signal(f"FAKE_MACHINE={machine}", signal.SIGKILL):
        time.sleep(0.01)


def _logs(run, lines, prefix, failure=0):
    """Print the last lines of a log, and return the exit status of the command that does so."""
    with open(run["log"]) as file:
        shown = file.readlines()[-max(int(lines), 0) :]
    print(end="".join(prefix + line for line in shown))
    return failure * bool(_exit_status(run))
