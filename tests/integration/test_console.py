"""The console in a real browser: Debian's Chromium, driven by Playwright, examined by axe.

CONSOLE_PICTURES=FOLDER keeps a picture of each page.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from .test_control_plane import ControlPlane
from .upstream import WAIT
from .waiting import until

ECDS = "/v3/discovery:extension_configs"
TOKEN = "a-token-of-this-test"
POLICY = """\
default: batch
classes: {interactive: -10, batch: 10}
range: {min: -100, max: 100, outside: clamp}
policies:
  - name: research
    selector: {team: research}
    policy: {default: 50}
"""
RUN = "Run"
PAGES = ("", "policy", "timeline", "injections", "playground")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser. Without it the test is skipped, with the reason; with CI=true it fails."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        reason = "chromium is missing. Install it, on Debian: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root, nor in most containers.
        browser = playwright.chromium.launch(
            executable_path=found,
            chromium_sandbox=False,
            args=["--host-resolver-rules=MAP console.example 127.0.0.1"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane whose policy has changed, with pods that were injected, skipped and rejected."""
    policy = tmp_path_factory.mktemp("console") / "policy.yaml"
    policy.write_text("default: 5\n")
    fast = "from control_plane.server.console import timeline; timeline.SAMPLE_SECONDS = 0.5"
    with ControlPlane(policy, setup=fast, console_proxies=("10.1.2.3",)) as running:
        policy.write_text(POLICY)
        until(lambda: "research" in running.get("/api/policy").text, "the new policy")
        policy.write_text("default: [\n")
        until(lambda: running.get("/readyz").json()["problems"], "the problem of the policy file")
        for name, command in (("chat-1", ["vllm", "serve", "m"]), ("job-1", ["sleep"]), ("chat-2", ["vllm", "serve"])):
            annotations = {"vllm-priority.io/mode": "made-up"} if name == "chat-2" else {}
            with client_of(running) as client:
                client.post("/inject", json=review(name, command, annotations))
        yield running


@pytest.fixture
def fleet(plane: ControlPlane) -> ControlPlane:
    """The control plane with sidecars of each status. It forgets them a minute after their last poll."""
    with client_of(plane) as client:
        for number in range(60):
            poll(client, f"ml/chat-7d4b9c6f-{number:05}", labels={"app": "chat"})
        poll(client, "ml/chat-7d4b9c6f-late", accepts=False)
        for _ in range(2):
            poll(client, "ml/chat-7d4b9c6f-broken", version="of-yesterday")
        poll(client, "research/eval-0", policy="evaluation")
    return plane


def client_of(plane: ControlPlane) -> httpx.Client:
    return httpx.Client(base_url=f"http://{plane.address}", timeout=WAIT, trust_env=False)


def poll(client: httpx.Client, node: str, *, version: str = "", accepts: bool = True, **metadata: object) -> None:
    body = {"version_info": version, "node": {"id": node, "metadata": {"role": "engine", **metadata}}}
    found = client.post(ECDS, json=body)
    if accepts and found.status_code == 200 and not version:
        client.post(ECDS, json={**body, "version_info": found.json()["version_info"]})


