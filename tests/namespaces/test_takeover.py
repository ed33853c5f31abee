"""Takeover for real: the injected pod's containers in a network namespace, with the ports and users of the manifest."""

import json
from pathlib import Path

from tests.integration.test_takeover import container, find_port, injected, probe_port

from .pod_namespace import PodNamespace, require_namespaces


def test_traffic_by_the_services_name_is_moved_and_readiness_follows_vllm(envoy: Path) -> None:
    require_namespaces()
    pod = injected("1.35")
    with PodNamespace(pod, envoy) as namespace:
        namespace.run_sidecar()
        assert namespace.readiness() == 503, "vLLM does not listen yet"
        namespace.run_app(8000)
        namespace.until_ready()
        port = find_port(pod, "http")
        assert port is not None
        status, text, _ = namespace.ask(
            "POST",
            "/inference/v1/generate",
            port=port,
            body='{"token_ids":[1]}',
            headers={"content-type": "application/json", "x-vllm-priority": "-7"},
        )
        assert status == 200
        assert json.loads(json.loads(text)["body"]) == {"token_ids": [1], "priority": -7}
        app = container(pod, "vllm")
        probed = json.loads(namespace.ask("GET", "/health", port=probe_port(app, app["readinessProbe"]) or 0)[1])
        assert not probed["peer"].endswith("127.0.0.1"), "the probe went through the sidecar"
