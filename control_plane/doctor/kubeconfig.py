"""Reads a kubeconfig, as kubectl does, so that the doctor needs no kubectl and no client library.

Supported: several files in KUBECONFIG, contexts, CA files and data, client certificates, tokens, token files, and
exec plugins (client.authentication.k8s.io/v1 and v1beta1), which cloud providers use. Not supported, and rejected:
tls-server-name, proxy-url, user names with passwords, and auth-provider, which Kubernetes 1.26 removed.
"""

import base64
import binascii
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from control_plane.errors import InvalidField
from control_plane.kubernetes_api import ApiAccess, in_cluster, trust

_PLUGIN_SECONDS = 60
_PLUGIN_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_UNSUPPORTED = {"cluster": ("tls-server-name", "proxy-url"), "user": ("username", "auth-provider", "as")}


def find_access(
    path: str | None = None, context: str | None = None, environment: Mapping[str, str] = os.environ
) -> ApiAccess:
    """Return the access to a cluster.

    Args:
        path: the kubeconfig. None: the files that KUBECONFIG names, else ~/.kube/config, else, in a pod, the access
            that Kubernetes gives to its containers.
        context: the name of a context. None: the current one.
        environment: the environment variables.

    Raises:
        InvalidField: there is no kubeconfig, or it cannot be used.
        BadInput: the same, in a pod.
    """
    if path is not None:
        return _Kubeconfig([Path(path)]).access(context)
    named = [Path(name) for name in environment.get("KUBECONFIG", "").split(os.pathsep) if name]
    default = Path(environment.get("HOME", "/")) / ".kube" / "config"
    files = [file for file in named or [default] if file.exists()]
    if files:
        return _Kubeconfig(files).access(context)
    if not named and "KUBERNETES_SERVICE_HOST" in environment:
        return in_cluster(environment)
    missing = ", ".join(str(file) for file in named or [default])
    raise InvalidField("kubeconfig", f"there is no kubeconfig at {missing}. Use the path of one, or set KUBECONFIG.")


class _Kubeconfig:
    """The merged content of kubeconfig files. As with kubectl, the first file that sets a value wins."""

    def __init__(self, files: list[Path]) -> None:
        self._files = ", ".join(str(file) for file in files)
        self._current: str | None = None
        self._entries: dict[str, dict[str, tuple[Path, Mapping[str, Any]]]] = {}
        for file in files:
            content = _read(file)
            self._current = self._current or content.get("current-context")
            for kind in ("cluster", "context", "user"):
                for entry in _list(content.get(f"{kind}s")):
                    found = self._entries.setdefault(kind, {})
                    found.setdefault(str(entry.get("name")), (file, _mapping(entry.get(kind))))

    def access(self, context: str | None) -> ApiAccess:
        name = context or self._current
        if not name:
            problem = f"{self._files} does not set current-context. Use the name of a context."
            raise InvalidField("context", problem)
        _, chosen = self._entry("context", name)
        file, cluster = self._entry("cluster", str(chosen.get("cluster")))
        user_file, user = self._entry("user", str(chosen["user"])) if chosen.get("user") else (file, {})
        for kind, entry in (("cluster", cluster), ("user", user)):
            for key in _UNSUPPORTED[kind]:
                if entry.get(key):
                    raise InvalidField(
                        "kubeconfig",
                        f"{self._files}: the {kind} of the context {name!r} has {key}, which is not supported."
                        " Run kubectl proxy, and use a kubeconfig with its address.",
                    )
        if not isinstance(cluster.get("server"), str):
            raise InvalidField("kubeconfig", f"{self._files}: the cluster of the context {name!r} has no server.")
        try:
            return _access(file, cluster, user_file, user)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            problem = f"{self._files}: the context {name!r} cannot be used: {reason}"
            raise InvalidField("kubeconfig", problem) from None

    def _entry(self, kind: str, name: str) -> tuple[Path, Mapping[str, Any]]:
        entries = self._entries.get(kind, {})
        if name not in entries:
            known = ", ".join(entries) or "none"
            problem = f"{self._files} has no {kind} {name!r}. It has: {known}."
            raise InvalidField("context" if kind == "context" else "kubeconfig", problem)
        return entries[name]


def _access(file: Path, cluster: Mapping[str, Any], user_file: Path, user: Mapping[str, Any]) -> ApiAccess:
    if user.get("exec"):
        user = {**user, **_plugin_credentials(user_file, user["exec"])}
    ca = _content(file, cluster, "certificate-authority")
    tls = trust(ca.decode() if ca is not None else None)
    if cluster.get("insecure-skip-tls-verify") is True:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    certificate, key = (_content(user_file, user, name) for name in ("client-certificate", "client-key"))
    if certificate is not None and key is not None:
        # Python loads a certificate and its key from a file only.
        with tempfile.NamedTemporaryFile() as pair:
            pair.write(certificate + b"\n" + key)
            pair.flush()
            tls.load_cert_chain(pair.name)
    token = user.get("token")
    if token is None and user.get("tokenFile"):
        token = (user_file.parent / str(user["tokenFile"])).read_text(encoding="utf-8").strip()
    return ApiAccess(cluster["server"], tls, lambda: token)


def _content(file: Path, entry: Mapping[str, Any], name: str) -> bytes | None:
    """What `NAME-data` or the file `NAME` contains. Paths are relative to the kubeconfig."""
    if data := entry.get(f"{name}-data"):
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, TypeError):
            raise ValueError(f"{name}-data is not valid base64") from None
    return (file.parent / str(entry[name])).read_bytes() if entry.get(name) else None


def _plugin_credentials(file: Path, plugin: Any) -> dict[str, Any]:
    """Run a credential plugin, and return its credentials with the names of a kubeconfig."""
    plugin = _mapping(plugin)
    version, command = plugin.get("apiVersion"), plugin.get("command")
    if version not in _PLUGIN_VERSIONS or not isinstance(command, str):
        raise ValueError(f"the exec plugin has the apiVersion {version!r}, which is not supported")
    if "/" in command:
        command = str(file.parent / command)
    variables = {str(entry["name"]): str(entry["value"]) for entry in _list(plugin.get("env"))}
    information = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    try:
        done = subprocess.run(
            [command, *map(str, plugin.get("args") or ())],
            env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(information)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PLUGIN_SECONDS, check=True,
        )  # fmt: skip
        status = _mapping(json.loads(done.stdout)["status"])
    except subprocess.CalledProcessError as error:
        raise ValueError(f"the exec plugin {command} failed: {error.stderr.strip()[-200:]}") from None
    except (subprocess.TimeoutExpired, KeyError, TypeError):
        raise ValueError(f"the exec plugin {command} returned no credentials") from None
    names = {"token": "token", "clientCertificateData": "client-certificate", "clientKeyData": "client-key"}
    found = {name: status[key] for key, name in names.items() if isinstance(status.get(key), str)}
    # A plugin returns PEM as it is, and a kubeconfig contains it in base64.
    return {
        name if name == "token" else f"{name}-data": text if name == "token" else base64.b64encode(text.encode())
        for name, text in found.items()
    }


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidField("kubeconfig", f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError):
        raise InvalidField("kubeconfig", f"{file} is not a kubeconfig: malformed YAML.") from None
    if not isinstance(content, dict) or content.get("kind") not in ("Config", None):
        raise InvalidField("kubeconfig", f"{file} is not a kubeconfig.")
    return content


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
