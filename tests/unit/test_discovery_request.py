"""Discovery requests: the body that a client sends, and its typed form."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.errors import BadInput
from control_plane.server.discovery_request import TYPE_URLS, RequestDecoder, decode


def request(version: str = "", **metadata: object) -> bytes:
    body: dict[str, object] = {"version_info": version} if version else {}
    body["node"] = {"id": "pod-1", "metadata": {"role": "render", **metadata}}
    return json.dumps(body, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("given_listen", "text"),
    [(7001, "0.0.0.0:7001"), ("7001", "0.0.0.0:7001"), ("[::1]:7001", "[::1]:7001"), (None, "0.0.0.0:18000")],
)
def test_listen_is_an_address_or_a_port(given_listen: object, text: str) -> None:
    key = decode("listeners", request(listen=given_listen)).client.key
    assert key is not None
    assert str(key.listen) == text


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"", "malformed JSON: EOF while parsing a value at line 1 column 0"),
        (b"\xff\xfe", "malformed JSON: "),
        (b'{"node":{},"other":NaN}', "malformed JSON: "),
        (b'{"node":{},"other":-Infinity}', "malformed JSON: "),
        (b"[]", "body: [] is not an object"),
        (b"null", "body: None is not an object"),
        (b"{}", "node is missing"),
        (b'{"node":{"id":5}}', "node.id: 5 is not a string"),
        (b'{"node":{"id":"\\ud800"}}', "malformed JSON: "),
        (b"[" * 100_000, "malformed JSON: recursion limit exceeded"),
        (request(labels={"team": True}), "node.metadata.labels.team: True is not a string"),
        (request(labels={"team": "a" * 64}), f"node.metadata.labels.team: '{'a' * 56}...: String "),
        (request(labels={"a" * 318: ""}), f"node.metadata.labels.'{'a' * 56}....'[key]': "),
        (request(labels={str(n): "" for n in range(65)}), "node.metadata.labels: {'0': '', "),
        (request(listen=True), "node.metadata.listen: True is not a valid address. Use HOST:PORT or a port"),
        (request(listen=70000), "node.metadata.listen: 70000 is not a valid address. Use HOST:PORT or a port"),
        (request(upstream="here"), "node.metadata.upstream: 'here' is not a valid address. Use HOST:PORT or a port"),
        (b'x"node":{"id":"pod-1","metadata":{"role":"render"}}}', "malformed JSON: "),
    ],
)  # fmt: skip
def test_a_body_that_is_not_a_discovery_request_is_rejected_with_one_line(body: bytes, line: str) -> None:
    decoder = RequestDecoder()
    decoder.decode("listeners", request())
    with pytest.raises(BadInput) as error:
        decoder.decode("listeners", body)
    assert str(error.value).startswith(f"discovery request: {line}")
    assert "\n" not in str(error.value)


@given(st.text("0123456789abcdef", min_size=1, max_size=16), st.booleans())
def test_a_cached_body_is_decoded_like_a_new_one(version: str, version_first: bool) -> None:
    node = {"id": "pod-1", "metadata": {"role": "render"}}
    both = {"version_info": version, "node": node}
    body = json.dumps(
        both if version_first else {"node": node, "version_info": version}, separators=(",", ":")
    ).encode()
    decoder = RequestDecoder()
    decoder.decode("extension_configs", request())
    first, again = decoder.decode("extension_configs", body), decoder.decode("extension_configs", body)
    assert first == again == decode("extension_configs", body)
    assert first.version == version


def test_a_cached_body_of_one_type_is_not_used_for_another_type() -> None:
    decoder = RequestDecoder()
    assert [decoder.decode(name, request()).client.type_name for name in TYPE_URLS] == list(TYPE_URLS)


def test_the_cache_is_bounded() -> None:
    decoder = RequestDecoder(limit=3)
    for number in range(10):
        decoder.decode("extension_configs", request(labels={"n": str(number)}))
    assert len(decoder._cache.values()) == 3


def test_the_error_that_a_sidecar_sends_becomes_one_line() -> None:
    body = b'{"node":{"metadata":{"role":"render"}},"error_detail":{"message":"bad\\n  script"}}'
    assert decode("extension_configs", body).client.error == "bad script"
