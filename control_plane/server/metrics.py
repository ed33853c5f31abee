"""The control plane's metrics, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from control_plane.policy.restart import RESTART_KEYS
from control_plane.server.certificates import Certificate
from control_plane.server.discovery_request import TYPE_URLS
from control_plane.server.fleet import Fleet, restart_for
from control_plane.server.injections import Injections
from control_plane.server.policy_file import PolicyFile
from control_plane.vllm import ROLES

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "vllm_priority_control_plane"


class Metrics:
    """The metrics of one app. Each app has its own registry, so two apps in one process count separately."""

    def __init__(
        self, policy: PolicyFile, fleet: Fleet, injections: Injections, certificate: Certificate | None
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            f"{_PREFIX}_requests",
            "Discovery requests and admission reviews, by type and result.",
            ["type", "result"],
            registry=self.registry,
        )
        self.reloads = Counter(
            f"{_PREFIX}_policy_reloads",
            "Changes of the policy file, by result: loaded or rejected.",
            ["result"],
            registry=self.registry,
        )
        for result in ("loaded", "rejected"):
            self.reloads.labels(result)
        Gauge(
            f"{_PREFIX}_policy_broken",
            "1 while the policy file is not valid and the last valid policy stays in force, otherwise 0.",
            registry=self.registry,
        ).set_function(lambda: float(policy.problem is not None))
        Gauge(
            f"{_PREFIX}_policy_loaded_timestamp_seconds",
            "Unix time at which the policy in force was loaded.",
            registry=self.registry,
        ).set_function(lambda: policy.loaded)
        if certificate:
            Gauge(
                f"{_PREFIX}_certificate_expiry_timestamp_seconds",
                "Unix time at which the served certificate expires.",
                registry=self.registry,
            ).set_function(lambda: certificate.expires.timestamp())
        self.inject_seconds = Histogram(
            f"{_PREFIX}_inject_seconds",
            "Time to respond to an admission review, in seconds.",
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
        )
        # The label lookup is done once for each pair: it costs more than everything else that a poll counts.
        self.count = {
            (type_name, result): self.requests.labels(type_name, result).inc
            for type_name in TYPE_URLS
            for result in ("found", "not_modified", "not_found", "busy", "bad_request", "unauthorized", "not_reviewed")
        }
        ProcessCollector(registry=self.registry)
        self.registry.register(_FleetCollector(policy, fleet))
        self.registry.register(_InjectionCollector(injections))

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format, whose media type is CONTENT_TYPE."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    def __init__(self, policy: PolicyFile, fleet: Fleet) -> None:
        self._policy = policy
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        # Clients choose the version and the role that they send, so only known ones become a label value.
        # Otherwise a client could create any number of time series.
        known = self._policy.earlier_versions.union(self._policy.snapshot.versions())
        counts: dict[tuple[str, ...], int] = {}
        restarts = dict.fromkeys(RESTART_KEYS, 0)
        for sidecar, expected, status in self._fleet.statuses(self._policy.snapshot):
            version = sidecar.version if sidecar.version in known else "other" if sidecar.version else "none"
            role = sidecar.client.role if sidecar.client.role in ROLES else "other"
            key = sidecar.client.type_name, role, version, status
            counts[key] = counts.get(key, 0) + 1
            for name in restart_for(sidecar, expected):
                restarts[name] += 1
        family = GaugeMetricFamily(
            f"{_PREFIX}_sidecars",
            "Sidecars that poll this replica, by type, role, version and status (SYNCED, STALE, ERROR or UNKNOWN).",
            labels=["type", "role", "version", "status"],
        )
        for labels, count in sorted(counts.items()):
            family.add_metric(labels, count)
        yield family
        family = GaugeMetricFamily(
            f"{_PREFIX}_sidecars_to_restart",
            "Sidecars that poll this replica and need a restart before a key of their policy has an effect, by key.",
            labels=["key"],
        )
        for name, count in restarts.items():
            family.add_metric([name], count)
        yield family


class _InjectionCollector(Collector):
    def __init__(self, injections: Injections) -> None:
        self._injections = injections

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            f"{_PREFIX}_injections",
            "Pods that the webhook reviewed, by result (injected, skipped or rejected) and reason; and warnings about "
            "injected pods, by code (result warned).",
            # Prometheus sets the label `namespace` to that of the control plane.
            labels=("pod_namespace", "result", "reason"),
        )
        for labels, count in sorted(self._injections.counts.items()):
            family.add_metric(labels, count)
        yield family
