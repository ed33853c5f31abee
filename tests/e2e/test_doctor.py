"""The doctor examines real servers: it finds the fault without a sidecar, and none through a sidecar."""

import asyncio

from control_plane.doctor import DoctorSettings, Report, examine
from control_plane.vllm import RENDER_ROUTES

ON_GENERATE = {"/inference/v1/generate", "order, by the header"}


def test_the_doctor_finds_every_loss_straight_at_vllm(render_url: str, engine_url: str) -> None:
    report = _examined(render_url, engine_url)
    expected = {("render", check) for check in RENDER_ROUTES} | {("engine", check) for check in ON_GENERATE}
    assert report.exit_status == 1
    assert _lost(report) == expected, _all(report)


def test_the_doctor_finds_no_loss_through_the_sidecars(render_sidecar_url: str, engine_sidecar_url: str) -> None:
    report = _examined(render_sidecar_url, engine_sidecar_url)
    assert report.exit_status == 0, _all(report)
    assert {row.verdict for row in report.rows} == {"ok"}, _all(report)


def test_an_engine_alone_is_examined_on_every_route(engine_url: str) -> None:
    report = asyncio.run(examine(DoctorSettings(engine=engine_url, queue_timeout=120, timeout=60)))
    assert report.exit_status == 1
    assert _lost(report) == {("engine", check) for check in {*RENDER_ROUTES, *ON_GENERATE}}, _all(report)


def _examined(render: str, engine: str) -> Report:
    return asyncio.run(examine(DoctorSettings(render=render, engine=engine, queue_timeout=120, timeout=60)))


def _lost(report: Report) -> set[tuple[str, str]]:
    return {(row.server, row.check) for row in report.rows if row.verdict == "lost"}


def _all(report: Report) -> str:
    return "\n".join(f"{row.server} | {row.check} | {row.verdict} | {row.seen}" for row in report.rows)
