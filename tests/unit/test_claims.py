"""What a policy can say about tokens, and what of it is rejected."""

import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli import main
from control_plane.errors import BadInput
from control_plane.policy.claims import Claims
from control_plane.policy.load import load_policies, parse_policies
from control_plane.policy.model import Policy
from control_plane.policy.restart import StartedWith
from control_plane.render.placement import Placement
from control_plane.render.targets import render
from control_plane.server.policy_file import PolicyFile
from tests.pem import Authority
from tests.tokens import ISSUER, Issuer

KEYS = Issuer("ES256").jwks
KEY = KEYS["keys"][0]
PRIVATE = {**KEY, "d": "AA"}


def policy(**claims: Any) -> Policy:
    text = json.dumps({"trust": {"claims": {"issuer": ISSUER, "jwks": KEYS, **claims}}})
    return parse_policies(text).default


def claims_of(found: Policy) -> Claims:
    assert found.trust and found.trust.claims
    return found.trust.claims


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"issuer": ""}, "trust.claims.issuer: '' is not valid."),
        ({"issuer": None}, "trust.claims.issuer: None is not valid."),
        ({"jwks": {}}, "trust.claims.jwks: not a set of keys."),
        ({"jwks": {"keys": []}}, "trust.claims.jwks: not a set of keys."),
        ({"jwks": [KEY]}, "trust.claims.jwks: not a set of keys."),
        ({"jwks": {"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}}, "trust.claims.jwks.keys[0]: not a public key."),
        ({"jwks": {"keys": [KEY, {"kty": ["RSA"]}]}}, "trust.claims.jwks.keys[1]: not a public key."),
        ({"jwks": {"keys": [PRIVATE]}}, "trust.claims.jwks.keys[0]: a private key."),
        ({"jwks": {"keys": [{"kty": "RSA", "n": "AQAB"}]}}, "trust.claims.jwks.keys[0]: e is missing."),
        ({"jwks": {"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB"}]}}, "keys[0]: not a valid key of kty RSA"),
        ({"jwks": {"keys": [{**KEY, "x": KEY["y"]}]}}, "keys[0]: not a valid key of kty EC"),
        ({"jwks": {"keys": [{**KEY, "x": "!"}]}}, "keys[0]: not a valid key of kty EC"),
        ({"jwks": {"keys": [{**KEY, "crv": "secp256k1"}]}}, "keys[0].crv: not a supported curve."),
        ({"jwks": {"keys": [{**KEY, "alg": "ES384"}]}}, "keys[0].alg: not an algorithm of this key."),
        ({"jwks": {"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "AA"}]}}, "keys[0]: not a valid key of kty OKP"),
        ({"jwks": {"keys": [{"kty": "OKP", "crv": "Ed448", "x": "AA"}]}}, "keys[0].crv: not a supported curve."),
        ({"jwks": "http://issuer.test/keys"}, "trust.claims.jwks: 'http://issuer.test/keys' is not a valid https://"),
        ({"jwks": "https://"}, "is not a valid https:// URI"),
        ({"jwks": "https://user@issuer.test/"}, "is not a valid https:// URI"),
        ({"jwks": "https://issuer.test:99999/"}, "is not a valid https:// URI"),
        ({"jwks": "https://issuer.test/a b"}, "is not a valid https:// URI"),
        ({"jwks": "keys.json"}, "trust.claims.jwks: 'keys.json' is a file, which only a policy from a file can name."),
        ({"jwks_ca": Authority().pem}, "trust.claims.jwks_ca: has no effect without an https:// URI"),
        ({"jwks": "https://issuer.test/", "jwks_ca": "-----BEGIN X"}, "jwks_ca: not a certificate in PEM format."),
        ({"require": {"exp": "1"}}, "trust.claims.require.exp: this claim is a number"),
        (
            {"require": {"iss": "https://other.test"}},
            "trust.claims.require.iss: 'https://other.test' is not the issuer",
        ),
        ({"require": {"aud": "x"}, "audiences": ["y"]}, "trust.claims.require.aud: 'x' is not one of the audiences"),
        ({"require": {"scope": "a b"}}, "trust.claims.require.scope: 'a b' has a space"),
        ({"require": {"scope": 1}}, "trust.claims.require.scope: 1 is not valid."),
        ({"header": "x-vllm-priority"}, "trust.claims.header: 'x-vllm-priority' is the policy's header."),
        ({"header": "content-length"}, "trust.claims.header: 'content-length' has a meaning in HTTP or Envoy."),
        ({"unknown": 1}, "trust.claims.unknown: this key is unknown."),
    ],
)
def test_what_no_token_can_meet_or_no_sidecar_can_use_is_rejected(claims: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as raised:
        policy(**claims)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_of_keys_lies_next_to_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(json.dumps({"trust": {"claims": {"issuer": ISSUER, "jwks": "keys.json"}}}))
    with pytest.raises(BadInput, match=r"trust.claims.jwks: 'keys.json' cannot be read: No such file"):
        load_policies(path)
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(BadInput, match=r"trust.claims.jwks: 'keys.json' is not a file in JSON"):
        load_policies(path)
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    assert claims_of(load_policies(path).default).jwks == KEYS
    (tmp_path / "ca.pem").write_text("# a comment\n" + Authority().pem)
    claims = {"issuer": ISSUER, "jwks": "https://issuer.test/keys", "jwks_ca": "ca.pem"}
    path.write_text(json.dumps({"policies": [{"name": "a", "selector": {}, "policy": {"trust": {"claims": claims}}}]}))
    ca = claims_of(load_policies(path).by_name["a"]).jwks_ca
    assert ca and ca.startswith("-----BEGIN CERTIFICATE")


def test_a_changed_file_of_keys_is_loaded_and_sidecars_need_a_restart_for_it(tmp_path: Path) -> None:
    path, keys = tmp_path / "policy.yaml", tmp_path / "keys.json"
    path.write_text(json.dumps({"trust": {"claims": {"issuer": ISSUER, "jwks": "keys.json"}}}))
    keys.write_text(json.dumps(KEYS))
    file = PolicyFile(path)
    assert file.reload() is None
    keys.write_text("{")
    assert file.reload() is False
    assert file.problem and "'keys.json' is not a file in JSON" in file.problem
    assert file.reload() is None
    other = Issuer("ES256").jwks
    keys.write_text(json.dumps(other))
    assert file.reload() is True
    assert file.reload() is None
    assert claims_of(file.snapshot.policies.default).jwks == other
    assert file.restart_for == {"default": ("trust.claims",)}


@pytest.mark.parametrize(
    "other",
    [{"issuer": "https://other.test"}, {"audiences": ["x"]}, {"header": "x-token"}, {"jwks": Issuer("ES256").jwks}],
)
def test_a_sidecar_that_verifies_tokens_in_another_way_needs_a_restart(other: dict[str, Any]) -> None:
    started = StartedWith.of(policy())
    assert started.lacks(policy(require={"scope": "priority"})) == ()
    assert started.lacks(policy(**other)) == ("trust.claims",)
    assert StartedWith().lacks(policy()) == ("trust.claims",)
    assert started.lacks(Policy()) == ()


@pytest.mark.parametrize(
    ("target", "claims", "reason"),
    [
        ("envoy-gateway", {}, "trust.claims: a SecurityPolicy of Envoy Gateway rejects requests"),
        ("istio-waypoint", {}, "trust: a waypoint does not see the client's connection"),
        ("istio", {"jwks": "https://issuer.test/keys"}, "trust.claims.jwks: an EnvoyFilter has no cluster"),
    ],
)
def test_a_target_rejects_what_it_cannot_do(target: str, claims: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=f"^{reason}"):
        render(target, policy(**claims), Placement.default("render", target))


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ("{rules: {a: {}}}", "tenants: exactly one of header, claim and identity names the tenant."),
        ("{header: x-a, identity: true, rules: {a: {}}}", "tenants: exactly one of header, claim and identity"),
        ("{header: x-a, claim: team, rules: {a: {}}}", "tenants: exactly one of header, claim and identity"),
        ("{claim: team, rules: {a: {}}}", "tenants.claim: needs trust.claims"),
        ("{identity: true, rules: {'a*': {}, ab: {}}}", "tenants.rules.ab: 'a*' comes first and matches, too"),
    ],
)
def test_tenants_that_no_request_can_have_are_rejected(tenants: str, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        parse_policies(f"tenants: {tenants}")
    assert message in str(raised.value)


def test_a_tenant_that_the_required_claims_exclude_is_rejected() -> None:
    trust: dict[str, Any] = {"claims": {"issuer": ISSUER, "jwks": KEYS, "require": {"team": "a"}}}
    document = {"trust": trust, "tenants": {"claim": "team", "rules": {"a": {}, "b": {}}}}
    with pytest.raises(BadInput, match=r"tenants.rules.b: trust.claims.require accepts only 'a'. Remove one."):
        parse_policies(json.dumps(document))
    trust["peers"] = ["10.0.0.0/8"]
    parse_policies(json.dumps(document))


def test_the_more_exact_identity_may_come_first() -> None:
    parse_policies("tenants: {identity: true, rules: {ab: {}, 'a*': {}}}")


def test_a_waypoint_has_no_identities() -> None:
    policy = parse_policies("tenants: {identity: true, rules: {a: {}}}").default
    with pytest.raises(BadInput, match=r"^tenants.identity: a waypoint does not see the client's certificate"):
        render("istio-waypoint", policy, Placement.default("render", "istio-waypoint"))


def explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, **rules: Any) -> str:
    path = tmp_path / "policy.yaml"
    claims = {"issuer": ISSUER, "jwks": KEYS, **rules.pop("claims", {})}
    path.write_text(json.dumps({"trust": {"claims": claims}, **rules}))
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--path", "/v1/chat/completions/render", "--policy", str(path), *arguments])
    assert not ended.value.code, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "by"),
    [
        ((), "nothing"),
        (("--claim", "scope=read"), "nothing"),
        (("--claim", "scope=read priority"), "trust.claims scope=priority"),
        (("--claim", "scope=read", "--claim", "scope=priority"), "trust.claims scope=priority"),
        (("--claim", "scope=priority", "-H", "Authorization: Bearer sk-key"), "nothing"),
    ],
)
def test_explain_says_which_claims_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], by: str
) -> None:
    arguments = (*arguments, "-H", "X-Vllm-Priority: 5")
    text = explained(tmp_path, capsys, *arguments, claims={"require": {"scope": "priority"}})
    assert f"trusted by: {by}\n" in text
    assert ("outcome: inserted" in text) == (by != "nothing")


def test_explain_names_the_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tenants = {"claim": "team", "rules": {"batch": {"default": 80}}}
    text = explained(tmp_path, capsys, "--claim", "team=batch", tenants=tenants)
    assert "trusted by: trust.claims\ntenant: batch\n" in text
    assert "80; source=default" in text
    found = json.loads(explained(tmp_path, capsys, "--claim", "team=x", "--json", tenants=tenants))
    assert (found["trusted_by"], found["tenant"]) == ("trust.claims", None)


@pytest.mark.parametrize(
    ("claim", "message"), [("scope", "--claim: 'scope' is not a valid claim."), ("=x", "--claim: '=x' is not a valid")]
)
def test_explain_rejects_what_is_not_a_claim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], claim: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        explained(tmp_path, capsys, "--claim", claim)


def test_explain_rejects_a_claim_that_no_policy_reads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--path", "/x", "--claim", "scope=priority"])
    assert "--claim: not used, since the policy has no trust.claims." in capsys.readouterr().err
