"""What an API client costs a daemon that has gRPC anyway: ours beside the official one.

A process each: it imports what the daemon has in any case, then the client, then reads one Node
and applies one object, and says what it holds by then. `python -m tests.bench clients`
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.publish import memory
from tests.gobuild import program
from tests.real_apiserver import ApiServer

NODE = "client-node"
NAME = "client-map"
BODY = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": NAME, "namespace": "default"},
    "data": {"a": "b"},
}


def nothing(kubeconfig: Path) -> None:
    """The daemon's other libraries."""


def thin(kubeconfig: Path) -> None:
    """rte.publish.apply over urllib3."""
    from rte.publish.access import read_kubeconfig
    from rte.publish.apply import ApiServer as Thin

    api = Thin(read_kubeconfig(kubeconfig))
    api.read_node(NODE)
    api.apply(f"/api/v1/namespaces/default/configmaps/{NAME}", BODY, force=True)


def official(kubeconfig: Path) -> None:
    """The kubernetes package."""
    import kubernetes

    kubernetes.config.load_kube_config(str(kubeconfig))  # type: ignore[no-untyped-call]
    core = kubernetes.client.CoreV1Api()
    core.read_node(NODE)
    core.patch_namespaced_config_map(
        NAME,
        "default",
        BODY,
        field_manager="rte",
        force=True,
        _content_type="application/apply-patch+yaml",
    )


CLIENTS = {client.__name__: client for client in (nothing, thin, official)}


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--as"]:
        run(arguments[1], Path(arguments[2]))
        return
    with ApiServer(program("apiserver", print)) as server:
        server.create_node(NODE)
        server.apply(BODY)
        print(f"{'client':<10} {'rss':>7} {'anon':>7} MiB {'start':>7} ms")
        for name in CLIENTS:
            command = [sys.executable, "-m", "tests.bench.clients", "--as", name]
            done = subprocess.run(
                [*command, str(server.kubeconfig)], capture_output=True, text=True, check=True
            )
            print(f"{name:<10} {done.stdout.rstrip()}")


def run(name: str, kubeconfig: Path) -> None:
    for library in ("msgspec", "prometheus_client", "yaml", "rte.kubelet.usage"):
        importlib.import_module(library)
    began = time.perf_counter()
    CLIENTS[name](kubeconfig)
    took_ms = 1000 * (time.perf_counter() - began)
    held = memory(os.getpid())
    print(f"{held.resident_mib:7.1f} {held.anonymous_mib:7.1f}     {took_ms:7.0f}")


if __name__ == "__main__":
    main(sys.argv[1:])
