"""Where the API server is and who we are: the pod's service account, or a kubeconfig."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ApiError(Exception):
    """A request that the API server did not grant, or that did not reach it.

    `status` is None when no answer came, `reason` Kubernetes' word (Conflict, Forbidden, …) or
    "Unreachable". `retry_after_s` is what the server asked for.
    """

    def __init__(
        self,
        asked: str,
        reason: str,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
        unknown_kind: bool = False,
    ) -> None:
        self.answer = f"{status} {reason}: {message}" if status else f"{reason}: {message}"
        super().__init__(f"{asked}: {self.answer}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.unknown_kind = unknown_kind
        """Whether the path itself is unknown: the custom resource definition is missing."""

    @property
    def is_of_all(self) -> bool:
        """Whether any request would have failed so: nobody answers, or has too much to do."""
        return self.reason == "Unreachable" or self.status in (429, *range(500, 600))


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach an API server; secrets are named by file where they can change."""

    server: str  # https://host:port, http only on loopback
    ca_file: Path | None = None
    ca_data: str | None = None  # PEM
    token: str | None = None
    token_file: Path | None = None
    certificate: bytes | None = None  # PEM of a client certificate, with its key
    key: bytes | None = None
    server_name: str | None = None  # what the server's certificate is checked for

    def __post_init__(self) -> None:
        url = urlsplit(self.server)
        plain = url.scheme == "http" and url.hostname in ("127.0.0.1", "::1", "localhost")
        if url.hostname is None or not (url.scheme == "https" or plain):
            raise ValueError(f"expected https://host:port for the API server, got {self.server!r}")

    def __repr__(self) -> str:
        return f"Access({self.server!r})"


def in_cluster(
    environment: Mapping[str, str] = os.environ, *, secrets: Path = SERVICE_ACCOUNT
) -> Access:
    """The pod's own service account. Raises ApiError outside of a pod."""
    host, port = (environment.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if not host or not port:
        raise ApiError(
            "service account",
            "NoAccess",
            "KUBERNETES_SERVICE_HOST and _PORT are not set, so this is no pod; give --kubeconfig",
        )
    if not (secrets / "token").exists():
        raise ApiError(
            "service account",
            "NoAccess",
            f"{secrets / 'token'} does not exist; set automountServiceAccountToken, "
            "or give --kubeconfig",
        )
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_file=secrets / "ca.crt",
        token_file=secrets / "token",
    )


def read_kubeconfig(path: Path, *, context: str | None = None) -> Access:
    """The access that a kubeconfig's current (or the named) context describes.

    Understood: server, certificate authority, tls-server-name, token, token file and client
    certificate, as files or data. Exec plugins, auth providers, user names with passwords,
    impersonation, proxies and unverified TLS are refused by name. Raises ApiError.
    """
    try:
        return described(read_yaml(path), path.parent, context)
    except OSError as error:
        raise ApiError(str(path), "NoAccess", error.strerror or str(error)) from error
    except ValueError as error:
        raise ApiError(str(path), "NoAccess", str(error)) from error


def read_yaml(path: Path) -> Any:
    """Raises OSError, and ValueError for what is no YAML."""
    import yaml  # noqa: PLC0415 - memory that a pod with a service account need not pay

    try:
        return yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from error


def described(config: object, folder: Path, context: str | None) -> Access:
    """`folder` is what file names are relative to. Raises ValueError, which says what is wrong."""
    if not isinstance(config, dict):
        raise ValueError("not a kubeconfig")
    chosen = entry(config, "contexts", context or config.get("current-context"))
    cluster = entry(config, "clusters", chosen.get("cluster"))
    user = entry(config, "users", chosen.get("user")) if chosen.get("user") else {}
    for key in ("exec", "auth-provider", "username", "as"):
        if user.get(key):
            raise ValueError(
                f"user.{key} is not supported here; use a token or a client certificate"
            )
    for key in ("proxy-url", "insecure-skip-tls-verify"):
        if cluster.get(key):
            raise ValueError(f"cluster.{key} is not supported here")
    authority = content(cluster, "certificate-authority", folder)
    token_file = user.get("tokenFile")
    return Access(
        server=str(cluster.get("server")),
        ca_data=pem(authority, "certificate-authority") if authority else None,
        token=user.get("token"),
        token_file=folder / str(token_file) if token_file else None,
        certificate=content(user, "client-certificate", folder),
        key=content(user, "client-key", folder),
        server_name=cluster.get("tls-server-name"),
    )


def entry(config: Mapping[str, Any], section: str, name: object) -> dict[str, Any]:
    """What a section has under a name. Raises ValueError where it has nothing."""
    items = config.get(section)
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("name") == name:
            found = item.get(section.removesuffix("s")) or {}
            if isinstance(found, dict):
                return found
    raise ValueError(f"{section} has no entry {name!r}")


def content(of: Mapping[str, Any], key: str, folder: Path) -> bytes | None:
    """What stands in `<key>-data`, else in the file that `<key>` names. Raises ValueError."""
    if data := of.get(f"{key}-data"):
        try:
            return base64.b64decode(str(data), validate=True)
        except binascii.Error as error:
            raise ValueError(f"{key}-data: not base64") from error
    if file := of.get(key):
        try:
            return (folder / str(file)).read_bytes()
        except OSError as error:
            raise ValueError(f"{key}: {file}: {error.strerror}") from error
    return None


def pem(content: bytes, key: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: not PEM") from error
