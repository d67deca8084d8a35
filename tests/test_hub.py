"""Imports from the Hub and `export --push`, against a loopback server with its protocol."""

import base64
import hashlib
import http.server
import json
import shlex
import shutil
import threading
import types
from typing import ClassVar

import jax
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file

from bert_jax import cli, storage
from bert_jax.convert import source
from bert_jax.runs import checkpoint
from tests.helpers.checkpoints import WORDS, add_step
from tests.helpers.runs import refused

FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "vocab.txt"}


class Handler(http.server.BaseHTTPRequestHandler):
    """Handle the requests of create_repo, model_info, create_branch, uploads and downloads."""

    requested: ClassVar[set[str]] = set()  # names of files

    def do_GET(self):
        parts = self.path.partition("?")[0].removeprefix("/api/models").split("/")[1:]
        repository = self.server.state.repositories.get("/".join(parts[:2]))
        if repository is None:
            return self.answer(404, {}, "RepoNotFound")
        files = repository["branches"]["main"]
        if "resolve" not in parts:
            about = {"id": "a/b", "sha": "0" * 40, "private": repository["private"]}
            return self.answer(200, about | {"siblings": [{"rfilename": name} for name in files]})
        self.requested.add(parts[-1])
        body = files.get(parts[-1], b"")
        self.send_response(200 if body else 404)
        self.send_header("ETag", f'"{hash(body)}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def do_PUT(self):
        body = self.body()
        self.server.state.objects[hashlib.sha256(body).hexdigest()] = body
        self.answer(200, {})

    def do_POST(self):
        state, body = self.server.state, self.body()
        if self.headers["Authorization"] != "Bearer hf_right":
            return self.answer(401, {"error": "Invalid credentials in Authorization header"})
        if self.path == "/api/repos/create":
            settings = json.loads(body)
            name = f"{settings['organization']}/{settings['name']}"
            if settings["organization"] != "mine":
                return self.answer(403, {"error": "You don't have the rights"})
            known = name in state.repositories
            new = {"private": settings.get("visibility") == "private", "branches": {"main": {}}}
            state.repositories.setdefault(name, new)
            return self.answer(409 if known else 200, {"url": f"{constants.ENDPOINT}/{name}"})
        if self.path == "/api/validate-yaml":
            wrong = "license: wrong" in json.loads(body)["content"].replace('"', "")
            errors = [{"message": "license must be one of …"}] if wrong else []
            return self.answer(400 if wrong else 200, {"errors": errors, "warnings": []})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{constants.ENDPOINT}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        *_, owner, model, action, branch = self.path.split("/")
        branches = state.repositories[f"{owner}/{model}"]["branches"]
        if action == "branch":
            known = branch in branches
            branches.setdefault(branch, dict(branches["main"]))
            return self.answer(409 if known else 200, {})
        if action == "preupload":
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": modes})
        assert action == "commit", self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                branches[branch][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                branches[branch][value["path"]] = state.objects[value["oid"]]
        return self.answer(
            200,
            {"commitUrl": f"{constants.ENDPOINT}/{owner}/{model}/commit/0", "commitOid": "0" * 40},
        )

    def body(self):
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, status, value, code=""):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def repositories(monkeypatch):
    """The server's repositories by name: visibility, and files by branch and path."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.state = types.SimpleNamespace(repositories={}, objects={})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_endpoint(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield server.state.repositories
    server.shutdown()
    server.server_close()


def use_endpoint(monkeypatch, endpoint):
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_import_online_cached_and_offline(hf_folder, tmp_path, repositories, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    files = {path.name: path.read_bytes() for path in hf_folder.iterdir()}
    repositories["someone/tiny"] = {"private": False, "branches": {"main": files}}
    assert source.open_vocabulary("someone/tiny").tokens == WORDS
    assert "tokenizer.json" in Handler.requested
    assert "model.safetensors" not in Handler.requested

    def run(out):
        return cli.main(["import", "someone/tiny", "--out", str(tmp_path / out)])

    assert run("ours") == 0
    params = checkpoint.load_model(tmp_path / "ours")[2], source.read(str(hf_folder)).params
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, params))
    # Without a network, the cached download is used; without a cache, the error is one line.
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert run("again") == 0
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    capsys.readouterr()
    assert run("none") == cli.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "Hub cannot be reached" in line
    assert not (tmp_path / "none").exists()


def push(*argv):
    return cli.main(["export", *map(str, argv)])


def test_push_to_main_and_to_a_revision(run_folder, tmp_path, repositories, capsys):
    argv = ["--init", run_folder, "--heads", "masked_lm", "--push", "mine/tiny"]
    assert push(*argv, "--out", tmp_path / "out", "--private") == 0
    assert 'from_pretrained("mine/tiny")' in capsys.readouterr().out
    assert repositories["mine/tiny"]["private"]
    files = repositories["mine/tiny"]["branches"]["main"]
    assert files.keys() >= FILES
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert 'from_pretrained("mine/tiny")' in files["README.md"].decode()

    assert push(*argv, "--revision", "second") == 0
    branches = repositories["mine/tiny"]["branches"]
    assert branches["main"] == files
    assert branches["second"]["model.safetensors"] == files["model.safetensors"]
    assert 'revision="second"' in branches["second"]["README.md"].decode()


def test_push_all_checkpoints_as_branches(run_folder, tmp_path, repositories):
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    add_step(run, 9, jax.tree.map(lambda x: x + 1, checkpoint.load_model(run)[2]))
    best = checkpoint.load_model(run)[3]
    assert push("--init", run, "--push", "mine/tiny", "--checkpoint", "all") == 0
    branches = repositories["mine/tiny"]["branches"]
    assert branches.keys() == {"main", "step_7", "step_9"}
    weights = {branch: files["model.safetensors"] for branch, files in branches.items()}
    assert weights["main"] == weights[f"step_{best}"]
    for step in (7, 9):
        assert push("--init", run, "--out", tmp_path / f"{step}", "--checkpoint", step) == 0
        expected = (tmp_path / f"{step}" / "model.safetensors").read_bytes()
        assert weights[f"step_{step}"] == expected
        assert "`step_7`, `step_9`" in branches[f"step_{step}"]["README.md"].decode()


@pytest.mark.parametrize(
    ("options", "token", "expected"),
    [
        ("--push mine/tiny", None, "hf auth login"),
        ("--push tiny", "hf_right", "OWNER/MODEL"),
        ("--push mine/tiny", "hf_wrong", "token is not valid"),
        ("--push theirs/tiny", "hf_right", "theirs"),
        ("--push mine/tiny --license wrong", "hf_right", "license"),
        ("--push mine/tiny --revision x --checkpoint all", "hf_right", "--revision"),
        ("--push mine/public --private", "hf_right", "mine/public exists and is public"),
        ("", "hf_right", "--out DIR, --push OWNER/MODEL"),
        ("--out o --revision x", "hf_right", "--revision"),
        ("--out gs://b/o --push mine/tiny", "hf_right", "local folder"),
    ],
)
def test_impossible_push_is_rejected(
    hf_folder, repositories, monkeypatch, tmp_path, capsys, options, token, expected
):
    monkeypatch.setattr(storage, "check", lambda arguments: None)  # it would look for credentials
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    repositories["mine/public"] = {"private": False, "branches": {"main": {}}}
    assert expected in refused(capsys, "export", "--init", hf_folder, *shlex.split(options))
    branches = (repository["branches"] for repository in repositories.values())
    assert not any(files for branch in branches for files in branch.values())


def test_push_without_network_keeps_the_files(
    hf_folder, repositories, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    out = tmp_path / "out"
    error = refused(capsys, "export", "--init", hf_folder, "--push", "mine/tiny", "--out", out)
    assert "http://127.0.0.1:9" in error
    assert error.endswith(str(out))
    assert load_file(out / "model.safetensors")
