"""The doctor finds out why a priority has no effect. It examines a running deployment route by route.

It changes nothing in a deployment: it reads, renders small prompts and generates a few tokens, and it announces what
it will send. docs/guides/doctor.md explains each check and why its result is a proof.
"""

from control_plane.doctor.examination import examine
from control_plane.doctor.exposition import exposition
from control_plane.doctor.kubeconfig import find_access
from control_plane.doctor.kubernetes import cluster_table, examine_cluster
from control_plane.doctor.report import STYLES, Report, Row, Verdict, further_help, table
from control_plane.doctor.settings import DoctorSettings

__all__ = [
    "STYLES", "DoctorSettings", "Report", "Row", "Verdict", "cluster_table", "examine", "examine_cluster",
    "exposition", "find_access", "further_help", "table",
]  # fmt: skip
