"""The policy file: what each key takes, what it refuses, and in which words."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.errors import PolicyError
from control_plane.policy.load import MAX_FILE_BYTES, load_policies, parse_policies
from control_plane.policy.model import Policies, Policy
from control_plane.vllm import ENGINE_ROUTES, INT64_MAX, INT64_MIN, RENDER_ROUTES

INT64 = "an integer"
CLASS = "a name of at most 63 letters, digits and . _ - that starts with a letter, for example batch"
PATH = "a path that starts with / and has no query, % or space, for example /v1/score"
KEYS = (
    "header, engine, on_invalid, on_unmovable, keep_header, report_header, default, range, classes, "
    "body, ordinary, trust, tenants, routes, limits"
)


def refusal(text: str) -> str:
    """The message that a string is refused with: one line, that starts with the file."""
    with pytest.raises(PolicyError) as caught:
        parse_policies(text, "p.yaml")
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith("p.yaml: ")
    return message.removeprefix("p.yaml: ")


def test_an_empty_file_is_the_default_policy() -> None:
    for text in ("", "# nothing\n", "{}", "~", "policies:", "policies: []"):
        assert parse_policies(text) == Policies()


def test_the_design_written_out_is_the_default_policy() -> None:
    text = """
header: x-vllm-priority
engine: vllm
on_invalid: reject
on_unmovable: reject
keep_header: false
report_header: x-vllm-priority-applied
default: null
range: {min: null, max: null, outside: reject}
classes: {}
body: accept
ordinary: pass
trust: null
tenants: null
routes: {render: default, engine: default, extra: [], root_path: null}
limits: {max_body_bytes: 67108864}
"""
    assert parse_policies(text).default == Policy()
    assert set(yaml.safe_load(text)) == set(Policy.model_fields)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("header: X-Team-Priority", "header", "x-team-priority"),
        ("header: " + "x" * 128, "header", "x" * 128),
        ('header: "!#$%&\'*+.^_`|~-"', "header", "!#$%&'*+.^_`|~-"),
        ("engine: sglang", "engine", "sglang"),
        ("on_invalid: ignore", "on_invalid", "ignore"),
        ("on_unmovable: forward", "on_unmovable", "forward"),
        ("keep_header: true", "keep_header", True),
        ("report_header: null", "report_header", None),
        ("report_header: X-Done", "report_header", "x-done"),
        ("default: 0", "default", 0),
        (f"default: {INT64_MIN}", "default", INT64_MIN),
        (f"default: {INT64_MAX}", "default", INT64_MAX),
        ("{default: urgent, classes: {urgent: -10}}", "default_value", -10),
        (f"classes: {{a: {INT64_MIN}, B.c_d-9: {INT64_MAX}}}", "classes", {"a": INT64_MIN, "B.c_d-9": INT64_MAX}),
        ("classes: {a: &v 5, b: *v}", "classes", {"a": 5, "b": 5}),
    ],
)
def test_a_key_takes(text: str, key: str, value: object) -> None:
    assert getattr(parse_policies(text).default, key) == value


@pytest.mark.parametrize(
    ("text", "render", "engine"),
    [
        ("{}", RENDER_ROUTES, ENGINE_ROUTES),
        ("routes: {render: [/a, /b], extra: [/b, /c]}", ("/a", "/b", "/c"), (*ENGINE_ROUTES, "/b", "/c")),
        ("routes: {engine: []}", RENDER_ROUTES, ()),
        ("routes: {render: &r [/a], engine: *r}", ("/a",), ("/a",)),
        ("routes: {extra: [/v1/embeddings]}", (*RENDER_ROUTES, "/v1/embeddings"), (*ENGINE_ROUTES, "/v1/embeddings")),
    ],
)
def test_routes_by_role(text: str, render: tuple[str, ...], engine: tuple[str, ...]) -> None:
    routes = parse_policies(text).default.routes
    assert (routes.for_role("render"), routes.for_role("engine")) == (render, engine)


@pytest.mark.parametrize(
    ("text", "contained", "outside"),
    [
        ("{}", [INT64_MIN, 0, INT64_MAX], []),
        ("range: {min: -5}", [-5, INT64_MAX], [-6]),
        ("range: {max: 5}", [INT64_MIN, 5], [6]),
        ("range: {min: 3, max: 3}", [3], [2, 4]),
    ],
)
def test_bounds_are_included(text: str, contained: list[int], outside: list[int]) -> None:
    bounds = parse_policies(text).default.range
    assert [value for value in contained + outside if bounds.contains(value)] == contained


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # header names
        ("header: ''", "header: '' is not valid. Use a header name, for example x-priority."),
        ("header: 'x y'", "header: 'x y' is not valid. Use a header name, for example x-priority."),
        ("header: ':path'", "header: ':path' is not valid. Use a header name, for example x-priority."),
        ("header: xé", "header: 'xé' is not valid. Use a header name, for example x-priority."),
        ('header: "x-a\\n"', "header: 'x-a\\n' is not valid. Use a header name, for example x-priority."),
        ('header: "x\\ud800"', "header: 'x\\ud800' is not valid. Use a string."),
        ("header: 5", "header: 5 is not valid. Use a string."),
        ("header: null", "header: None is not valid. Use a string."),
        ("header: [x-a]", "header: ['x-a'] is not valid. Use a string."),
        ("report_header: true", "report_header: True is not valid. Use a string."),
        ("report_header: ''", "report_header: '' is not valid. Use a header name, for example x-priority."),
        # choices
        ("engine: tgi", "engine: 'tgi' is not valid. Use 'vllm' or 'sglang'."),
        ("engine: null", "engine: None is not valid. Use 'vllm' or 'sglang'."),
        ("on_invalid: drop", "on_invalid: 'drop' is not valid. Use 'reject' or 'ignore'."),
        ("on_invalid: false", "on_invalid: False is not valid. Use 'reject' or 'ignore'."),
        ("on_unmovable: ignore", "on_unmovable: 'ignore' is not valid. Use 'reject' or 'forward'."),
        ("keep_header: 1", "keep_header: 1 is not valid. Use true or false."),
        ("keep_header: 'true'", "keep_header: 'true' is not valid. Use true or false."),
        ("keep_header: null", "keep_header: None is not valid. Use true or false."),
        # integers
        ("default: '5'", f"default: '5' is not valid. Use {INT64} or {CLASS}."),
        ("default: 5.0", f"default: 5.0 is not valid. Use {INT64} or a string."),
        ("default: .nan", f"default: nan is not valid. Use {INT64} or a string."),
        ("default: true", f"default: True is not valid. Use {INT64} or a string."),
        ("default: []", f"default: [] is not valid. Use {INT64} or a string."),
        (f"default: {2**63}", f"default: {2**63} is not valid. Use at most {INT64_MAX} or a string."),
        (
            f"default: {-(2**63) - 1}",
            f"default: {-(2**63) - 1} is not valid. Use at least {INT64_MIN} or a string.",
        ),
        ("range: {min: low}", f"range.min: 'low' is not valid. Use {INT64}."),
        ("range: {max: 1.5}", f"range.max: 1.5 is not valid. Use {INT64}."),
        ("range: {outside: drop}", "range.outside: 'drop' is not valid. Use 'reject' or 'clamp'."),
        ("limits: {max_body_bytes: 0}", "limits.max_body_bytes: 0 is not valid. Use at least 1."),
        ("limits: {max_body_bytes: 1 MB}", f"limits.max_body_bytes: '1 MB' is not valid. Use {INT64}."),
        (
            f"limits: {{max_body_bytes: {2**52 + 1}}}",
            f"limits.max_body_bytes: {2**52 + 1} is not valid. Use at most {2**52}.",
        ),
        # mappings and lists
        ("range: null", "range: None is not valid. Use a mapping."),
        ("range: [1, 2]", "range: [1, 2] is not valid. Use a mapping."),
        ("classes: null", "classes: None is not valid. Use a mapping."),
        ("classes: [a]", "classes: ['a'] is not valid. Use a mapping."),
        ("classes: {a: high}", f"classes.a: 'high' is not valid. Use {INT64}."),
        ("classes: {9a: 1}", f"classes.9a: '9a' is not valid. Use {CLASS}."),
        ("classes: {a b: 1}", f"classes.'a b': 'a b' is not valid. Use {CLASS}."),
        ('classes: {"a\\nb": 1}', f"classes.'a\\nb': 'a\\nb' is not valid. Use {CLASS}."),
        ("classes: {yes: 1}", "classes[1]: True is not valid. Use a string."),
        ("routes: []", "routes: [] is not valid. Use a mapping."),
        ("routes: {render: /a}", "routes.render: '/a' is not valid. Use 'default' or a list."),
        ("routes: {extra: default}", "routes.extra: 'default' is not valid. Use a list."),
        ("routes: {extra: [a]}", f"routes.extra[0]: 'a' is not valid. Use {PATH}."),
        ("routes: {extra: ['/a?b']}", f"routes.extra[0]: '/a?b' is not valid. Use {PATH}."),
        ("routes: {extra: [/a%20b]}", f"routes.extra[0]: '/a%20b' is not valid. Use {PATH}."),
        ("routes: {engine: [/a, 5]}", "routes.engine[1]: 5 is not valid. Use a string."),
        ("limits: 5", "limits: 5 is not valid. Use a mapping."),
        # several at a time
        (
            "{engine: x, keep_header: 5}",
            "engine: 'x' is not valid. Use 'vllm' or 'sglang'. keep_header: 5 is not valid. Use true or false.",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heder: x", f"heder: this key is unknown. It must be one of: {KEYS}, policies."),
        ("Header: x", f"Header: this key is unknown. It must be one of: {KEYS}, policies."),
        ('"a\\nb": x', f"'a\\nb': this key is unknown. It must be one of: {KEYS}, policies."),
        ("5: x", f"5: this key is unknown. It must be one of: {KEYS}, policies."),
        ("on: x", f"True: this key is unknown. It must be one of: {KEYS}, policies."),
        ("range: {mn: 1}", "range.mn: this key is unknown. It must be one of: min, max, outside."),
        ("range: {5: 1}", "range.5: this key is unknown. It must be one of: min, max, outside."),
        (
            "routes: {extra: [/llm/v1/messages/render]}",
            "routes.extra: /llm/v1/messages/render is vLLM's /v1/messages/render below /llm, and would be edited as"
            " another route. Set routes.root_path to /llm.",
        ),
        (
            "routes: {root_path: llm}",
            "routes.root_path: 'llm' is not valid. Use a path that starts with / and does not end with /,"
            " for example /llm.",
        ),
        (
            "routes: {decode: []}",
            "routes.decode: this key is unknown. It must be one of: render, engine, extra, root_path.",
        ),
        ("limits: {max: 1}", "limits.max: this key is unknown. It must be one of: max_body_bytes."),
        (
            "policies: [{name: a, selector: {}, x: 1}]",
            "policies[0].x: this key is unknown. It must be one of: name, selector, policy.",
        ),
        (
            "policies: [{name: a, selector: {}, policy: {policies: []}}]",
            f"policies[0].policy.policies: this key is unknown. It must be one of: {KEYS}.",
        ),
        (
            "policies: [{name: a, selector: {}}, {name: b, selector: {}, policy: {range: {mn: 1}}}]",
            "policies[1].policy.range.mn: this key is unknown. It must be one of: min, max, outside.",
        ),
    ],
)
def test_an_unknown_key_is_named_at_every_level(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("range: {min: 2, max: 1}", "range.min: 2 is greater than range.max, which is 1. Use a smaller value."),
        ("range: {outside: clamp}", "range.outside: 'clamp' needs a bound. Set range.min or range.max."),
        (
            "header: Content-Length",
            "header: 'content-length' has a meaning in HTTP or Envoy. Use another name, for example x-priority.",
        ),
        (
            "header: x-envoy-a",
            "header: 'x-envoy-a' has a meaning in HTTP or Envoy. Use another name, for example x-priority.",
        ),
        (
            "report_header: TE",
            "report_header: 'te' has a meaning in HTTP or Envoy. Use another name, for example x-priority.",
        ),
        (
            "{header: X-A, report_header: x-a}",
            "report_header: 'x-a' is the request header. Use another name, or null.",
        ),
        ("{range: {max: 5}, classes: {a: 6}}", "classes.a: 6 is outside range. Use a value within it."),
        ("{range: {min: 0}, default: -1}", "default: -1 is outside range. Use a value within it."),
        ("default: batch", "default: 'batch' is not a class. Use an integer, or define this class."),
        (
            "{default: batch, classes: {a: 1, b: 2}}",
            "default: 'batch' is not a class. Use an integer, or one of the classes: a, b.",
        ),
        (
            f"{{engine: sglang, default: {INT64_MIN}}}",
            f"default: {INT64_MIN} cannot be negated for sglang. Use at least {INT64_MIN + 1}.",
        ),
        (
            f"{{engine: sglang, classes: {{a: {INT64_MIN}}}}}",
            f"classes.a: {INT64_MIN} cannot be negated for sglang. Use at least {INT64_MIN + 1}.",
        ),
        *(
            (
                f"routes: {{{key}: [{path}]}}",
                f"routes.{key}: vLLM reads the header on {path} itself. Remove this route.",
            )
            for key in ("render", "engine", "extra")
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
        ),
        (
            "routes: {extra: [/v1/decisions]}",
            "routes.extra: vLLM rejects a priority in the body of /v1/decisions. Remove this route.",
        ),
        (
            "policies: [{name: a, selector: {}, policy: {range: {min: 2, max: 1}}}]",
            "policies[0].policy.range.min: 2 is greater than range.max, which is 1. Use a smaller value.",
        ),
        (
            "{range: {max: 5}, policies: [{name: a, selector: {}, policy: {default: 6}}]}",
            "policies[0].policy.default: 6 is outside range. Use a value within it.",
        ),
    ],
)
def test_a_contradiction_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


TENANTS = "tenants: {{header: x-tenant, rules: {{batch: {{{}}}}}}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{header: x-p, ordinary: enforce}",
         "ordinary: 'enforce' needs the header that vLLM reads. Set header to x-vllm-priority."),
        ("{keep_header: true, ordinary: enforce}",
         "keep_header: with ordinary: enforce, vLLM would read a kept header. Set keep_header to false."),
        ("body: clamp", "body: 'clamp' needs a bound. Set range.min or range.max."),
        ("{engine: sglang, ordinary: enforce}",
         "ordinary: 'enforce' is for vLLM, whose routes read the header. Use pass with sglang."),
        ("{engine: sglang, body: ignore}",
         "default: with sglang, a priority that is ignored needs another value. Set a default."),
        ("{engine: sglang, trust: {peers: [10.0.0.0/8]}}",
         "default: with sglang, a priority that is ignored needs another value. Set a default."),
        ("trust: {peers: [10.0.0.1/8]}",
         "trust.peers[0]: '10.0.0.1/8' is not a network (10.0.0.1/8 has host bits set). Use CIDR notation, for example "
         "10.0.0.0/8."),
        ("trust: {peers: [10.0.0.0/33]}",
         "trust.peers[0]: '10.0.0.0/33' is not a network ('10.0.0.0/33' does not appear to be an IPv4 or IPv6 network)"
         ". Use CIDR notation, for example 10.0.0.0/8."),
        ("trust: {peers: ['::ffff:10.0.0.0/104']}",
         "trust.peers[0]: '::ffff:10.0.0.0/104' is an IPv4 network in IPv6. Use IPv4, for example 10.0.0.0/8."),
        ("trust: {forwarded_by: [10.0.0.0/8]}",
         "trust.forwarded_by: has no effect without trust.peers. Name the clients' networks there."),
        ("trust: {peers: [10.0.0.0/8, 10.1.0.0/16]}",
         "trust.peers: 10.1.0.0/16 lies within 10.0.0.0/8, so it decides nothing. Remove one."),
        ("trust: {identities: ['spiffe://a/*', 'spiffe://a/b']}",
         "trust.identities: 'spiffe://a/*' matches 'spiffe://a/b', too. Remove one."),
        ("{range: {max: 5}, default: 3, " + TENANTS.format("range: {min: 4}") + "}",
         "tenants.rules.batch.default: 3 is outside range. Use a value within it."),
        ("{classes: {fast: -5}, " + TENANTS.format("range: {min: 0}") + "}",
         "tenants.rules.batch.classes.fast: -5 is outside range. Use a value within it."),
        (TENANTS.format("default: fast"),
         "tenants.rules.batch.default: 'fast' is not a class. Use an integer, or define this class."),
        ("{header: x-tenant, " + TENANTS.format("default: 1") + "}",
         "tenants.header: 'x-tenant' is the policy's header. Use another name."),
        ("tenants: {header: host, rules: {a: {}}}",
         "tenants.header: 'host' has a meaning in HTTP or Envoy. Use another name, for example x-priority."),
    ],
)  # fmt: skip
def test_a_rule_that_contradicts_or_decides_nothing_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


def test_a_tenant_has_the_policys_values_where_it_has_no_own() -> None:
    policy = parse_policies("{default: 3, range: {max: 9}, " + TENANTS.format("range: {min: 0}") + "}").default
    tenant = policy.of_tenant("batch")
    assert (tenant.default, tenant.range.min, tenant.range.max) == (3, 0, None)
    policy = parse_policies("{default: 3, " + TENANTS.format("default: null") + "}").default
    assert policy.of_tenant("batch").default is None


def test_routes_that_stay_open_are_named() -> None:
    for text in ("{}", "{trust: {peers: [10.0.0.0/8]}, ordinary: enforce}"):
        assert parse_policies(text).default.open_routes is None
    for text in ("trust: {peers: [10.0.0.0/8]}", "body: reject", TENANTS.format("default: 1")):
        assert "Set ordinary: enforce" in (parse_policies(text).default.open_routes or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default: 1\ndefault: 2", "not valid YAML: line 2, column 1: the key 'default' appears twice."),
        ("classes: {a: 1, a: 2}", "not valid YAML: line 1, column 17: the key 'a' appears twice."),
        ("1: a\n1: b", "not valid YAML: line 2, column 1: the key 1 appears twice."),
        ("policies: [{name: a, name: b}]", "not valid YAML: line 1, column 22: the key 'name' appears twice."),
    ],
)
def test_a_repeated_key_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("header: [", "not valid YAML: line 1, column 10: expected the node content, but found '<stream end>'"),
        ("a: b: c", "not valid YAML: line 1, column 5: mapping values are not allowed here"),
        ("\tdefault: 1", "not valid YAML: line 1, column 1: found character '\\t' that cannot start any token"),
        ("header: \0", "not valid YAML: special characters are not allowed"),
        ("default: 1\n---\ndefault: 2", "not valid YAML: line 2, column 1: but found another document"),
        ("[a, b]: 1", "not valid YAML: line 1, column 1: found unhashable key"),
        ("header: *a", "not valid YAML: line 1, column 9: found undefined alias 'a'"),
        (
            "x: !!python/object:os.system {}",
            "not valid YAML: line 1, column 4: could not determine a constructor for the tag",
        ),
        ("default: 2020-13-45", "not valid YAML: a value cannot be read: month must be in 1..12"),
        ("default: " + "9" * 5000, "not valid YAML: a value cannot be read: Exceeds the limit (4300 digits)"),
        ('default: !!int ""', "not valid YAML: a value cannot be read, or does not fit its tag"),
        ("keep_header: !!bool maybe", "not valid YAML: a value cannot be read, or does not fit its tag"),
        ("default: !!timestamp x", "not valid YAML: a value cannot be read, or does not fit its tag"),
        (
            "- header: x-a",
            "[{'header': 'x-a'}] is not a valid policy. Use a mapping of a policy's keys, for example default: 5.",
        ),
        ("just text", "'just text' is not a valid policy. Use a mapping of a policy's keys, for example default: 5."),
        ("5", "5 is not a valid policy. Use a mapping of a policy's keys, for example default: 5."),
    ],
)
def test_what_is_no_policy_file_is_refused(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


_NINE = ", ".join(["*{0}"] * 9)


def _doubling(first: str, line: str) -> str:
    """Lines that each hold the one before nine times: 9^20 values when written out."""
    names = [f"n{index}" for index in range(21)]
    pairs = zip(names, names[1:], strict=False)
    return f"  {names[0]}: &{names[0]} {first}\n" + "".join(
        line.format(new=new, nine=_NINE.format(old)) for old, new in pairs
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes:\n" + _doubling("[x]", "  {new}: &{new} [{nine}]\n"), "classes.n0: ['x'] is not valid"),
        (
            "classes:\n" + _doubling("{x: 1}", "  {new}: &{new} {{<<: [{nine}]}}\n"),
            "not valid YAML: line 3, column 12: the merge key << is not supported",
        ),
        ("classes: &a {x: *a}", "classes.x: {'x': {'x': {...}}} is not valid"),
        ("range: &r {<<: *r}", "not valid YAML: line 1, column 12: the merge key << is not supported."),
        ("classes: " + "[\n " * 5000, "nested too deeply"),
        ("classes: " + "{a: " * 5000, "nested too deeply"),
        ("header: " + "x" * 100_000, "header: 'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxx' is not"),
        ("? " + "x" * 100_000 + "\n: 1", "'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxx': this key"),
        ("default: 0x" + "f" * 5000, "default: an integer of 20000 bits is not valid"),
        ("routes: {extra: [[0x" + "f" * 5000 + "]]}", "routes.extra[0]: [an integer of 20000 bits] is not valid"),
        ("".join(f"k{index}: 1\n" for index in range(1000)), "k0: this key is unknown"),
    ],
    ids=[
        "aliases", "merge keys", "itself", "merged into itself", "lists", "mappings", "a string", "a key", "an integer",
        "an integer in a list", "keys",
    ],
)  # fmt: skip
def test_an_exploding_or_long_file_is_refused_in_few_words(text: str, message: str) -> None:
    said = refusal(text)
    assert said.startswith(message)
    assert len(said) < 1200


def test_only_the_first_problems_are_told() -> None:
    said = refusal("".join(f"k{index}: 1\n" for index in range(9)))
    assert said.count("this key is unknown") == 5
    assert said.endswith(" There are 4 more problems.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policies: x", "policies: 'x' is not valid. Use a list of named policies."),
        ("policies: {}", "policies: {} is not valid. Use a list of named policies."),
        ("policies: false", "policies: False is not valid. Use a list of named policies."),
        ("policies: [5]", "policies[0]: 5 is not valid. Use the keys name, selector and policy."),
        ("policies: [{}]", "policies[0].name: this key is required. policies[0].selector: this key is required."),
        ("policies: [{name: a}]", "policies[0].selector: this key is required."),
        (
            "policies: [{name: A_, selector: {}}]",
            "policies[0].name: 'A_' is not valid. Use a name of at most 63 lower-case letters, digits and -, "
            "with a letter or digit at both ends, for example night.",
        ),
        ("policies: [{name: a, selector: x}]", "policies[0].selector: 'x' is not valid. Use a mapping."),
        ("policies: [{name: a, selector: {b: 1}}]", "policies[0].selector.b: 1 is not valid. Use a string."),
        (
            "policies: [{name: a, selector: {}, policy: []}]",
            "policies[0].policy: [] is not valid. Use a mapping of a policy's keys, for example default: 5.",
        ),
        (
            "policies: [{name: a, selector: {}, policy: 0}]",
            "policies[0].policy: 0 is not valid. Use a mapping of a policy's keys, for example default: 5.",
        ),
        (
            "policies: [{name: a, selector: {}}, {name: a, selector: {}}]",
            "policies: the name 'a' is already in use. Use a different name for each policy.",
        ),
        (
            "policies: [{name: default, selector: {}}]",
            "policies: the name 'default' is already in use. Use a different name for each policy.",
        ),
    ],
)
def test_a_wrong_named_policy_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


NAMED = """
default: 1
keep_header: true
range: {max: 50}
policies:
- name: batch
  selector: {tier: batch, team: x}
  policy: {default: 10, range: {min: 0}}
