"""A hub on this machine: the routes that `huggingface_hub` calls for a push and a pull, on a folder.

Files with LFS's ending, or large ones, go through the LFS protocol, others into the commit. Its listing comes in pages
of a few, as the hub's does for many files. Tokens: `WRITER` may do everything, `READER` may look.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

WRITER, READER = "hf_stands_for_one_that_writes", "hf_stands_for_one_that_reads"
LARGE = 4096
LFS_ENDINGS = (".safetensors", ".parquet", ".sqlite")
PAGE = 3


class Blob(NamedTuple):
    oid: str
    size: int
    is_lfs: bool

    @property
    def entry(self) -> dict[str, Any]:
        large = {"oid": self.oid, "size": self.size, "pointerSize": 130} if self.is_lfs else None
        git = hashlib.sha1(self.oid.encode()).hexdigest() if self.is_lfs else self.oid
        return {"type": "file", "oid": git, "size": self.size, **({"lfs": large} if large else {})}


Tree = dict[str, Blob]


class Repo:
    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, Tree] = {}
        self.branches: dict[str, str] = {}

    def add(self, branch: str, tree: Tree) -> str:
        commit = hashlib.sha1(f"{len(self.commits)} {sorted(tree)}".encode()).hexdigest()
        self.commits[commit] = tree
        self.branches[branch] = commit
        return commit

    def tree(self, revision: str) -> tuple[str, Tree] | None:
        commit = self.branches.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.repos: dict[str, Repo] = {}
        """By `models/OWNER/NAME` or `datasets/OWNER/NAME`."""
        self.calls: list[str] = []
        """Method and path of every request."""
        self.uploaded: list[str] = []
        """Files whose content has arrived: paths of small ones, checksums of large ones."""
        self.cut_after: int | None = None
        """Downloads of large files break off after so many bytes, once."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put_blob(self, content: bytes, *, is_lfs: bool) -> Blob:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        oid = hashlib.sha256(content).hexdigest() if is_lfs else git
        (self.folder / oid).write_bytes(content)
        return Blob(oid, len(content), is_lfs)

    def content(self, repo: str, path: str, revision: str = "main") -> bytes:
        found = self.repos[repo].tree(revision)
        assert found is not None
        return (self.folder / found[1][path].oid).read_bytes()

    def files(self, repo: str, revision: str = "main") -> set[str]:
        found = self.repos[repo].tree(revision)
        assert found is not None
        return set(found[1])


