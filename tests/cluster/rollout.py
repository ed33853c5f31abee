"""A workload that the cluster's nodes run, and a client that keeps sending requests to it.

Both run from the control plane's image: the workload's `vllm` is a script that starts the simulator.
"""

from typing import Any

SERVER = '''#!/usr/bin/env python
"""Stands in for vLLM's command: the simulator, on the port that the command line names."""
import argparse

import uvicorn

from control_plane.simulator import SimulatorSettings, create_app

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=8000)
port = parser.parse_known_args()[0].port
app = create_app(SimulatorSettings(kind="engine", slots=256, tokens_per_second=400))
uvicorn.run(app, host="0.0.0.0", port=port, log_level="warning")
'''

CLIENT = """
import json, os, sys, threading, time
import httpx

URL, SECONDS = os.environ["TARGET"], float(os.environ["SECONDS_TO_SEND"])
END = time.monotonic() + SECONDS
counts, failures, reports, lock = {"short": 0, "long": 0}, [], {}, threading.Lock()

def send(kind, tokens):
    # One connection, kept for as long as the server keeps it.
    with httpx.Client(timeout=60, limits=httpx.Limits(max_connections=1, max_keepalive_connections=1)) as client:
        while time.monotonic() < END:
            body = {"token_ids": [1], "sampling_params": {"max_tokens": tokens, "ignore_eos": True}}
            try:
                response = client.post(f"{URL}/inference/v1/generate", json=body, headers={"x-vllm-priority": "-10"})
                problem = None if response.status_code == 200 else f"{response.status_code} {response.text[:200]}"
                report = response.headers.get("x-vllm-priority-applied", "no report")
            except httpx.HTTPError as error:
                problem, report = f"{type(error).__name__}: {error}", "no response"
            with lock:
                counts[kind] += 1
                reports[report] = reports.get(report, 0) + 1
                if problem:
                    failures.append(f"{kind}: {problem}")

# The long ones take 5 s: they are in flight when a pod begins to stop, and must end.
threads = [threading.Thread(target=send, args=("short", 1)) for _ in range(8)]
threads += [threading.Thread(target=send, args=("long", 2000)) for _ in range(4)]
for thread in threads:
    thread.start()
print("sending", flush=True)
for thread in threads:
    thread.join()
print(json.dumps({"counts": counts, "failures": failures[:20], "failed": len(failures), "reports": reports}))
"""


def served(name: str, image: str, mode: str, target_port: int | str) -> dict[str, Any]:
    """A ConfigMap, a Deployment of two replicas and its Service, as one list.

    Args:
        name: of all three.
        image: the control plane's image.
        mode: how traffic reaches the sidecar.
        target_port: the Service's, a name or a number.
    """
    labels = {"app": name}
    annotations = {"vllm-priority.io/mode": mode, "vllm-priority.io/role": "engine"}
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "vllm",
        "image": image,
        "command": ["/opt/vllm/vllm", "serve", "tiny", "--port", "8000"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        "volumeMounts": [{"name": "vllm", "mountPath": "/opt/vllm"}],
        "securityContext": security,
    }
    template = {
        "metadata": {"labels": {**labels, "vllm-priority.io/inject": "true"}, "annotations": annotations},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [{"name": "vllm", "configMap": {"name": name, "defaultMode": 0o555}}],
        },
    }
    deployment = {
        "replicas": 2,
        "selector": {"matchLabels": labels},
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": template,
    }
    items = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"vllm": SERVER}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": deployment},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": target_port}]},
        },
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def client(name: str, image: str, service: str, seconds: int) -> dict[str, Any]:
    """A pod that sends requests to a Service for so many seconds, and then prints what became of them as JSON."""
    environment = {"TARGET": f"http://{service}", "SECONDS_TO_SEND": str(seconds)}
    container = {
        "name": "client",
        "image": image,
        "command": ["python", "-c", CLIENT],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
    }
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
