"""The dashboard queries only metrics that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from control_plane.render.filter import OUTCOMES
from control_plane.render.loggers import counts, times
from control_plane.server.app import create_app
from control_plane.server.settings import ServeSettings
from tests.pem import write_pair
from tools.build_dashboard import LOST, REJECTED, dashboard


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dashboard())["panels"]
    return found


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_control_plane_has_every_metric_that_the_dashboard_queries(
    panels: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "policy.yaml").write_text("{}")
    cert, key = write_pair(tmp_path)
    client = TestClient(create_app(ServeSettings(tmp_path / "policy.yaml", tls_cert=cert, tls_key=key)))
    there = set(re.findall(r"(?m)^# TYPE (\S+)", client.get("/metrics").text))
    asked = {name for text in expressions(panels) for name in re.findall(r"vllm_priority_control_plane_\w+", text)}
    assert asked
    assert {name.removesuffix("_bucket") for name in asked} <= there


def test_the_outcomes_that_need_attention_exist() -> None:
    assert {*REJECTED, *LOST} <= set(OUTCOMES)


def test_sidecars_have_every_metric_and_label_that_the_dashboard_queries(panels: list[dict[str, Any]]) -> None:
    there = {stat["stat"]["name"]: {tag["name"] for tag in stat["stat"]["tags"]} | {"le", "namespace"}
             for logger in (counts(), times()) for stat in (*logger["counters"], *logger["histograms"])}  # fmt: skip
    asked = [text for text in expressions(panels) if "envoy_vllm_priority_" in text]
    assert asked
    for text in asked:
        name = re.findall(r"envoy_vllm_priority_(\w+?)(?:_bucket)?\{", text)[0]
        labels = {label for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(", ")}
        labels |= set(re.findall(r"(\w+)(?:=|!=|=~)\"", text))
        assert labels <= there[name], text


def test_panels_fit_and_do_not_overlap(panels: list[dict[str, Any]]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_ids_and_titles_are_unique(panels: list[dict[str, Any]]) -> None:
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
