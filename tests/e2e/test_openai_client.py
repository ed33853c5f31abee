"""The OpenAI client, which vLLM brings along, in front of real vLLM: the examples of docs/guides/works-with.md run."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.policy.load import parse_policies
from tests.e2e.conftest import sidecar
from tests.e2e.vllm_server import MODEL_NAME

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "works-with.md"

HEAD = """
import httpx, openai
client = openai.OpenAI(base_url=URL, api_key="none")
"""


def examples() -> list[str]:
    """The Python examples of the client's section, each as an expression."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## OpenAI Python client\n")[2].partition("\n## ")[0]
    return [block.strip() for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]


def applied(vllm: Path, url: str, example: str) -> str:
    """The report header of the response to an example."""
    example = example.replace('"m"', f'"{MODEL_NAME}"').replace(".create(", ".with_raw_response.create(")
    script = f"URL = {url + '/v1'!r}\n{HEAD}\nresponse = {example}\nprint(response.headers['x-vllm-priority-applied'])"
    command = [str(vllm / "bin" / "python"), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={"NO_PROXY": "*"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def front(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The engine, through a sidecar with the policy of the page."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## OpenAI Python client\n")[2]
    policy = parse_policies(section.partition("```yaml\n")[2].partition("```")[0]).default
    yield from sidecar("engine", engine_url, tmp_path_factory.mktemp("openai-sidecar"), policy)


def test_the_examples_set_the_priority(vllm: Path, front: str) -> None:
    ordinary, scale_out = examples()
    assert applied(vllm, front, ordinary) == "-10; source=header; outcome=header_set"
    assert applied(vllm, front, ordinary.replace('"-10"', '"interactive"')) == "-10; source=class; outcome=header_set"
    assert applied(vllm, front, scale_out) == "-10; source=header; outcome=inserted"
