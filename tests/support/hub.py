"""A Hugging Face hub on this machine: datasets and models by their hub name, without a network.

    make_gsm8k(folder, rows_train, rows_test)
    with Hub(folder) as hub:
        subprocess.run(command, env={**os.environ, **hub.environment(home)})

It speaks the part of the hub's API that `datasets.load_dataset` and `snapshot_download` use: a file at a revision,
whole or in ranges; the files of a folder; the commit behind a revision. And, for who has its `token`, the part that
pushes: making a repository, large files by git-lfs, commits.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from base64 import b64decode
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

ROUTE = re.compile(
    r"(?:/api)?(?:/datasets|/models)?/(?P<repo>[^/]+/[^/]+)"  # the files of a model stand at the top
    r"(?:/(?P<kind>resolve|tree|revision)/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?"
)
WRITE = re.compile(
    r"(?:/api)?/datasets/(?P<repo>[^/]+/[^/]+)/(?P<what>preupload/main|commit/main|info/lfs/objects/batch)"
)
RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Hub:
    """Serves the repositories `folder/<org>/<name>/` as they were at the last `push`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str]] = []
        """Every (method, path) asked of this hub; a request meant for another host has its whole URL as path."""
        self.gated: set[str] = set()
        """Repositories whose terms nobody has accepted."""
        self.token = "hf_stand_in"
        """Of the user who may write to the repositories of `owner`."""
        self.owner = "me"
        self.private: set[str] = set()
        """Repositories that were made as private ones."""
        self.large: dict[str, bytes] = {}
        """Files that were sent by git-lfs, by their sha256."""
        self.commits: dict[str, dict[str, bytes]] = {}
        self.commit = self.push()
        """What `main` is: one sha for all repositories, a function of their content."""

    def push(self) -> str:
        """Makes the folder, as it is now, the new `main`; earlier commits stay to be had by their sha."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        files = {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}
        self.commit = digest(json.dumps({name: digest(content) for name, content in files.items()}).encode())
        self.commits[self.commit] = files
        return self.commit

    def __enter__(self) -> Hub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """What a process needs to take this for the hub and `home` for its caches, whatever its user has set."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_DATASETS_CACHE": str(home / "datasets"),
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            # datasets also asks `datasets-server.<endpoint>`: as a proxy the hub refuses it at once, no resolver asked.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), self.url),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        }

    def answer(self, url: str) -> tuple[str, str, bytes]:
        """The content type, the commit and the body behind a URL; LookupError with the hub's code if there is none."""
        path, _, query = url.partition("?")
        if not (route := ROUTE.fullmatch(path)):
            raise LookupError("EntryNotFound")
        repo, kind, revision, inside = map(unquote, route.groups(default=""))
        commit = self.commit if revision in ("", "main") else revision
        if repo in self.gated:
            raise LookupError("GatedRepo")
        if not any(name.startswith(f"{repo}/") for files in self.commits.values() for name in files):
            raise LookupError("RepoNotFound")
        if commit not in self.commits:
            raise LookupError("RevisionNotFound")
        prefix = f"{repo}/"
        files = {n.removeprefix(prefix): body for n, body in self.commits[commit].items() if n.startswith(prefix)}
        if kind == "resolve":
            if inside not in files:
                raise LookupError("EntryNotFound")
            return "application/octet-stream", commit, files[inside]
        if kind == "tree":
            found = tree(files, inside, recursive="recursive=true" in query.lower())
            if not found:
                raise LookupError("EntryNotFound")
            return "application/json", commit, json.dumps(found).encode()
        siblings = [{"rfilename": name} for name in files]
        return "application/json", commit, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()

    def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Makes an empty repository; FileExistsError where there is one already."""
        repo = f"{asked.get('organization') or self.owner}/{asked['name']}"
        folder = self.folder / repo
        if folder.exists():
            raise FileExistsError(repo)
        folder.mkdir(parents=True)
        if asked.get("private") or asked.get("visibility") == "private":
            self.private.add(repo)
        return {"url": f"{self.url}/datasets/{repo}", "id": repo}

    def take(self, repo: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a commit of what is on the lines."""
        for line in lines:
            value = line["value"]
            if line["key"] in ("file", "lfsFile"):
                file = self.folder / repo / value["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                of_lfs = line["key"] == "lfsFile"
                file.write_bytes(self.large[value["oid"]] if of_lfs else b64decode(value["content"]))
        self.push()
        return {"commitUrl": f"{self.url}/datasets/{repo}/commit/{self.commit}", "commitOid": self.commit}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self.hub.requests.append((self.command, self.path))
        try:
            kind, commit, body = self.hub.answer(self.path)
        except LookupError as error:
            return self.reply(
                401 if str(error) == "GatedRepo" else 404,
                b"",
                {"X-Error-Code": str(error), "X-Error-Message": f"{error}: {self.path}"},
            )
        headers = {
            "Content-Type": kind,
            "ETag": f'"{digest(body)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if not (asked := RANGE.fullmatch(self.headers.get("Range", ""))):
            return self.reply(200, body, headers)
        first, last = asked.groups()
        start = int(first) if first else max(0, len(body) - int(last or 0))
        stop = min(len(body), int(last) + 1) if first and last else len(body)
        if start >= stop:
            return self.reply(416, b"", {"Content-Range": f"bytes */{len(body)}"})
        return self.reply(206, body[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.hub.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self.read_chunks()
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            return self.tell({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.reply(401, b"{}", {"Content-Type": "application/json"})
        if path == "/api/repos/create":
            try:
                return self.tell(self.hub.create(json.loads(body)))
            except FileExistsError as repo:
                told = {"error": "You already created this dataset repo", "url": f"{self.hub.url}/datasets/{repo}"}
                return self.reply(409, json.dumps(told).encode(), {"Content-Type": "application/json"})
        if not (route := WRITE.fullmatch(path)):
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        repo = route["repo"].removesuffix(".git")
        if not repo.startswith(f"{self.hub.owner}/"):
            return self.reply(403, b'{"error": "You are not allowed to write here"}', {})
        if route["what"] == "commit/main":
            return self.tell(self.hub.take(repo, [json.loads(line) for line in body.splitlines()]))
        asked = json.loads(body)
        if route["what"] == "preupload/main":
            large = (".parquet", ".jsonl", ".png")
            modes = {file["path"]: "lfs" if file["path"].endswith(large) else "regular" for file in asked["files"]}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self.tell({"files": files})
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}} for each in asked["objects"]
        ]
        return self.tell({"transfer": "basic", "objects": objects})

    def do_PUT(self) -> None:
        """A large file, by its sha256."""
        self.hub.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self.read_chunks()
        name = self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != name:
            return self.reply(400, b"", {})
        self.hub.large[name] = body
        return self.reply(200, b"", {})

    def read_chunks(self) -> bytes:
        """A body of unknown length, as clients stream one."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return b""
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def tell(self, found: dict[str, Any]) -> None:
        self.reply(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: `Hub.requests` is the log."""


def digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """What lies in a folder, as the hub lists it."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict[str, Any]] = {}
    for name, body in files.items():
        if name.startswith(prefix):
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)):
                path = prefix + "/".join(parts[:depth])
                found[path] = {"type": "directory", "path": path, "oid": digest(path.encode()), "size": 0}
            found[name] = {"type": "file", "path": name, "oid": digest(body), "size": len(body)}
    return [entry for path, entry in found.items() if recursive or "/" not in path.removeprefix(prefix)]


def make_gsm8k(folder: Path, rows_train: list[dict[str, Any]], rows_test: list[dict[str, Any]]) -> None:
    """Writes `openai/gsm8k` with its config `main` below the folder, laid out as on the hub."""
    import pyarrow as pa
    import pyarrow.parquet

    repo = folder / "openai" / "gsm8k"
    (repo / "main").mkdir(parents=True, exist_ok=True)
    card = ["---", "configs:", "- config_name: main", "  data_files:"]
    for split, rows in {"train": rows_train, "test": rows_test}.items():
        schema = pa.schema({"question": pa.string(), "answer": pa.string()}) if "question" in rows[0] else None
        file = repo / "main" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows, schema=schema), file)
        card += [f"  - split: {split}", f"    path: main/{split}-*"]
    (repo / "README.md").write_text("\n".join([*card, "---", ""]))