def review(name: str, command: list[str], annotations: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"vllm-priority.io/inject": "true"}, "annotations": annotations}
    container = {"name": "vllm", "image": "vllm/vllm-openai:v0.33.0", "command": command}
    request = {
        "uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE", "namespace": "ml",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "object": {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}},
    }  # fmt: skip
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def opened(browser: Browser, **options: Any) -> tuple[Page, list[str]]:
    """Return a new page, and the list that gets everything that the browser complains about."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(WAIT * 1000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    return page, complaints


def run_a_request(page: Page) -> None:
    page.get_by_role("textbox", name="Headers").fill("X-Vllm-Priority: interactive\nX-Request-Id: 7")
    page.get_by_role("textbox", name="Body").fill('{"token_ids":[1,2,3],"priority":5}')
    page.get_by_role("button", name=RUN).click()
    expect(page.get_by_role("heading", name="Result")).to_be_visible()


def keep_picture(page: Page, name: str) -> None:
    folder = os.environ.get("CONSOLE_PICTURES")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing_on_any_page_and_no_page_is_wider_than_the_screen(
    chromium: Browser, fleet: ControlPlane, theme: Any, width: int
) -> None:
    page, complaints = opened(chromium, color_scheme=theme, viewport={"width": width, "height": 800})
    origin = f"http://{fleet.address}/console/"
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    for name in (*PAGES, "?q=nothing-has-this-name", "policy?policy=research"):
        page.goto(origin + name)
        if name == "playground":
            keep_picture(page, f"playground-empty-{theme}-{width}")
            run_a_request(page)
        found = Axe().run(page).response["violations"]
        assert [(rule["id"], [node["target"] for node in rule["nodes"]]) for rule in found] == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        if "?" not in name:
            keep_picture(page, f"{name or 'fleet'}-{theme}-{width}")
    assert complaints == []
    assert {url for url in urls if not url.startswith(origin)} == set(), "everything comes from the control plane"


def test_the_playground_marks_what_the_sidecar_changes(chromium: Browser, fleet: ControlPlane) -> None:
    page, complaints = opened(chromium)
    page.goto(f"http://{fleet.address}/console/playground")
    run_a_request(page)
    body = page.get_by_role("region", name="The body has")
    assert body.locator("del").all_inner_texts() == ["5"]
    assert body.locator("ins").all_inner_texts() == ["-10"]
    assert "interactive: -10" in page.get_by_role("region", name="What the policy says about it").inner_text()
    nasty = '</textarea><img src=x onerror="document.title=1">'
    page.get_by_role("textbox", name="Body").fill(nasty)
    page.get_by_role("button", name=RUN).click()
    expect(page.get_by_text("not_an_object").first).to_be_visible()
    assert page.get_by_role("textbox", name="Body").input_value() == nasty
    assert page.locator("img").count() == 0
    assert complaints == []


def test_every_page_works_without_scripts(chromium: Browser, fleet: ControlPlane) -> None:
    page, _ = opened(chromium, java_script_enabled=False)
    page.goto(f"http://{fleet.address}/console/")
    page.get_by_label("Search").fill("app=chat")
    page.get_by_label("Status", exact=True).select_option("SYNCED")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("60 of 63 sidecars match.")).to_be_visible()
    page.get_by_role("link", name="Next").click()
    expect(page.get_by_text("Page 2 of 2")).to_be_visible()
    page.get_by_role("link", name="Timeline").click()
    expect(page.get_by_role("img", name="Sidecars by status.")).to_be_visible()
    expect(page.get_by_role("checkbox")).to_be_hidden()
    page.get_by_role("link", name="Playground").click()
    run_a_request(page)


def test_the_keyboard_reaches_the_content_and_the_button(chromium: Browser, fleet: ControlPlane) -> None:
    page, _ = opened(chromium)
    page.goto(f"http://{fleet.address}/console/playground")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("textbox", name="Body").focus()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name=RUN)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Result")).to_be_visible()


def test_the_timeline_updates_itself_until_it_is_told_not_to(chromium: Browser, fleet: ControlPlane) -> None:
    page, _ = opened(chromium)
    page.clock.install()
    page.goto(f"http://{fleet.address}/console/timeline")
    for wanted in (True, False):
        page.get_by_label("Update this page").set_checked(wanted)
        page.locator("#live h2").first.evaluate("heading => heading.textContent = 'old'")
        page.clock.fast_forward(16_000)
        if wanted:
            expect(page.locator("#live h2").first).to_have_text("Sidecars by status")
    expect(page.locator("#live h2").first).to_have_text("old")


def test_the_timeline_says_that_it_cannot_be_updated(chromium: Browser, fleet: ControlPlane) -> None:
    page, _ = opened(chromium)
    page.clock.install()
    page.goto(f"http://{fleet.address}/console/timeline")
    page.context.set_offline(True)
    page.clock.fast_forward(16_000)
    expect(page.get_by_text("The page cannot be updated")).to_be_visible()


def test_a_browser_logs_in_with_a_token(chromium: Browser, tmp_path: Path) -> None:
    """Under a name, over plain HTTP: a browser then sends no Sec-Fetch-Site, and the origin decides."""
    (tmp_path / "policy.yaml").write_text("{}")
    (tmp_path / "tokens").write_text(TOKEN)
    with ControlPlane(tmp_path / "policy.yaml", api_token_file=tmp_path / "tokens") as plane:
        page, _ = opened(chromium, http_credentials={"username": "anybody", "password": TOKEN})
        page.goto(f"http://console.example:{plane.address.port}/console/playground")
        run_a_request(page)
        stranger, _ = opened(chromium, http_credentials={"username": "anybody", "password": "not-the-token"})
        found = stranger.goto(f"http://{plane.address}/console/")
        assert found is not None
        assert found.status == 401


def test_a_page_of_another_site_can_neither_read_nor_run_anything(chromium: Browser, fleet: ControlPlane) -> None:
    """`localhost` and 127.0.0.1 are different sites for a browser."""
    page, _ = opened(chromium)
    page.goto(f"http://localhost:{fleet.address.port}/healthz")
    target = f"http://{fleet.address}/console/"
    seen = page.evaluate("url => fetch(url, {mode: 'no-cors'}).then(() => 'sent', error => 'blocked')", target)
    assert seen == "blocked", "cross-origin-resource-policy"
    with page.expect_response(f"{target}playground") as response:
        page.evaluate(
            """url => { const form = document.createElement("form"); form.method = "post"; form.action = url;
            document.body.append(form); form.submit(); }""",
            f"{target}playground",
        )
    assert response.value.status == 403


def test_the_address_of_a_client_is_that_of_its_connection(plane: ControlPlane) -> None:
    """Otherwise everybody could be the named proxy."""
    headers = {"x-forwarded-for": "10.1.2.3", "x-forwarded-proto": "https"}
    found = httpx.get(f"http://{plane.address}/console/", headers=headers, timeout=WAIT, trust_env=False)
    assert found.status_code == 403
