"""The console in process: who may open it, what its pages escape, and how large they become."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from control_plane.errors import BadInput
from control_plane.server.app import create_app
from control_plane.server.discovery_request import RequestDecoder
from control_plane.server.settings import ServeSettings

PAGES = ("/console/", "/console/policy", "/console/timeline", "/console/injections", "/console/playground")
TOKEN = "a-token-of-this-test"
NASTY = "<script>alert(1)</script>\"'&\u202e"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text("default: 1\n")
    return tmp_path / "policy.yaml"


def browser(settings: ServeSettings, peer: str = "127.0.0.1", host: str = "localhost:8080") -> TestClient:
    return TestClient(create_app(settings), base_url=f"http://{host}", client=(peer, 5))


@pytest.fixture
def local(policy: Path) -> Iterator[TestClient]:
    yield browser(ServeSettings(policy, reload_seconds=3600))


def poll(client: TestClient, node: str, version: str = "", role: str = "render", **metadata: object) -> None:
    body = {"version_info": version, "node": {"id": node, "metadata": {"role": role, **metadata}}}
    client.post("/v3/discovery:extension_configs", json=body)


def with_sidecars(client: TestClient, count: int) -> None:
    """Record polls of so many sidecars, every ninth of which is stale."""
    app, decoder = client.app, RequestDecoder()
    fleet, snapshot = app.state.fleet, app.state.policy.snapshot  # type: ignore[attr-defined]
    for number in range(count):
        labels = {"app": "chat", "pod-template-hash": f"{number % 40:x}"}
        node = {"id": f"ml/chat-7d4b9c-{number:05}", "metadata": {"role": "render", "labels": labels}}
        poller, _ = decoder.decode("extension_configs", json.dumps({"node": node}).encode())
        response = snapshot.respond(poller, "")
        fleet.record(poller, response.version if number % 9 else "", response)


def basic(token: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()}


@pytest.mark.parametrize(
    ("peer", "host", "headers", "status"),
    [
        ("127.0.0.1", "localhost:8080", {}, 200),
        ("::1", "[::1]:8080", {}, 200),
        ("::ffff:127.0.0.1", "127.0.0.1", {}, 200),
        ("10.1.2.3", "localhost:8080", {}, 403),
        ("127.0.0.6", "localhost:8080", {}, 403),
        ("testclient", "localhost:8080", {}, 403),
        ("127.0.0.1", "rebound.example:8080", {}, 403),
        ("127.0.0.1", "localhost.rebound.example", {}, 403),
        ("127.0.0.1", "localhost:8080", {"x-forwarded-for": "127.0.0.1"}, 403),
        ("127.0.0.1", "localhost:8080", {"via": "1.1 proxy"}, 403),
    ],
)
def test_without_tokens_only_this_machine_opens_the_console(
    policy: Path, peer: str, host: str, headers: dict[str, str], status: int
) -> None:
    for path in (*PAGES, "/console", "/console/style.css", "/console/nothing"):
        found = browser(ServeSettings(policy), peer, host).get(path, headers=headers, follow_redirects=True)
        assert found.status_code == (404 if status == 200 and path.endswith("nothing") else status), path


def test_an_encoded_path_is_held_to_the_same_rule(policy: Path) -> None:
    stranger = browser(ServeSettings(policy), "10.1.2.3")
    for path in ("/%63onsole/", "/console%2f", "/console/./policy", "//console/"):
        assert stranger.get(path).status_code in (403, 404), path


def test_with_tokens_each_request_needs_one(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    client = browser(ServeSettings(policy, api_token_file=tmp_path / "tokens"), "10.1.2.3", "console.example")
    for path in (*PAGES, "/console/style.css"):
        denied = client.get(path)
        assert denied.status_code == 401
        assert denied.headers["www-authenticate"] == 'Basic realm="vllm-priority console", charset="UTF-8"'
        assert client.get(path, headers=basic(TOKEN + "x")).status_code == 401
        assert client.get(path, headers={"authorization": "Basic ="}).status_code == 401
        assert client.get(path, headers=basic(TOKEN)).status_code == 200
        assert client.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert TOKEN not in client.get(path, headers=basic(TOKEN)).text
    here = browser(ServeSettings(policy, api_token_file=tmp_path / "tokens"))
    assert here.get("/console/").status_code == 401


def test_a_named_proxy_opens_the_console_and_no_one_else_does(policy: Path) -> None:
    settings = ServeSettings(policy, console_proxies=("10.1.2.3", "127.0.0.1"))
    passed_on = {"x-forwarded-for": "192.0.2.1"}
    assert browser(settings, "10.1.2.3", "console.example").get("/console/", headers=passed_on).status_code == 200
    assert browser(settings, "10.1.2.4", "console.example").get("/console/", headers=passed_on).status_code == 403
    assert browser(settings, "127.0.0.1").get("/console/", headers=passed_on).status_code == 200
    assert browser(settings, "127.0.0.1", "rebound.example").get("/console/", headers=passed_on).status_code == 403


def test_a_proxy_that_is_not_an_address_is_an_error(policy: Path) -> None:
    with pytest.raises(BadInput, match=r"^console_proxy: 'proxy.example' is not an IP address\. Use one, "):
        ServeSettings(policy, console_proxies=("proxy.example",))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ({"origin": "http://localhost:8080"}, 200),
        ({"origin": "http://localhost:9090"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_other_web_sites_can_link_to_the_console_and_do_nothing_else(
    local: TestClient, headers: dict[str, str], status: int
) -> None:
    assert local.get("/console/", headers=headers).status_code == status


def test_every_response_keeps_other_sites_and_scripts_out(local: TestClient) -> None:
    for path in (*PAGES, "/console", "/console/style.css"):
        found = local.get(path, follow_redirects=False)
        assert found.headers["content-security-policy"].startswith("default-src 'none';"), path
        assert "unsafe" not in found.headers["content-security-policy"]
        assert found.headers["x-frame-options"] == "DENY"
        assert found.headers["x-content-type-options"] == "nosniff"


def test_nothing_that_a_sidecar_sends_becomes_markup(local: TestClient) -> None:
    poll(local, NASTY, NASTY, NASTY, policy=NASTY, labels={"a": "b"})
    poll(local, "ml/pod", "old", policy=NASTY)
    found = local.get("/console/", params={"q": NASTY})
    assert "<script" not in found.text
    assert "\u202e" not in local.get("/console/").text
    assert "&lt;script&gt;alert(1)" in found.text
    assert "\\u202e" in local.get("/console/").text


def test_a_sidecar_whose_policy_does_not_exist_is_told_apart(local: TestClient) -> None:
    poll(local, "ml/pod", policy="made-up")
    assert "No policy has the name &#39;made-up&#39;." in local.get("/console/").text


def test_ten_thousand_sidecars_fill_pages_of_less_than_100_kb(
    local: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    with_sidecars(local, 10_000)
    first = local.get("/console/")
    started = time.perf_counter()
    last = local.get("/console/", params={"page": 200})
    with capsys.disabled():
        seconds = time.perf_counter() - started
        print(f"\nconsole, 10,000 sidecars: {len(last.content)} bytes in {seconds * 1000:.0f} ms")
    for found in (first, last):
        assert found.status_code == 200
        assert len(found.content) < 100_000
        assert "10000 of 10000 sidecars match." in found.text
    assert first.text.count('<th scope="row">') == last.text.count('<th scope="row">') == 50
    assert "Page 200 of 200" in last.text
    assert "SYNCED" not in first.text.partition("<tbody>")[2], "those with a problem come first"


def test_the_longest_texts_of_sidecars_keep_a_page_below_100_kb(local: TestClient) -> None:
    for number in range(60):
        poll(local, f"{number}" + '"' * 1000, '"' * 1000, '"' * 1000, policy='"' * 1000)
        poll(local, f"{number}" + '"' * 1000, '"' * 1000, "render", policy='"' * 1000)
    assert len(local.get("/console/").content) < 100_000


@pytest.mark.parametrize(
    ("query", "matching"),
    [
        ("", 90),
        ("status=STALE", 10),
        ("status=SYNCED", 80),
        ("status=SYNCED&role=engine", 0),
        ("q=chat-7d4b9c-00042", 1),
        ("q=POD-TEMPLATE-HASH%3d1a", 2),
        ("q=nothing", 0),
        ("status=made-up&page=-1", 90),
        ("page=99999999999999999999", 90),
        ("page=" + "9" * 5000, 90),
    ],
)
def test_the_fleet_is_filtered_and_searched(local: TestClient, query: str, matching: int) -> None:
    with_sidecars(local, 90)
    assert f">{matching} of 90 sidecars match." in local.get(f"/console/?{query}").text


def test_the_links_to_other_pages_keep_the_filter(local: TestClient) -> None:
    with_sidecars(local, 200)
    found = local.get("/console/", params={"q": "app=chat", "status": "SYNCED"})
    assert 'href="/console/?q=app%3Dchat&amp;status=SYNCED&amp;page=2" rel="next"' in found.text


def test_the_policy_page_has_the_policy_in_force_and_its_history(local: TestClient, policy: Path) -> None:
    reload = local.app.state.policy.reload  # type: ignore[attr-defined]
    policy.write_text("default: 2\npolicies: [{name: batch, selector: {app: batch}, policy: {default: 9}}]\n")
    assert reload()
    policy.write_text("default: <b>\n")
    assert reload() is False
    found = local.get("/console/policy?policy=batch").text
    assert "default: 9\n" in found
    assert "<del>-default: 1</del>" in found
    assert "<ins>+default: 2</ins>" in found
    assert "REJECTED" in found
    assert "the last valid policy stays in force" in found
    assert "<b>" not in found
    assert "default: 2\n" in local.get("/console/policy?policy=unknown").text


def test_a_large_policy_keeps_its_page_below_100_kb(local: TestClient, policy: Path) -> None:
    reload = local.app.state.policy.reload  # type: ignore[attr-defined]
    for change in range(30):
        classes = {f"class-{number}-{change}": number for number in range(2000)}
        named = [{"name": f"p{number}", "selector": {"a": "&" * 60}, "policy": {}} for number in range(120)]
        policy.write_text(json.dumps({"classes": classes, "policies": named if change == 29 else []}))
        assert reload()
    found: httpx.Response = local.get("/console/policy")
    assert found.status_code == 200
    assert len(found.content) < 100_000
    assert "The policy is cut here." in found.text
    assert "Page 1 of 7" in found.text
