"""Bases named by an id on the hub: huggingface_hub against a hub on this machine, through the commands."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

from ss_convert.command import main as ss_convert
from ss_device.adapter import find_base, save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import paper_config
from ss_device.errors import UserError
from ss_device.training.command import main as ss_train
from tests.tiny_models import make_tiny_base, random_adapter

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/tiny-llama"
CONFIG = paper_config(num_streams=2, num_msa_layers=1, pruning_rank=2)


class Hub(BaseHTTPRequestHandler):
    """What snapshot_download asks for: the newest commit, the list of files, the files."""

    folder, requested = None, []

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path
        if "gated" in path:
            return self._send(403, b"", with_body, error="GatedRepo")
        if path.startswith(f"/api/models/{NAME}/tree/"):
            files = [f for f in sorted(self.folder.rglob("*")) if f.is_file()]
            return self._json([self._entry(file) for file in files])
        if path.startswith(f"/api/models/{NAME}"):
            return self._json({"id": NAME, "sha": COMMIT, "siblings": []})
        start = f"/{NAME}/resolve/{COMMIT}/"
        if path.startswith(start) and (file := self.folder / path.removeprefix(start)).is_file():
            self.requested.append(path.removeprefix(start))
            return self._send(200, file.read_bytes(), with_body, self._entry(file)["oid"])
        return self._send(404, b"", with_body, error="RepoNotFound")

    def _entry(self, file) -> dict:
        oid = hashlib.sha1(file.read_bytes()).hexdigest()
        path = str(file.relative_to(self.folder))
        return {"type": "file", "path": path, "size": file.stat().st_size, "oid": oid}

    def _json(self, value) -> None:
        self._send(200, json.dumps(value).encode(), with_body=True)

    def _send(self, status, body, with_body, etag="-", error=None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one tiny model, its cache empty, this program's folder of models empty."""
    folder = tmp_path / "on the hub"
    make_tiny_base(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    handler = type("Handler", (Hub,), {"folder": folder, "requested": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    point_at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("SS_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    yield handler
    server.shutdown()
    server.server_close()


def point_at(endpoint: str, monkeypatch) -> None:
    """Let huggingface_hub use this address; it copies it when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)


def test_a_base_of_the_hub_is_fetched_without_other_layouts(hub):
    base = open_base(NAME)
    assert {file.name for file in base.path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert base.identity.name == NAME
    assert base.identity.sha256 == open_base(hub.folder).identity.sha256
    assert set(hub.requested) == {file.name for file in base.path.iterdir()}


def test_commands_take_an_id_and_remember_it(hub, tmp_path, capsys):
    adapter = random_adapter(open_base(NAME), CONFIG)
    assert adapter.base.name == NAME
    save_adapter(adapter, open_base(NAME).architecture, tmp_path / "models" / "adapters" / "tiny")
    common = ["--adapter", "tiny", "--target", "mlx", "--no-golden"]
    assert ss_convert([*common, "--base", NAME, "--output", "named"]) == 0
    assert open_bundle(tmp_path / "named").manifest.base.name == NAME
    capsys.readouterr()
    assert ss_convert([*common, "--output", "unasked"]) == 2  # the adapter names its base: no download
    assert f"name it with --base {NAME}" in capsys.readouterr().err
    row = {"question": "How many?", "context": "CREATE TABLE t (a INT)", "answer": "SELECT a FROM t"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    texts = ["--data", "data.jsonl", "--output", "own.jsonl", "--limit", "1", "--max-tokens", "2"]
    assert ss_train(["distill", "sqlctx", "--base", NAME, *texts]) == 0
    assert len((tmp_path / "own.jsonl").read_text().splitlines()) >= 1


def test_a_local_folder_goes_first(hub, tmp_path):
    make_tiny_base(tmp_path / NAME, vocab_size=270)
    assert open_base(NAME).architecture.vocab_size == 270
    assert not hub.requested


def test_a_base_under_models_goes_first(hub, tmp_path):
    adapter = random_adapter(open_base(NAME), CONFIG)
    hub.requested.clear()
    with pytest.raises(UserError, match=f"name it with --base {NAME} to take it from the hub"):
        find_base(adapter, tmp_path / "models")
    assert not hub.requested
    (tmp_path / "models" / "base" / NAME).mkdir(parents=True)
    assert find_base(adapter, tmp_path / "models") == tmp_path / "models" / "base" / NAME


def test_an_unknown_id_is_one_line(hub, capsys):
    arguments = ["evaluate", "adapter", "--base", "someone/else", "--data", "data.jsonl"]
    assert ss_train(arguments) == 2
    message = capsys.readouterr().err.strip()
    assert "someone/else: no such base model folder, and no such model on the hub" in message
    assert "\n" not in message


def test_a_gated_model_is_named_as_such(hub):
    with pytest.raises(UserError, match="someone/gated: a gated model; accept its terms"):
        open_base("someone/gated")


def test_without_a_connection_the_cache_serves(hub, monkeypatch):
    first = open_base(NAME)
    point_at("http://127.0.0.1:9", monkeypatch)  # nobody listens there
    assert open_base(NAME).identity == first.identity
    with pytest.raises(
        UserError, match="someone/else: no such base model folder, and the hub provided no copy"
    ):
        open_base("someone/else")


def test_a_path_is_no_id(tmp_path):
    with pytest.raises(UserError, match="no such base model folder$"):
        open_base(tmp_path / "nothing")
    with pytest.raises(UserError, match="no such base model folder$"):
        open_base("../models/nothing")
