"""The chart's manifests, by variant."""

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.helm import template

# A stand-in for a certificate of one's own: the chart takes it as it is.
OWN_CA = "-----BEGIN CERTIFICATE-----\nTUFERSBVUA==\n-----END CERTIFICATE-----\n"


@dataclass(frozen=True)
class Variant:
    """One way to install the chart: values on top of its own, and what the cluster is like."""

    values: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


_MONITORS = (
    "--api-versions=monitoring.coreos.com/v1/ServiceMonitor",
    "--api-versions=monitoring.coreos.com/v1/PodMonitor",
    "--api-versions=monitoring.coreos.com/v1/PrometheusRule",
)

# --api-versions only adds to what this helm assumes of a cluster: policy/v1 is there in every variant.
VARIANTS: Mapping[str, Variant] = {
    "default": Variant(flags=("--kube-version=1.35.0",)),
    "oldest": Variant(flags=("--kube-version=1.20.2",)),
    "cert-manager": Variant({"certificates": {"source": "cert-manager"}}, ("--api-versions=cert-manager.io/v1",)),
    "cert-manager-issuer": Variant(
        {"certificates": {"source": "cert-manager", "issuer": {"name": "company-ca", "kind": "ClusterIssuer"}}},
        ("--api-versions=cert-manager.io/v1",),
    ),
    "own-secret": Variant({"certificates": {"source": "secret", "secretName": "webhook-tls", "caBundle": OWN_CA}}),
    "policies": Variant(
        {
            "policy": {
                "classes": {"interactive": -10, "batch": 10},
                "default": "batch",
                "range": {"min": -100, "max": 1000000},
                "report_header": None,
            },
            "policies": [
                {
                    "name": "guests",
                    "selector": {"team": "guests"},
                    "policy": {"range": {"min": 0}, "classes": {}, "default": 5},
                }
            ],
        }
    ),
    "no-tokens": Variant({"sidecar": {"tokens": False}}),
    "own-policy": Variant({"policyConfigMap": "priorities"}),
    "no-network-policy": Variant({"networkPolicy": {"enabled": False}}),
    "read-services": Variant({"readServices": True}),
    "read-services-namespaces": Variant({"readServices": True, "readServicesNamespaces": ["ml", "web"]}),
    "monitors": Variant(
        {
            "monitoring": {
                "serviceMonitor": True,
                "podMonitor": True,
                "alerts": True,
                "dashboard": True,
                "labels": {"team": "ml"},
            },
            "api": {"tokenSecret": "api-token"},
        },
        _MONITORS,
    ),
    "monitors-without-their-kinds": Variant(
        {"monitoring": {"serviceMonitor": True, "podMonitor": True, "alerts": True}}
    ),
    "no-webhook": Variant({"webhook": {"enabled": False}}),
    "outside": Variant({"webhook": {"url": "https://192.0.2.7:8443/inject", "failurePolicy": "Fail"}}),
    "everything-set": Variant(
        {
            "api": {"tokenSecret": "api-token", "consoleProxies": ["10.1.2.3", "2001:db8::1"]},
            "image": {"repository": "images.example/ml/vllm-priority", "tag": "1.2.3", "pullPolicy": "Always"},
            "imagePullSecrets": [{"name": "images"}],
            "replicas": 3,
            "webhook": {
                "failurePolicy": "Fail",
                "timeoutSeconds": 10,
                "excludedNamespaces": ["kube-public", "kube-system"],
                "namespaceLabels": {"team": "ml"},
            },
            "readServices": True,
            "sidecar": {
                "image": "images.example/envoy:v1.40.0",
                "redirectImage": "images.example/nft:1",
                "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}},
                "concurrency": 4,
                "native": True,
                "drainSeconds": 15,
                "logRequests": "problems",
                "otlpEndpoint": "http://collector.observability.svc:4317",
                "tracePercent": 2.5,
                "listenHost": "::",
                "onInjectionFailure": "ignore",
                "forbiddenAnnotations": ["image", "mode"],
                "numericServices": "redirect",
            },
            "serviceAccount": {"name": "priorities", "annotations": {"example.com/owner": "ml"}},
            "runAsUser": None,
            "priorityClassName": "system-cluster-critical",
            "podLabels": {"team": "ml"},
            "podAnnotations": {"example.com/note": "yes"},
            "nodeSelector": {"kubernetes.io/arch": "amd64"},
            "tolerations": [{"key": "control-plane", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "fullnameOverride": "priorities",
        }
    ),
}


def golden_files() -> dict[str, Callable[[], str]]:
    """Path from the repository's root -> the function that gives its text."""
    files: dict[str, Callable[[], str]] = {}
    for name in VARIANTS:
        files[f"tests/golden/chart/{name}.yaml"] = lambda name=name: manifests(name)  # type: ignore[misc]
    return files


@cache
def rendered(name: str) -> str:
    """A variant's manifests, as helm gave them."""
    variant = VARIANTS[name]
    return template(variant.values, variant.flags)


def manifests(name: str) -> str:
    """A variant's manifests, with what is new at every run replaced by a word."""
    return without_chance(rendered(name))


def without_chance(text: str) -> str:
    """The manifests with made certificates, their time and their checksum replaced."""
    own = b64encode(OWN_CA.encode()).decode()
    text = re.sub(rf"(?m)^(\s+(?:tls\.crt|tls\.key|ca\.crt|ca\.key|caBundle): )(?!{own}$)\S+$", r"\1TUFERQ==", text)
    text = re.sub(r'(vllm-priority\.io/(?:renew-after|ca-ends): )"\d+"', r'\1"0"', text)
    text = re.sub(r"(checksum/certificate: )[0-9a-f]{64}", r"\g<1>MADE", text)
    return re.sub(r'(?m)^(\s+value: )"-----BEGIN CERT.*"$', r'\1"MADE"', text)
