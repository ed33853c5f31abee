"""The script of `helm test`: it checks that the control plane is ready, serves a policy, and injects a sidecar."""

import base64
import json
import os
import pathlib
import ssl
import sys
import urllib.error
import urllib.request


def ask(url, body=None, context=None):
    """Return the parsed response to a GET, or to a POST of `body` as JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    if "TOKEN_FILE" in os.environ:
        headers["authorization"] = f"Bearer {pathlib.Path(os.environ['TOKEN_FILE']).read_text().strip()}"
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=10, context=context) as response:
        text = response.read()
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_ready(base, context):
    ask(f"{base}/readyz", context=context)


def check_policy(base, context):
    kind = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"
    # The control plane does not list a probe as a sidecar.
    node = {"id": os.environ["NODE_ID"], "metadata": {"role": "render", "probe": True}}
    response = ask(f"{base}/v3/discovery:extension_configs", {"node": node, "type_url": kind}, context)
    if not (response["version_info"] and response["resources"]):
        raise ValueError(f"the response has no policy: {response}")


def check_injection(url, context):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "helm-test-", "labels": {"vllm-priority.io/inject": "true"}},
        "spec": {
            "containers": [
                {
                    "name": "vllm",
                    "image": "vllm",
                    "command": ["vllm", "launch", "render", "model"],
                    "ports": [{"name": "http", "containerPort": 8000}],
                }
            ]
        },
    }
    review = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "helm-test",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "helm-test",
            "operation": "CREATE",
            "dryRun": True,
            "object": pod,
        },
    }
    response = ask(url, review, context)["response"]
    patch = json.loads(base64.b64decode(response.get("patch", "W10=")))
    if not (response["allowed"] and any("vllm-priority" in json.dumps(step) for step in patch)):
        raise ValueError(f"the response does not inject a sidecar: {response}")


def main():
    base, url = os.environ["CONTROL_PLANE_URL"], os.environ.get("INJECT_URL")
    context = ssl.create_default_context(cadata=os.environ["CA_BUNDLE"])
    checks = [("is ready", check_ready, base), ("serves a policy", check_policy, base)]
    if url:
        checks.append(("injects a sidecar", check_injection, url))
    failed = False
    for what, check, where in checks:
        try:
            check(where, context)
            print(f"ok      the control plane {what} ({where})")
        except (OSError, ValueError, KeyError, TypeError) as error:
            failed = True
            print(f"FAILED  the control plane {what} ({where}): {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
