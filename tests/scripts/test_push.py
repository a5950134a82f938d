"""``export.py --push`` against a local stand-in for the Hub: one commit that timm can load, and failures in one line."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import timm
import torch
from huggingface_hub import constants

from scripts import export
from tests.helpers import answer, trained
from tests.models.test_pretrained import tree  # noqa: F401 - a fixture
from tests.scripts.test_export_zoo import reloads_in_this_process  # noqa: F401 - a fixture

TOKEN = "hf_" + "secretsecret" * 3
NAME = "someone/net"


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does where huggingface_hub asks: who, repository, upload of large files, commit."""

    def do_POST(self):
        self.answer(self.body())

    def do_GET(self):
        self.answer(b"")

    def do_PUT(self):
        self.answer(self.body())

    def log_message(self, *_):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, body):
        state = self.server.state
        path = self.path.partition("?")[0]
        state["asked"].append(path)
        if path in state["fails"] or self.headers.get("Authorization") not in (f"Bearer {TOKEN}", None):
            code = state["fails"].get(path, 401)
            return self.send(code, {"error": f"you said {self.headers.get('Authorization')}"})
        origin = f"http://127.0.0.1:{self.server.server_port}"
        if path == "/api/whoami-v2":
            return self.send(200, {"name": "someone", "type": "user", "orgs": [], "auth": {}})
        if path == "/api/repos/create":
            state["created"] = json.loads(body)
            return self.send(200, {"url": f"{origin}/{NAME}", "id": NAME, "name": NAME})
        if path == "/api/validate-yaml":
            state["card"] = json.loads(body)
            return self.send(200, {"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(body)["files"]]
            kinds = {True: "lfs", False: "regular"}
            files = [
                {"path": name, "uploadMode": kinds[name.endswith(".safetensors")], "shouldIgnore": False, "oid": None}
                for name in names
            ]
            return self.send(200, {"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{origin}/store/{one['oid']}", "header": {}}}}
                for one in json.loads(body)["objects"]
            ]
            return self.send(200, {"transfer": "basic", "objects": objects})
        if path.startswith("/store/"):
            assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
            state["stored"][path.rpartition("/")[2]] = body
            return self.send(200, {})
        if path.endswith("/commit/main"):
            state["commits"].append([json.loads(line) for line in body.splitlines()])
            found = {"success": True, "commitOid": 40 * "c", "commitUrl": f"{origin}/{NAME}/commit/{40 * 'c'}"}
            return self.send(200, {**found, "hookOutput": "", "pullRequestUrl": None})
        return self.send(404, {"error": path})

    def send(self, code, content):
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.state = {"asked": [], "fails": {}, "stored": {}, "commits": []}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_HOME"):
        monkeypatch.setattr(constants, name, endpoint, raising=False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server.state
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tree, tmp_path_factory):  # noqa: F811
    flags = "--arch test_vit --image-size 64 --dataname folder --epochs 1 --batch-size 4 --workers 0".split()
    return trained(tmp_path_factory.mktemp("runs"), *flags, "--datapath", tree)


def told(argv, capsys, monkeypatch):
    code, said = answer(export, argv, capsys, monkeypatch)
    assert TOKEN not in said.out + said.err
    return code, said


def test_a_push_is_one_commit_of_what_timm_loads_with_a_card_that_the_hub_reads(
    run, hub, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "net"
    argv = [run, "--to", "timm", "--output", folder, "--push", NAME, "--private"]
    code, said = told(argv, capsys, monkeypatch)
    assert code == 0, said.err
    assert said.out.splitlines()[-1].startswith("Pushed to http://127.0.0.1:")
    assert (hub["created"]["name"], hub["created"]["organization"]) == ("net", "someone")
    assert hub["created"].get("private") is True or hub["created"].get("visibility") == "private"
    (commit,) = hub["commits"]
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    for entry in commit:
        if entry["key"] == "file":
            (pushed / entry["value"]["path"]).write_bytes(base64.b64decode(entry["value"]["content"]))
        elif entry["key"] == "lfsFile":
            (pushed / entry["value"]["path"]).write_bytes(hub["stored"][entry["value"]["oid"]])
    assert {path.name for path in pushed.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    for path in pushed.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()
    text = (pushed / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: timm\npipeline_tag: image-classification\n")
    images = torch.rand(2, 3, 64, 64)
    theirs = timm.create_model(f"local-dir:{pushed}", pretrained=True).eval()
    ours = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert theirs.num_classes == 2 and torch.equal(theirs(images), ours(images))


def test_nothing_is_asked_of_the_hub_without_the_flag(run, hub, tmp_path, capsys, monkeypatch):
    code, _ = told([run, "--to", "timm", "--output", tmp_path / "net"], capsys, monkeypatch)
    assert code == 0 and hub["asked"] == []
    assert not (tmp_path / "net/README.md").read_text().startswith("---")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/repos/create", f"not pushed: the repository {NAME} could not be made; the export in "),
        (
            f"/api/models/{NAME}/commit/main",
            f"not pushed: no file was added to {NAME}, which exists now; the export in",
        ),
    ],
)
def test_a_failure_half_way_says_what_to_repeat(path, said, run, hub, tmp_path, capsys, monkeypatch):
    hub["fails"][path] = 403
    folder = tmp_path / "net"
    code, outcome = told([run, "--to", "timm", "--output", folder, "--push", NAME], capsys, monkeypatch)
    assert code == 1 and outcome.err.startswith(f"export.py: {said}") and outcome.err.count("\n") == 1
    assert f"is whole; repeat 'hf upload {NAME} {folder} .'" in outcome.err
    assert (folder / "model.safetensors").is_file() and hub["commits"] == [] and path in hub["asked"]


def test_a_push_that_cannot_succeed_is_refused_before_the_work(run, hub, tmp_path, capsys, monkeypatch):
    def refused(argv, said):
        code, outcome = told([run, "--output", tmp_path / "net", *argv], capsys, monkeypatch)
        assert (code, outcome.err.count("\n")) == (2, 1) and said in outcome.err
        assert not (tmp_path / "net").exists()

    refused(["--to", "onnx", "--push", NAME], f"--push {NAME} needs --to timm")
    refused(["--to", "timm", "--private"], "--private needs --push ORG/NAME")
    refused(["--to", "timm", "--push", "net"], "--push net: write ORG/NAME")
    refused(["--to", "timm", "--push", "a b/c"], "--push a b/c: write ORG/NAME")
    hub["fails"]["/api/whoami-v2"] = 401
    refused(["--to", "timm", "--push", NAME], f"--push {NAME}: the token is not accepted (")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(["--to", "timm", "--push", NAME], f"--push {NAME}: 127.0.0.1 cannot be reached: ")
    monkeypatch.setattr("scripts.exporting.pushing.get_token", lambda: None)
    refused(["--to", "timm", "--push", NAME], "needs a token that may write; run 'hf auth login', or set HF_TOKEN")
