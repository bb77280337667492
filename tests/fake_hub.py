"""A small local Hub: the calls that `huggingface_hub` makes to push and pull, answered as strictly as by the real one.

It keeps commits, branches and large files, wants tokens where the Hub wants them, checks names, front matter, hashes
and parents, and can be told to fail on any call: with a status, or by cutting the connection, for a while or for good.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

CUT = "cut"  # the connection ends without an answer
CUT_AFTER = "cut after"  # the call is carried out, and its answer lost

_PREFIXES = {"model": "", "dataset": "datasets/", "space": "spaces/"}
_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_LICENCES = {"apache-2.0", "mit", "cc-by-4.0", "cc0-1.0", "llama3", "other", "unknown"}
_RELATIONS = {"adapter", "merge", "quantized", "finetune"}
_COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


@dataclass(frozen=True)
class Blob:
    """A file in a commit: its content, or the hash under which the large-file store has it."""

    content: bytes
    lfs: bool

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.content).hexdigest() if self.lfs else self.git_oid


@dataclass
class Repo:
    """One repository. A commit is a whole tree."""

    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add_commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        seed = json.dumps([self.branches.get(branch), message, sorted((p, b.etag) for p, b in files.items())])
        sha = hashlib.sha1(f"{seed}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Failure:
    """What calls of this method and path end with, so many times."""

    method: str
    path: str
    outcome: int | str
    times: float = float("inf")


class Answer(Exception):
    """Ends a call."""

    def __init__(self, status: int, body: Any = None, code: str | None = None, **headers: str):
        self.status, self.body, self.headers = status, body, headers
        if code:
            self.headers["X-Error-Code"] = code


def refuse(status: int, message: str, code: str | None = None) -> Answer:
    return Answer(status, {"error": message}, code, **{"X-Error-Message": message})


class FakeHub:
    """The server. `with FakeHub() as hub:` serves at `hub.url`.

    Attributes:
        tokens: token -> (user, whether it may write, namespaces of the user).
        repositories: (type, NAMESPACE/NAME) -> what is there.
        large_files: hash -> content, shared by all repositories.
        failures: what is to go wrong.
        calls: "METHOD path" of every call.
        strange: calls that this server does not know.
    """

    def __init__(self) -> None:
        self.tokens = {
            "hf_alice": ("alice", True, {"alice", "team"}),
            "hf_bob": ("bob", True, {"bob"}),
            "hf_reader": ("alice", False, {"alice", "team"}),
        }
        self.repositories: dict[tuple[str, str], Repo] = {}
        self.large_files: dict[str, bytes] = {}
        self.failures: list[Failure] = []
        self.calls: list[str] = []
        self.strange: list[str] = []
        self.before: Callable[[str, str], None] | None = None  # called before every call, to interfere
        self.lock = threading.RLock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                hub.handle(self)

            do_GET = do_HEAD = do_POST = do_PUT = handle_one

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.storage = f"http://localhost:{self.server.server_address[1]}"  # another host, which gets no token

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method: str, path: str, outcome: int | str, times: float = float("inf")) -> None:
        """Lets calls fail whose path matches a regular expression."""
        self.failures.append(Failure(method, path, outcome, times))

    def files(self, repo_id: str, repo_type: str = "model", revision: str = "main") -> dict[str, bytes]:
        """What a revision holds."""
        repo = self.repositories[repo_type, repo_id]
        sha = repo.resolve(revision)
        assert sha is not None
        return {path: blob.content for path, blob in repo.commits[sha].items()}

    # -- one call ------------------------------------------------------------------------------------------------------

    def handle(self, call: BaseHTTPRequestHandler) -> None:
        body = call.rfile.read(int(call.headers.get("Content-Length") or 0))
        if call.headers.get("Transfer-Encoding") == "chunked":
            body = _chunks(call)
        url = urlsplit(call.path)
        path = unquote(url.path)
        with self.lock:
            if path != "/api/agent-harnesses":
                self.calls.append(f"{call.command} {path}")
            failure = next(
                (f for f in self.failures if f.method == call.command and f.times > 0 and re.search(f.path, path)), None
            )
            if failure is not None:
                failure.times -= 1
        if failure is not None and failure.outcome == CUT:
            return self._cut(call)
        if self.before is not None:
            self.before(call.command, path)
        try:
            with self.lock:
                if failure is not None and isinstance(failure.outcome, int):
                    message = f"told to fail with {failure.outcome}"
                    raise Answer(
                        failure.outcome,
                        {"error": message, "url": f"{self.url}/some/body"},
                        **{"X-Error-Message": message},
                    )
                self._route(call, path, url.path, parse_qs(url.query), body)
                self.strange.append(f"{call.command} {path}")
                raise refuse(404, f"no such call: {call.command} {path}")
        except Answer as answer:
            if failure is not None and failure.outcome == CUT_AFTER:
                return self._cut(call)
            self._send(call, answer)
        return None

    def _cut(self, call: BaseHTTPRequestHandler) -> None:
        call.close_connection = True
        call.connection.close()

    def _send(self, call: BaseHTTPRequestHandler, answer: Answer) -> None:
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        call.send_response(answer.status)
        kind = "application/octet-stream" if isinstance(answer.body, bytes) else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "X-Request-Id": "fake"} | answer.headers
        for name, value in headers.items():
            call.send_header(name, value)
        call.end_headers()
        if call.command != "HEAD":
            call.wfile.write(content)

    def _route(
        self, call: BaseHTTPRequestHandler, path: str, raw: str, query: dict[str, list[str]], body: bytes
    ) -> None:
        method = call.command
        if (method, path) == ("POST", "/api/repos/create"):
            self._create(call, json.loads(body))
        if (method, path) == ("POST", "/api/validate-yaml"):
            request = json.loads(body)
            errors = front_matter_errors(request["content"], request["repoType"])
            raise Answer(400 if errors else 200, {"errors": [{"message": e} for e in errors], "warnings": []})
        if (method, path) == ("GET", "/api/agent-harnesses"):  # the client asks once a day who drives it
            raise Answer(200, {"standardEnvVars": [], "harnesses": {}})
        if match := re.fullmatch(r"/lfs/upload/([0-9a-f]{64})/(\d+)", path):
            self._upload(call, match[1], int(match[2]), body)
        if match := re.fullmatch(r"/lfs/object/([0-9a-f]{64})", path):
            if call.headers.get("Authorization"):
                raise refuse(400, "a signed address takes no token")
            raise Answer(200, self.large_files[match[1]], ETag=f'"{match[1]}"')
        if match := re.fullmatch(r"/(datasets/|spaces/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(call, _type(match[1]), match[2], json.loads(body))
        if match := re.fullmatch(r"/(datasets/|spaces/)?([^/]+/[^/]+)\.git/info/lfs/verify", path):
            self._verify(call, _type(match[1]), match[2], json.loads(body))
        # a revision is one quoted segment
        if match := re.fullmatch(r"/(datasets/|spaces/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", raw):
            self._resolve(call, _type(match[1]), match[2], unquote(match[3]), unquote(match[4]))
        if match := re.fullmatch(r"/api/(model|dataset|space)s/([^/]+/[^/]+)(?:/(\w+)/([^/]+)(?:/(.+))?)?", raw):
            repo_type, repo_id, action, revision, rest = match.groups()
            revision = unquote(revision or "main")
            if method == "GET" and action in (None, "revision"):
                self._info(call, repo_type, repo_id, revision)
            if method == "GET" and action == "tree":
                self._tree(call, repo_type, repo_id, revision, unquote(rest or ""))
            if method == "POST" and action == "preupload":
                self._preupload(call, repo_type, repo_id, revision, json.loads(body))
            if method == "POST" and action == "commit":
                self._commit(call, repo_type, repo_id, revision, body)
            if method == "POST" and action == "branch":
                self._branch(call, repo_type, repo_id, revision, json.loads(body or b"{}"))

    # -- who may do what -----------------------------------------------------------------------------------------------

    def _user(self, call: BaseHTTPRequestHandler, required: bool = True) -> tuple[str, bool, set[str]] | None:
        header = call.headers.get("Authorization")
        if header is None:
            if required:
                raise refuse(401, "Invalid username or password.")
            return None
        user = self.tokens.get(header.removeprefix("Bearer "))
        if user is None:
            raise refuse(401, "Invalid credentials in Authorization header")
        return user

    def _readable(self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str) -> Repo:
        user = self._user(call, required=False)
        repo = self.repositories.get((repo_type, repo_id))
        if repo is None or (repo.private and (user is None or repo_id.split("/")[0] not in user[2])):
            raise refuse(404 if user else 401, "Repository not found", "RepoNotFound")
        return repo

    def _writable(self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str) -> Repo:
        user = self._user(call)
        repo = self._readable(call, repo_type, repo_id)
        assert user is not None
        if not user[1] or repo_id.split("/")[0] not in user[2]:
            raise refuse(403, "Forbidden: pass a token with write access to this repository.")
        return repo

    def _files(self, repo: Repo, revision: str) -> tuple[str, dict[str, Blob]]:
        sha = repo.resolve(revision)
        if sha is None:
            raise refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repo.commits[sha]

    # -- writing -------------------------------------------------------------------------------------------------------

    def _create(self, call: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        user = self._user(call)
        assert user is not None
        name, namespace = request["name"], request.get("organization") or user[0]
        if not _NAME.fullmatch(name) or len(name) > 96 or name.endswith(".git"):
            raise refuse(400, f"Invalid repository name {name!r}")
        if namespace not in user[2] or not user[1]:
            raise refuse(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')
        kind = request.get("type") or "model"
        if kind == "space" and request.get("sdk") not in ("gradio", "static", "docker"):
            raise refuse(400, "A Space needs an sdk")
        key, url = (kind, f"{namespace}/{name}"), f"{self.url}/{_PREFIXES[kind]}{namespace}/{name}"
        if key in self.repositories:
            raise Answer(409, {"error": "You already created this repo", "url": url})
        repo = self.repositories[key] = Repo(request.get("visibility") == "private")
        repo.add_commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}, "initial commit")
        raise Answer(200, {"url": url, "name": f"{namespace}/{name}", "id": "0"})

    def _branch(
        self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str, branch: str, request: dict[str, Any]
    ) -> None:
        repo = self._writable(call, repo_type, repo_id)
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", branch) or branch.startswith("refs/"):
            raise refuse(400, f"Invalid reference for a branch: {branch}")
        if branch in repo.branches:
            raise refuse(409, f"Reference already exists: {branch}")
        repo.branches[branch], _ = self._files(repo, request.get("startingPoint", "main"))
        raise Answer(200, {})

    def _preupload(
        self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str, revision: str, request: dict[str, Any]
    ) -> None:
        repo = self._writable(call, repo_type, repo_id)
        _, there = self._files(repo, revision)
        answers = []
        for entry in request["files"]:
            path, size = _checked_path(entry["path"]), entry["size"]
            sample = base64.b64decode(entry["sample"], validate=True)
            if len(sample) != min(size, 512):
                raise refuse(400, f"{path}: the sample is not the file's first 512 bytes")
            large = path.endswith((".safetensors", ".parquet", ".bin", ".png")) or size > 10 << 20 or b"\0" in sample
            old = there.get(path)
            answers.append(
                {
                    "path": path,
                    "uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": False,
                    "oid": old.etag if old else None,
                }
            )
        raise Answer(200, {"files": answers})

    def _batch(self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str, request: dict[str, Any]) -> None:
        self._writable(call, repo_type, repo_id)
        if call.headers.get("Content-Type") != "application/vnd.git-lfs+json" or request.get("hash_algo") != "sha256":
            raise refuse(415, "not a git-lfs batch")
        objects = []
        for entry in request["objects"]:
            if not re.fullmatch("[0-9a-f]{64}", entry["oid"]):
                raise refuse(422, "an oid is 64 hexadecimal digits")
            answer: dict[str, Any] = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.large_files:
                answer["actions"] = {
                    "upload": {"href": f"{self.url}/lfs/upload/{entry['oid']}/{entry['size']}", "header": {}},
                    "verify": {"href": f"{self.url}/{_PREFIXES[repo_type]}{repo_id}.git/info/lfs/verify", "header": {}},
                }
            objects.append(answer)
        raise Answer(200, {"objects": objects, "transfer": "basic"})

    def _upload(self, call: BaseHTTPRequestHandler, oid: str, size: int, body: bytes) -> None:
        if call.command != "PUT":
            raise refuse(405, "PUT only")
        if call.headers.get("Authorization"):
            raise refuse(400, "a signed address takes no token")  # and nobody should send it one
        if len(body) != size or hashlib.sha256(body).hexdigest() != oid:
            raise refuse(400, "BadDigest: the content is not what was announced")
        self.large_files[oid] = body
        raise Answer(200, b"", ETag=f'"{oid}"')

    def _verify(self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str, request: dict[str, Any]) -> None:
        self._writable(call, repo_type, repo_id)
        stored = self.large_files.get(request["oid"])
        if stored is None or len(stored) != request["size"]:
            raise refuse(422, "no such object")
        raise Answer(200, {})

    def _commit(self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str, branch: str, body: bytes) -> None:
        repo = self._writable(call, repo_type, repo_id)
        if call.headers.get("Content-Type") != "application/x-ndjson":
            raise refuse(415, "a commit is application/x-ndjson")
        parent, there = self._files(repo, branch)
        if branch not in repo.branches:
            raise refuse(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        if not lines or lines[0]["key"] != "header" or not lines[0]["value"].get("summary"):
            raise refuse(400, "a commit begins with a header that has a summary")
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, parent):
            raise refuse(412, "A commit has happened since. Please refresh and try again.")
        files = dict(there)
        for line in lines[1:]:
            value = line["value"]
            path = _checked_path(value["path"])
            if line["key"] == "file":
                files[path] = Blob(base64.b64decode(value["content"], validate=True), False)
            elif line["key"] == "lfsFile":
                stored = self.large_files.get(value["oid"])
                if stored is None or len(stored) != value["size"]:
                    raise refuse(400, f"{path} points to a large file that was not uploaded")
                files[path] = Blob(stored, True)
            elif line["key"] == "deletedFile":
                if files.pop(path, None) is None:
                    raise refuse(404, "A file with this name doesn't exist", "EntryNotFound")
            else:
                raise refuse(400, f"unknown operation {line['key']}")
        if len(lines) == 1:
            raise refuse(400, "an empty commit")
        errors = front_matter_errors(files["README.md"].content.decode(), repo_type) if "README.md" in files else []
        if errors:
            raise refuse(400, "; ".join(errors))
        sha = repo.add_commit(branch, files, header["summary"])
        url = f"{self.url}/{_PREFIXES[repo_type]}{repo_id}/commit/{sha}"
        raise Answer(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    # -- reading -------------------------------------------------------------------------------------------------------

    def _info(self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str, revision: str) -> None:
        repo = self._readable(call, repo_type, repo_id)
        sha, files = self._files(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        raise Answer(
            200,
            {"_id": "0", "id": repo_id, "modelId": repo_id, "sha": sha, "private": repo.private, "siblings": siblings}
            | {"tags": [], "downloads": 0, "likes": 0, "disabled": False, "gated": False},
        )

    def _tree(self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str, revision: str, folder: str) -> None:
        repo = self._readable(call, repo_type, repo_id)
        _, files = self._files(repo, revision)
        chosen = {p: b for p, b in files.items() if not folder or p.startswith(folder.rstrip("/") + "/")}
        if folder and not chosen:
            raise refuse(404, f"{folder} does not exist", "EntryNotFound")
        entries: list[dict[str, Any]] = []
        for path, blob in sorted(chosen.items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.git_oid}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.etag, "size": len(blob.content), "pointerSize": 134}
            entries.append(entry)
        raise Answer(200, entries)

    def _resolve(self, call: BaseHTTPRequestHandler, repo_type: str, repo_id: str, revision: str, path: str) -> None:
        repo = self._readable(call, repo_type, repo_id)
        sha, files = self._files(repo, revision)
        blob = files.get(path)
        if blob is None:
            raise Answer(
                404, {"error": "Entry not found"}, "EntryNotFound", **{"X-Repo-Commit": sha, "X-Error-Message": "none"}
            )
        if not blob.lfs:
            raise Answer(200, blob.content, **{"X-Repo-Commit": sha, "ETag": f'"{blob.etag}"'})
        headers = {
            "X-Repo-Commit": sha,
            "X-Linked-Etag": f'"{blob.etag}"',
            "X-Linked-Size": str(len(blob.content)),
            "Location": f"{self.storage}/lfs/object/{blob.etag}",
        }
        raise Answer(302, b"", **headers)


def front_matter_errors(content: str, repo_type: str) -> list[str]:
    """What the Hub says against a card's metadata."""
    match = re.match(r"\s*---\r?\n(.*?)\r?\n---\s*(\n|$)", content, re.DOTALL)
    if match is None:
        return ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"invalid yaml: {error}"]
    if not isinstance(data, dict):
        return ["the metadata is no mapping"]
    errors = []
    if data.get("license", "other") not in _LICENCES:
        errors.append(f'"license" must be one of {sorted(_LICENCES)}')
    for name in ("base_model", "datasets"):
        values = data.get(name, [])
        for value in values if isinstance(values, list) else [values]:
            if not isinstance(value, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
                errors.append(f'"{name}" with value {value!r} is not valid: use a model id from https://hf.co/models')
    if data.get("base_model_relation", "adapter") not in _RELATIONS:
        errors.append(f'"base_model_relation" must be one of {sorted(_RELATIONS)}')
    tags = data.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        errors.append('"tags" must be an array of strings')
    for model in data.get("model-index", []):
        for result in model.get("results", [{}]) if isinstance(model, dict) and model.get("name") else [{}]:
            wanted = [("task", "type"), ("dataset", "type"), ("dataset", "name")]
            missing = [f"{outer}.{inner}" for outer, inner in wanted if not result.get(outer, {}).get(inner)]
            if missing or not result.get("metrics"):
                errors.append(f'"model-index" lacks {missing or "metrics"}')
            for metric in result.get("metrics", []):
                if "type" not in metric or "value" not in metric:
                    errors.append('"model-index": a metric has a type and a value')
    if repo_type == "space":
        if data.get("sdk") not in ("gradio", "docker", "static"):
            errors.append('"sdk" must be one of [gradio, docker, static]')
        for name in ("colorFrom", "colorTo"):
            if data.get(name, "red") not in _COLOURS:
                errors.append(f'"{name}" must be one of {sorted(_COLOURS)}')
        if not re.fullmatch(r"\d+\.\d+\.\d+", str(data.get("sdk_version", ""))):
            errors.append('"sdk_version" must be a version')
        if len(data.get("short_description", "")) > 60:
            errors.append('"short_description" must be at most 60 characters long')
    return errors


def _checked_path(path: str) -> str:
    if not path or path.startswith("/") or any(part in ("", ".", "..", ".git") for part in path.split("/")):
        raise refuse(400, f"{path!r} is not a path in a repository")
    return path


def _type(prefix: str | None) -> str:
    return (prefix or "models/").rstrip("/").removesuffix("s")


def _chunks(call: BaseHTTPRequestHandler) -> bytes:
    body = b""
    while size := int(call.rfile.readline().split(b";")[0], 16):
        body += call.rfile.read(size)
        call.rfile.readline()
    call.rfile.readline()
    return body
