"""Every test has its own cache and no network; `hub` is a hub on 127.0.0.1."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class HubServer:
    """Serves `files` (name to bytes) of one commit, with the part of the protocol that downloads need."""

    repository = "someone/some-text"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.commit = "a" * 40
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        self.requests.append(f"{request.command} {request.path}")
        path = request.path.partition("?")[0]
        content, missing = None, "RepoNotFound"
        if match := re.fullmatch(rf"(/api)?/datasets/{self.repository}/(?:resolve|revision|tree)/(\w+)/?(.*)", path):
            missing = "EntryNotFound" if match[2] in ("main", self.commit) else "RevisionNotFound"
            if missing == "EntryNotFound":
                files = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.files]
                facts = files if "/tree/" in path else {"id": self.repository, "sha": self.commit}
                content = json.dumps(facts).encode() if match[1] else self.files.get(match[3])
        request.send_response(404 if content is None else 200)
        if content is None:
            request.send_header("X-Error-Code", missing)
            content = b""
        else:
            request.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        request.send_header("X-Repo-Commit", self.commit)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body:
            request.wfile.write(content)

    def __enter__(self) -> "HubServer":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(autouse=True)
def lap_cache(tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LAP_CACHE", str(cache))
    hub = str(cache / "huggingface" / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", hub)
    # The library reads it at import.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", hub)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


@pytest.fixture
def hub(monkeypatch):
    """An empty hub that is set as HF_ENDPOINT; a test gives it files."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    # The library reads it at import, and an earlier test may have imported it offline.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