@contextmanager
def hub_stand_in(folder: Path) -> Iterator[Hub]:
    folder.mkdir(parents=True, exist_ok=True)
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815 - names of the standard library

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self._read_chunks()
        parts = urlsplit(self.path)
        self.server.calls.append(f"{self.command} {parts.path}")
        try:
            for method, pattern, act in ROUTES:
                found = re.fullmatch(pattern, unquote(parts.path))
                if found and self.command in method.split("|"):
                    return act(self, parse_qs(parts.query), *found.groups())
            raise Refused(404, "", f"no route for {self.command} {self.path}")
        except Refused as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            self._reply({"error": error.message}, error.status, {k: v for k, v in headers.items() if v})

    def _read_chunks(self) -> bytes:
        """A body of unknown length."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return b""
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _reply(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # -- who may do what ------------------------------------------------------------------------------------------

    def _token(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if token not in (None, WRITER, READER):
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return token

    def _repo(self, name: str) -> Repo:
        token, repo = self._token(), self.server.repos.get(name)
        if repo is None or (repo.private and token is None):
            raise Refused(401 if token is None else 404, "RepoNotFound", "Repository not found")
        return repo

    def _check_writer(self) -> None:
        if self._token() != WRITER:
            raise Refused(403, "", "you need write access")

    def _tree(self, name: str, revision: str) -> tuple[str, Tree]:
        found = self._repo(name).tree(revision)
        if found is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    # -- the routes -----------------------------------------------------------------------------------------------

    def create(self, query: dict[str, list[str]]) -> None:
        self._check_writer()
        asked = json.loads(self.body)
        full = f"{asked['organization']}/{asked['name']}"
        kind = f"{asked.get('type', 'model')}s"
        if f"{kind}/{full}" in self.server.repos:
            raise Refused(409, "", "You already created this repo")
        repo = self.server.repos[f"{kind}/{full}"] = Repo(asked.get("visibility") == "private")
        repo.add("main", {".gitattributes": self.server.put_blob(b"*.safetensors filter=lfs\n", is_lfs=False)})
        shown = full if kind == "models" else f"{kind}/{full}"
        self._reply({"url": f"{self.server.url}/{shown}", "name": full})

    def info(self, query: dict[str, list[str]], name: str, revision: str) -> None:
        commit, _ = self._tree(name, revision)
        repo = self.server.repos[name]
        self._reply({"id": name.partition("/")[2], "sha": commit, "private": repo.private, "tags": [], "downloads": 0})

    def tree(self, query: dict[str, list[str]], name: str, revision: str) -> None:
        _, tree = self._tree(name, revision)
        start = int(query.get("cursor", ["0"])[0])
        entries = [{"path": path, **blob.entry} for path, blob in sorted(tree.items())]
        more = f'<{self.server.url}{urlsplit(self.path).path}?recursive=true&cursor={start + PAGE}>; rel="next"'
        self._reply(entries[start : start + PAGE], headers={"Link": more} if start + PAGE < len(entries) else None)

    def branch(self, query: dict[str, list[str]], name: str, branch: str) -> None:
        self._check_writer()
        repo = self._repo(name)
        if branch in repo.branches:
            raise Refused(409, "", "Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        self._reply({})

    def preupload(self, query: dict[str, list[str]], name: str, revision: str) -> None:
        self._check_writer()
        _, tree = self._tree(name, revision)
        answers = []
        for file in json.loads(self.body)["files"]:
            large = file["size"] > LARGE or file["path"].endswith(LFS_ENDINGS)
            there = tree.get(file["path"])
            oid = {"oid": there.oid} if there else {}
            mode = "lfs" if large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **oid})
        self._reply({"files": answers})

    def batch(self, query: dict[str, list[str]], kind: str | None, name: str) -> None:
        self._check_writer()
        objects = []
        for asked in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.server.url}/lfs/{asked['oid']}"}}
            known = (self.server.folder / asked["oid"]).exists()
            objects.append({**asked, **({} if known else {"actions": upload})})
        self._reply({"objects": objects, "transfer": "basic"})

    def store(self, query: dict[str, list[str]], oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.put_blob(self.body, is_lfs=True)
        self.server.uploaded.append(oid)
        self._reply({})

    def commit(self, query: dict[str, list[str]], name: str, revision: str) -> None:
        self._check_writer()
        newest, tree = self._tree(name, revision)
        tree = dict(tree)
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                if value.get("parentCommit", newest) != newest:
                    raise Refused(412, "", "A commit has happened since")
            elif item["key"] == "file":
                tree[value["path"]] = self.server.put_blob(base64.b64decode(value["content"]), is_lfs=False)
                self.server.uploaded.append(value["path"])
            elif item["key"] == "lfsFile":
                assert (self.server.folder / value["oid"]).exists()
                tree[value["path"]] = Blob(value["oid"], value["size"], True)
            elif item["key"] == "deletedFile":
                del tree[value["path"]]
        oid = self.server.repos[name].add(revision, tree)
        self._reply({"commitOid": oid, "commitUrl": f"{self.server.url}/{name}/commit/{oid}"})

    def resolve(self, query: dict[str, list[str]], kind: str | None, name: str, revision: str, path: str) -> None:
        commit, tree = self._tree(f"{kind or 'models'}/{name}", revision)
        if path not in tree:
            raise Refused(404, "EntryNotFound", "Entry not found")
        content = (self.server.folder / tree[path].oid).read_bytes()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{tree[path].oid}"', "Accept-Ranges": "bytes"}
        begun = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if begun:
            start = int(begun[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._reply(content[start:], 206, headers)
        if self.command == "GET" and tree[path].is_lfs and self.server.cut_after is not None:
            return self._cut_off(content, headers)
        return self._reply(content, headers=headers)

    def _cut_off(self, content: bytes, headers: dict[str, str]) -> None:
        cut, self.server.cut_after = self.server.cut_after, None
        self.send_response(200)
        for name, text in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content[:cut])
        self.close_connection = True

    def validate(self, query: dict[str, list[str]]) -> None:
        self._reply({"errors": [], "warnings": []})


NAME = r"[\w.-]+/[\w.-]+"
REPO = rf"/api/((?:models|datasets)/{NAME})"
ROUTES = [
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate),
    ("GET", rf"{REPO}/revision/(.+)", Handler.info),
    ("GET", rf"{REPO}/tree/([^/]+)", Handler.tree),
    ("POST", rf"{REPO}/branch/(.+)", Handler.branch),
    ("POST", rf"{REPO}/preupload/(.+)", Handler.preupload),
    ("POST", rf"{REPO}/commit/(.+)", Handler.commit),
    ("POST", rf"/(?:(datasets)/)?({NAME})\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/lfs/(\w+)", Handler.store),
    ("GET|HEAD", rf"/(?:(datasets)/)?({NAME})/resolve/([^/]+)/(.+)", Handler.resolve),
]