- name: tier
  selector: {tier: batch}
- name: by-name
  selector: {}
  policy:
"""


@pytest.mark.parametrize(
    ("labels", "name", "default", "bounds"),
    [
        ({}, None, 1, (None, 50)),
        ({"tier": "batch", "team": "x", "other": "y"}, None, 10, (0, None)),
        ({"tier": "batch"}, None, 1, (None, 50)),
        ({}, "batch", 10, (0, None)),
        ({"tier": "batch"}, "by-name", 1, (None, 50)),
        ({"tier": "batch", "team": "x"}, "default", 1, (None, 50)),
    ],
)
def test_a_named_policy_replaces_keys_of_the_top_level(
    labels: dict[str, str], name: str | None, default: int, bounds: tuple[int | None, int | None]
) -> None:
    chosen = parse_policies(NAMED).choose(labels, name)
    assert chosen is not None
    assert (chosen.default, (chosen.range.min, chosen.range.max), chosen.keep_header) == (default, bounds, True)


def test_a_policy_of_an_unknown_name_is_none_and_never_the_default() -> None:
    assert parse_policies(NAMED).choose({"tier": "batch"}, "nope") is None


def test_an_empty_selector_matches_no_labels() -> None:
    policies = parse_policies("policies: [{name: a, selector: {}, policy: {default: 5}}]")
    assert policies.choose({"any": "label"}) == policies.default


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such file. Use the path of a policy in YAML, for example policy.yaml."),
        (
            lambda path: path.mkdir(),
            "cannot be read: Is a directory. Use the path of a policy in YAML, for example policy.yaml.",
        ),
        (
            lambda path: path.write_bytes(b"header: \xff\xfe"),
            "cannot be read: not UTF-8 text. Use the path of a policy in YAML, for example policy.yaml.",
        ),
        (
            lambda path: path.write_bytes(b"# \n" * MAX_FILE_BYTES),
            f"larger than {MAX_FILE_BYTES} bytes. Use a smaller policy.",
        ),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), f"larger than {MAX_FILE_BYTES} bytes. Use a smaller policy."),
    ],
    ids=["missing", "a folder", "not UTF-8", "too large", "a link to itself", "endless"],
)
def test_a_file_that_cannot_be_read_is_named(make: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    make(path)
    with pytest.raises(PolicyError) as caught:
        load_policies(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_a_file_is_read_as_utf_8(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(head + "# für alle\ndefault: 7\n".encode())
    assert load_policies(path).default.default == 7


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(PolicyError, match="not a valid path. Use"):
        load_policies("a\0b")


def test_policies_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        Policy().header = "x-b"  # type: ignore[misc]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates()
documents = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*Policy.model_fields, "policies", "name", "selector", "policy"]), inner)
        | st.dictionaries(scalars, inner, max_size=3)
    ),
    max_leaves=12,
)


def parses_or_says_why(text: str) -> None:
    try:
        assert isinstance(parse_policies(text, "p.yaml"), Policies)
    except PolicyError as error:
        assert str(error).isprintable(), "more than one line"
        assert len(str(error)) < 4000


@given(st.text() | st.text("{}[]:,-?&*!|>'\"%@ \n\tadefinopsu<019."))
@settings(deadline=None, max_examples=300)
def test_any_text_is_a_policy_or_is_refused_in_one_line(text: str) -> None:
    parses_or_says_why(text)


@given(documents)
@settings(deadline=None, max_examples=300)
def test_any_document_is_a_policy_or_is_refused_in_one_line(document: object) -> None:
    parses_or_says_why(yaml.safe_dump(document, allow_unicode=True))


@given(st.binary())
@settings(deadline=None, max_examples=100)
def test_any_file_is_a_policy_or_is_refused_in_one_line(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            load_policies(file.name)
        except PolicyError as error:
            assert str(error).isprintable()
