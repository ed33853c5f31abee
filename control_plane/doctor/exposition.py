"""The result of an examination as Prometheus metrics, for a job that runs it periodically."""

import time
from collections import Counter

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest

from control_plane.doctor.kubernetes import ClusterReport
from control_plane.doctor.report import Report


def exposition(report: Report | ClusterReport) -> str:
    """Return the report in Prometheus's text format.

    The names of objects in a cluster are not labels, so that the number of series does not grow with the cluster.
    """
    registry = CollectorRegistry()
    prefix = "vllm_priority_doctor_"
    if isinstance(report, Report):
        checks = Gauge(
            f"{prefix}check", "1 for the verdict of each check.", ["server", "check", "verdict"], registry=registry
        )
        for row in report.rows:
            checks.labels(row.server, row.check, row.verdict).set(1)
    else:
        objects = Gauge(
            f"{prefix}objects", "Objects in the cluster by verdict.", ["kind", "object_namespace", "verdict"],
            registry=registry,
        )  # fmt: skip
        found = Counter((finding.kind, finding.namespace, finding.verdict) for finding in report.findings)
        for labels, count in found.items():
            objects.labels(*labels).set(count)
    Gauge(f"{prefix}priority_lost", "1 if a priority is lost or a check fails, else 0.", registry=registry).set(
        report.exit_status
    )
    Gauge(f"{prefix}last_run_timestamp_seconds", "When the examination ended.", registry=registry).set(time.time())
    return generate_latest(registry).decode()
