"""A real kube-apiserver with its etcd: see tests/apiserver/main.go."""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import urllib3
import yaml

from tests.stopwatch import Stopwatch

Json = dict[str, Any]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class ApiServerError(Exception):
    """The API server did not start, or refused a request with `status` and a message."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Answer(NamedTuple):
    status: int
    body: Json


class ApiServer:
    """One API server process. Tests that share it use names of their own in it."""

    def __init__(self, program: Path, arguments: Sequence[str] = ()) -> None:
        """`arguments` are kube-apiserver's; the last one of a name counts."""
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by end
        self.process = subprocess.Popen(
            [str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
        )
        try:
            reach = self.read_reach()
        except ApiServerError:
            self.end()
            raise
        self.url: str = reach["url"]
        self.ca = Path(reach["ca"])
        self.token: str = reach["token"]
        self.kubeconfig = Path(reach["kubeconfig"])
        self.http = urllib3.PoolManager(ca_certs=str(self.ca), retries=False, timeout=30)
        self.paths: dict[tuple[str, str], tuple[str, bool]] = {}

    def __enter__(self) -> "ApiServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_reach(self) -> Json:
        """How to reach it, once it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ApiServerError(f"the API server did not start:\n{self.log()[-3000:]}")
        reach: Json = json.loads(line)
        return reach

    def close(self) -> None:
        self.http.clear()
        if not self.end():
            shutil.rmtree(self.ca.parent, ignore_errors=True)

    def end(self) -> bool:
        """Close its standard input, its sign to remove its folder and end; whether it did."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.stdout.close()
        self.stderr.close()
        return self.process.wait() == 0

    def log(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        content_type: str = "application/json",
    ) -> Answer:
        """One HTTPS request, as the admin or with another token; no status is an error here."""
        answer = self.http.request(
            method,
            self.url + path,
            body=None if body is None else json.dumps(body),
            headers={
                "Authorization": f"Bearer {token or self.token}",
                "Content-Type": content_type,
                "Accept": "application/json",
            },
        )
        text = answer.data.decode()
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return Answer(answer.status, json.loads(text) if is_json else {"message": text})

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Json:
        """As `request`, but only a success is an answer."""
        answer = self.request(method, path, body, **options)
        if answer.status >= 400:
            message = answer.body.get("message")
            raise ApiServerError(
                f"{method} {path}: {answer.status} {message}", status=answer.status
            )
        return answer.body

    def get(self, path: str) -> Json:
        return self.ask("GET", path)

    def create(self, path: str, body: Any) -> Json:
        return self.ask("POST", path, body)

    def delete(self, path: str) -> Json:
        return self.ask("DELETE", path)

    def path(self, manifest: Mapping[str, Any]) -> str:
        """Where an object is, by the API server's own discovery."""
        kind = (manifest["apiVersion"], manifest["kind"])
        if kind not in self.paths:
            group = f"/apis/{kind[0]}" if "/" in kind[0] else f"/api/{kind[0]}"
            found = {r["kind"]: r for r in self.get(group)["resources"] if "/" not in r["name"]}
            if kind[1] not in found:
                raise ApiServerError(f"{kind[0]} has no {kind[1]}")
            self.paths[kind] = (f"{group}/%s{found[kind[1]]['name']}", found[kind[1]]["namespaced"])
        pattern, namespaced = self.paths[kind]
        metadata = manifest["metadata"]
        namespace = f"namespaces/{metadata.get('namespace', 'default')}/" if namespaced else ""
        return f"{pattern % namespace}/{metadata['name']}"

    def apply(
        self, manifest: Mapping[str, Any], *, field_manager: str = "tests", force: bool = True
    ) -> Json:
        """Server-side apply; after a CustomResourceDefinition, wait until it can be used."""
        forced = "true" if force else "false"
        path = self.path(manifest)
        query = f"?fieldManager={field_manager}&force={forced}"
        applied = self.ask("PATCH", path + query, manifest, content_type=APPLY)
        if manifest["kind"] == "CustomResourceDefinition":
            self.wait_established(path)
        return applied

    def apply_files(self, *files: Path) -> None:
        """Apply every document of these YAML files, in order."""
        for file in files:
            for manifest in yaml.safe_load_all(file.read_text()):
                if manifest:
                    self.apply(manifest)

    def wait_established(self, crd_path: str, *, within_s: float = 30) -> None:
        """Return when every version is served and told, each a moment after the CRD's condition."""
        stopwatch = Stopwatch()
        spec = self.get(crd_path)["spec"]
        for version in (v["name"] for v in spec["versions"] if v["served"]):
            told = f"/apis/{spec['group']}/{version}"
            for path in (told, f"{told}/{spec['names']['plural']}?limit=1"):
                while self.request("GET", path).status != 200:
                    if stopwatch.past(within_s):
                        raise ApiServerError(f"{path} is not served after {within_s} s")
                    time.sleep(0.02)

    def create_namespace(self, prefix: str = "test") -> str:
        """A new namespace, whose name nothing else has."""
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        self.create("/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def create_service_account(self, namespace: str, name: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self.create(path, {"metadata": {"name": name}})

    def create_node(self, name: str) -> Json:
        return self.create("/api/v1/nodes", {"metadata": {"name": name}})

    def create_pod(
        self, namespace: str, name: str, *, service_account: str, node: str | None = None
    ) -> Json:
        """A pod that is bound to a node and never runs."""
        spec: Json = {
            "serviceAccountName": service_account,
            "containers": [{"name": "c", "image": "none"}],
        }
        if node is not None:
            spec["nodeName"] = node
        body = {"metadata": {"name": name}, "spec": spec}
        return self.create(f"/api/v1/namespaces/{namespace}/pods", body)

    def create_token(
        self, namespace: str, service_account: str, *, pod: Mapping[str, Any] | None = None
    ) -> str:
        """A service account's token as the kubelet would project it.

        Bound to a pod (an object that `create_pod` gave) it names the pod's node, and ends with it.
        """
        spec: Json = {"expirationSeconds": 3600}
        if pod is not None:
            names = {key: pod["metadata"][key] for key in ("name", "uid")}
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", **names}
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}"
        token: str = self.create(f"{account}/token", {"spec": spec})["status"]["token"]
        return token

    def grant(self, namespace: str, service_account: str, rules: Sequence[Json]) -> None:
        """Gives a service account these rights in the whole cluster, by a role of its own."""
        group = "rbac.authorization.k8s.io"
        name = f"{namespace}-{service_account}"
        self.create(
            f"/apis/{group}/v1/clusterroles", {"metadata": {"name": name}, "rules": [*rules]}
        )
        binding: Json = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [
                {"kind": "ServiceAccount", "name": service_account, "namespace": namespace}
            ],
        }
        self.create(f"/apis/{group}/v1/clusterrolebindings", binding)

    def write_kubeconfig(self, path: Path, *, token: str, url: str | None = None) -> Path:
        """A kubeconfig as the admin's, with another token, and with the URL of who passes on to
        the server by plain HTTP."""
        config = yaml.safe_load(self.kubeconfig.read_text())
        if url is not None:
            config["clusters"][0]["cluster"] = {"server": url}
        config["users"][0]["user"]["token"] = token
        path.write_text(yaml.safe_dump(config))
        return path
