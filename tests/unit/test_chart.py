"""The Helm chart, rendered by helm, and checked by helm, kubernetes-validate, and the policy's own parser."""

import base64
import copy
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import pytest
import yaml
from celpy.adapter import json_to_cel
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from control_plane.cli import cli
from control_plane.cli.injector import injector_settings
from control_plane.policy.load import parse_policies
from control_plane.server import process
from tests.golden.chart import OWN_CA, VARIANTS
from tests.golden.chart import rendered as golden_rendered
from tests.helm import (
    CHART,
    KUBERNETES_VERSIONS,
    NAMESPACE,
    RELEASE,
    HelmError,
    binary,
    documents,
    find,
    helm,
    template,
    with_secret,
)
from tests.kubernetes_api import running_api, write_certificate
from tests.pem import Authority
from tools.build_values import value_comments

Objects = list[dict[str, Any]]
ROOT = CHART.parent.parent

# The kinds of operators, for which kubernetes-validate has no schema.
CUSTOM_GROUPS = ("cert-manager.io/", "monitoring.coreos.com/")


@pytest.fixture(scope="module")
def rendered() -> dict[str, Objects]:
    return {name: documents(golden_rendered(name)) for name in VARIANTS}


def one(objects: Objects, kind: str) -> dict[str, Any]:
    (found,) = find(objects, kind)
    return found


def pod_specs(objects: Objects) -> Iterator[dict[str, Any]]:
    for document in objects:
        if document["kind"] == "Pod":
            yield document["spec"]
        elif document["kind"] == "Deployment":
            yield document["spec"]["template"]["spec"]


def test_helm_lint_finds_no_problem() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_manifest_is_valid_in_kubernetes(rendered: dict[str, Objects], name: str, version: str) -> None:
    for document in rendered[name]:
        if not document["apiVersion"].startswith(CUSTOM_GROUPS):
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    "name", [name for name, variant in VARIANTS.items() if "policyConfigMap" not in variant.values]
)
def test_every_policy_is_valid(rendered: dict[str, Objects], name: str) -> None:
    configs = [c["data"]["policy.yaml"] for c in find(rendered[name], "ConfigMap") if "policy.yaml" in c["data"]]
    assert len(configs) == 1
    parse_policies(configs[0])


def test_the_policy_in_the_config_map_is_the_one_in_the_values(rendered: dict[str, Objects]) -> None:
    (config,) = (c for c in find(rendered["policies"], "ConfigMap") if "policy.yaml" in c["data"])
    policies = parse_policies(config["data"]["policy.yaml"])
    assert policies.default.classes == {"interactive": -10, "batch": 10}
    assert policies.default.default_value == 10
    assert policies.default.range.max == 1000000
    assert policies.default.report_header is None
    guests = policies.choose({"team": "guests"})
    assert guests is not None
    assert (guests.default, guests.range.min, guests.report_header) == (5, 0, None)


@pytest.mark.parametrize("word", ["on", "y", "NO", "true", "null", "Null", "e1", "A.b-c_d"])
def test_a_string_that_yaml_could_read_as_another_type_stays_a_string(word: str) -> None:
    values = {"policy": {"classes": {word: 1}, "default": word}, "policies": [{"name": "a", "selector": {"v": "1e3"}}]}
    (config,) = find(documents(template(values)), "ConfigMap")
    policies = parse_policies(config["data"]["policy.yaml"])
    assert (policies.default.classes, policies.default.default) == ({word: 1}, word)
    assert policies.named[0].selector == {"v": "1e3"}


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ((), {"default": 3}),
        # Why the documentation warns of this flag: Helm merges, so what was left out stays.
        (("--reuse-values",), {"classes": {"batch": 10}, "default": 3}),
    ],
)
def test_an_upgrade_with_a_file_of_values_replaces_the_policy(
    tmp_path: Path, flags: tuple[str, ...], policy: dict[str, Any]
) -> None:
    rendered = upgrade(
        tmp_path, {"policy": {"classes": {"batch": 10}, "default": "batch"}}, {"policy": {"default": 3}}, flags
    )
    (config,) = (c for c in find(rendered, "ConfigMap") if "policy.yaml" in c["data"])
    assert yaml.safe_load(config["data"]["policy.yaml"]) == policy


def upgrade(folder: Path, old: dict[str, Any], new: dict[str, Any], flags: tuple[str, ...]) -> Objects:
    """What `helm upgrade` renders for a release that was installed with the values `old`, with a file of values `new`.

    Helm reads the release from a file, and asks a server that responds like the Kubernetes API what the cluster has.
    """
    chart = {
        "metadata": yaml.safe_load((CHART / "Chart.yaml").read_text()),
        "values": yaml.safe_load((CHART / "values.yaml").read_text()),
    }
    release = {
        "name": RELEASE, "namespace": NAMESPACE, "version": 1, "info": {"status": "deployed"},
        "chart": chart, "config": old, "manifest": "",
    }  # fmt: skip
    (folder / "releases.yaml").write_text(yaml.safe_dump([release]))
    (folder / "values.yaml").write_text(yaml.safe_dump(new))
    write_certificate(folder)
    with running_api(folder) as api:
        api.status = 404
        api.responses = {
            "/version?timeout=32s": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
            "/api?timeout=32s": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis?timeout=32s": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1?timeout=32s": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        }
        command = [
            str(binary()), "upgrade", RELEASE, str(CHART), f"--namespace={NAMESPACE}",
            "-f", str(folder / "values.yaml"), "--dry-run=client", f"--kube-apiserver=https://127.0.0.1:{api.port}",
            f"--kube-ca-file={folder / 'ca.crt'}", "--kube-token=secret", *flags,
        ]  # fmt: skip
        driver = {"HELM_DRIVER": "memory", "HELM_MEMORY_DRIVER_DATA": str(folder / "releases.yaml")}
        environment = {**os.environ, **driver, "KUBECONFIG": str(folder / "none")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    _, _, manifest = done.stdout.partition("MANIFEST:\n")
    return documents(manifest.partition("NOTES:\n")[0])


def test_every_pod_meets_pod_security_restricted(rendered: dict[str, Objects]) -> None:
    for objects in rendered.values():
        for spec in pod_specs(objects):
            assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
            assert all(
                set(volume) & {"configMap", "secret", "emptyDir", "projected"} for volume in spec.get("volumes", [])
            )
            for container in spec["containers"]:
                context = container["securityContext"]
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert context["runAsNonRoot"] is True
                assert context["seccompProfile"] == {"type": "RuntimeDefault"}
                assert context["readOnlyRootFilesystem"] is True


API_RULES = {
    "events": {"apiGroups": [""], "verbs": ["create"]},
    "services": {"apiGroups": [""], "verbs": ["list"]},
    "tokenreviews": {"apiGroups": ["authentication.k8s.io"], "verbs": ["create"]},
}


def test_the_control_plane_has_only_the_access_to_the_api_that_it_uses(rendered: dict[str, Objects]) -> None:
    kinds = {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    for name, objects in rendered.items():
        values = VARIANTS[name].values
        used = {"services": values.get("readServices", False)}
        used["events"] = values.get("webhook", {}).get("enabled", True) and values.get("writeEvents", True)
        used["tokenreviews"] = values.get("sidecar", {}).get("tokens", True)
        spec = one(objects, "Deployment")["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is any(used.values()), name
        rules = [rule for found in objects if found["kind"] in kinds for rule in found.get("rules", [])]
        assert {resource for rule in rules for resource in rule["resources"]} == {r for r in used if used[r]}, name
        for rule in rules:
            (resource,) = rule["resources"]
            assert rule == {"resources": [resource], **API_RULES[resource]}
    services = find(rendered["read-services-namespaces"], "Role")
    assert {role["metadata"].get("namespace") for role in services} == {"ml", "web"}
    assert len(find(rendered["read-services-namespaces"], "ClusterRole")) == 2


def test_without_events_and_tokens_nothing_has_access_to_the_api() -> None:
    values = {"writeEvents": False, "sidecar": {"tokens": False}, "networkPolicy": {"enabled": True}}
    objects = documents(template(values))
    assert not [found for found in objects if "Role" in found["kind"]]
    assert one(objects, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert one(objects, "NetworkPolicy")["spec"]["egress"] == []
    (webhook,) = one(objects, "MutatingWebhookConfiguration")["webhooks"]
    assert webhook["sideEffects"] == "None"


class TestWebhook:
    def test_it_is_called_only_for_labelled_pods_and_only_when_they_are_created(
        self, rendered: dict[str, Objects]
    ) -> None:
        (webhook,) = one(rendered["default"], "MutatingWebhookConfiguration")["webhooks"]
        assert webhook["objectSelector"] == {"matchLabels": {"vllm-priority.io/inject": "true"}}
        assert [rule["operations"] for rule in webhook["rules"]] == [["CREATE"]]
        assert webhook["rules"][0]["resources"] == ["pods"]
        assert (webhook["timeoutSeconds"], webhook["failurePolicy"]) == (5, "Ignore")

    def test_it_has_no_side_effects_in_a_dry_run(self, rendered: dict[str, Objects]) -> None:
        (webhook,) = one(rendered["default"], "MutatingWebhookConfiguration")["webhooks"]
        assert webhook["sideEffects"] == "NoneOnDryRun"

    def test_kube_system_and_its_own_namespace_are_excluded(self, rendered: dict[str, Objects]) -> None:
        for name, objects in rendered.items():
            for configuration in webhook_configurations(objects):
                (rule,) = configuration["webhooks"][0]["namespaceSelector"]["matchExpressions"]
                assert (rule["key"], rule["operator"]) == ("kubernetes.io/metadata.name", "NotIn")
                assert {"kube-system", NAMESPACE} <= set(rule["values"]), name
                assert len(rule["values"]) == len(set(rule["values"])), name

    def test_the_control_plane_does_not_inject_its_own_pods(self, rendered: dict[str, Objects]) -> None:
        for objects in rendered.values():
            labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
            assert "vllm-priority.io/inject" not in labels

    def test_it_uses_the_port_on_which_the_pods_listen(self, rendered: dict[str, Objects]) -> None:
        objects = rendered["default"]
        targets = [found["webhooks"][0]["clientConfig"]["service"] for found in webhook_configurations(objects)]
        assert [target.pop("path") for target in targets] == ["/inject", "/validate-workload"]
        target, other = targets
        assert target == other
        service = one(objects, "Service")
        assert (target["name"], target["namespace"]) == (service["metadata"]["name"], service["metadata"]["namespace"])
        (port,) = (port for port in service["spec"]["ports"] if port["port"] == target["port"])
        container = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
        (served,) = (p["containerPort"] for p in container["ports"] if p["name"] == port["targetPort"])
        assert f"--tls-listen=0.0.0.0:{served}" in container["args"]
        labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()

    def test_without_it_no_events_are_written(self, rendered: dict[str, Objects]) -> None:
        assert "--write-events" not in str(one(rendered["no-webhook"], "Deployment"))
        assert "--write-events" in str(one(rendered["default"], "Deployment"))

    def test_without_it_sidecars_still_poll_over_tls(self, rendered: dict[str, Objects]) -> None:
        objects = rendered["no-webhook"]
        assert not webhook_configurations(objects)
        assert {port["name"] for port in one(objects, "Service")["spec"]["ports"]} == {"http", "https"}
        assert "--tls-cert=/etc/vllm-priority-tls/tls.crt" in str(one(objects, "Deployment"))

    def test_a_control_plane_outside_the_cluster_is_called_by_its_url(self, rendered: dict[str, Objects]) -> None:
        targets = [found["webhooks"][0]["clientConfig"] for found in webhook_configurations(rendered["outside"])]
        assert [target["url"] for target in targets] == [
            "https://192.0.2.7:8443/inject", "https://192.0.2.7:8443/validate-workload",
        ]  # fmt: skip
        assert not any("service" in target for target in targets)


LABELLED = {"metadata": {"labels": {"vllm-priority.io/inject": "true"}}}
UNLABELLED: list[dict[str, Any]] = [
    {"metadata": {"labels": {"vllm-priority.io/inject": "false"}}},
    {"metadata": {"labels": {"app": "vllm"}}},
    {"metadata": {"creationTimestamp": None}},
    {},
]


class TestWorkloadWebhook:
    def test_it_warns_and_never_rejects(self, rendered: dict[str, Objects]) -> None:
        for name in ("default", "outside", "oldest"):
            (webhook,) = one(rendered[name], "ValidatingWebhookConfiguration")["webhooks"]
            assert (webhook["failurePolicy"], webhook["sideEffects"]) == ("Ignore", "None")

    def test_it_is_called_for_the_kinds_of_workloads(self, rendered: dict[str, Objects]) -> None:
        (webhook,) = one(rendered["default"], "ValidatingWebhookConfiguration")["webhooks"]
        assert {resource for rule in webhook["rules"] for resource in rule["resources"]} == {
            "deployments", "statefulsets", "daemonsets", "jobs", "cronjobs", "leaderworkersets", "rollouts",
        }  # fmt: skip
        assert all(rule["operations"] == ["CREATE", "UPDATE"] for rule in webhook["rules"])

    @pytest.mark.parametrize(
        ("template", "called"), [(LABELLED, True), *((unlabelled, False) for unlabelled in UNLABELLED)]
    )
    @pytest.mark.parametrize(
        "path",
        [
            ("spec", "template"),
            ("spec", "jobTemplate", "spec", "template"),
            ("spec", "leaderWorkerTemplate", "leaderTemplate"),
            ("spec", "leaderWorkerTemplate", "workerTemplate"),
        ],
    )
    def test_it_is_called_if_a_pod_template_has_the_label(
        self, rendered: dict[str, Objects], path: tuple[str, ...], template: dict[str, Any], called: bool
    ) -> None:
        workload: dict[str, Any] = template
        for key in reversed(path):
            workload = {key: workload}
        assert is_called(rendered["default"], {"metadata": {"name": "m"}, **workload}) is called

    def test_it_is_called_if_only_the_workload_itself_has_the_label(self, rendered: dict[str, Objects]) -> None:
        assert is_called(rendered["default"], {**LABELLED, "spec": {"template": {"metadata": {}}}})
        assert not is_called(rendered["default"], {"metadata": {"name": "m"}, "spec": {"template": {"metadata": {}}}})

    def test_before_kubernetes_1_28_the_workload_itself_needs_the_label(self, rendered: dict[str, Objects]) -> None:
        (webhook,) = one(rendered["oldest"], "ValidatingWebhookConfiguration")["webhooks"]
        assert "matchConditions" not in webhook
        assert webhook["objectSelector"] == {"matchLabels": {"vllm-priority.io/inject": "true"}}


def webhook_configurations(objects: Objects) -> Objects:
    return find(objects, "MutatingWebhookConfiguration") + find(objects, "ValidatingWebhookConfiguration")


def is_called(objects: Objects, workload: dict[str, Any]) -> bool:
    """Whether the API server calls the webhook for this workload, by the webhook's CEL expression."""
    (webhook,) = one(objects, "ValidatingWebhookConfiguration")["webhooks"]
    (condition,) = webhook["matchConditions"]
    environment = celpy.Environment()
    program = environment.program(environment.compile(condition["expression"]))
    return bool(program.evaluate({"object": json_to_cel(workload)}))


class TestCertificates:
    def test_all_objects_of_one_render_use_the_same_certificate(self, rendered: dict[str, Objects]) -> None:
        objects = rendered["default"]
        data = {key: base64.b64decode(value) for key, value in one(objects, "Secret")["data"].items()}
        for configuration in webhook_configurations(objects):
            assert base64.b64decode(configuration["webhooks"][0]["clientConfig"]["caBundle"]) == data["ca.crt"]
        ca, leaf = (x509.load_pem_x509_certificate(data[key]) for key in ("ca.crt", "tls.crt"))
        leaf.verify_directly_issued_by(ca)
        key = one(objects, "Pod")["spec"]["containers"][0]["env"][-1]
        assert key == {"name": "CA_BUNDLE", "value": data["ca.crt"].decode()}

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("default", [f"{RELEASE}.{NAMESPACE}.svc", f"{RELEASE}.{NAMESPACE}.svc.cluster.local"]),
            ("everything-set", [f"priorities.{NAMESPACE}.svc", f"priorities.{NAMESPACE}.svc.cluster.local"]),
            ("outside", [f"{RELEASE}.{NAMESPACE}.svc", f"{RELEASE}.{NAMESPACE}.svc.cluster.local", "192.0.2.7"]),
        ],
    )
    def test_it_has_the_names_by_which_the_api_server_calls_it(
        self, rendered: dict[str, Objects], name: str, expected: list[str]
    ) -> None:
        leaf = x509.load_pem_x509_certificate(base64.b64decode(one(rendered[name], "Secret")["data"]["tls.crt"]))
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(entry.value) for entry in names] == expected
        assert isinstance(leaf.public_key(), ec.EllipticCurvePublicKey)

    def test_a_new_certificate_rolls_out_the_pods(self) -> None:
        checksums = {
            one(documents(template(values)), "Deployment")["spec"]["template"]["metadata"]["annotations"][
                "checksum/certificate"
            ]
            for values in (
                {"certificates": {"source": "secret", "secretName": "s", "caBundle": OWN_CA}},
                {"certificates": {"source": "secret", "secretName": "s", "caBundle": OWN_CA + OWN_CA}},
            )
        }
        assert len(checksums) == 2

    def test_renewal_and_another_name_keep_the_ca_that_running_sidecars_trust(self) -> None:
        first = one(documents(template()), "Secret")
        for changed, values in (
            ("renew-after", {}),
            ("names", {"webhook": {"url": "https://control.example/inject"}}),
        ):
            stored = copy.deepcopy(first)
            if changed == "renew-after":
                stored["metadata"]["annotations"]["vllm-priority.io/renew-after"] = "1"
            second = one(documents(with_secret(stored, values)), "Secret")
            assert second["data"]["ca.crt"] == first["data"]["ca.crt"], changed
            assert second["data"]["tls.crt"] != first["data"]["tls.crt"], changed
            ca, leaf = (
                x509.load_pem_x509_certificate(base64.b64decode(second["data"][key])) for key in ("ca.crt", "tls.crt")
            )
            leaf.verify_directly_issued_by(ca)
            assert ca.not_valid_after_utc > leaf.not_valid_after_utc
        assert one(documents(with_secret(first, {})), "Secret")["data"] == first["data"]

    def test_a_ca_that_ends_before_its_next_certificate_is_replaced_and_still_trusted(self) -> None:
        stored = one(documents(template()), "Secret")
        old = stored["data"]["ca.crt"]
        stored["metadata"]["annotations"] |= {"vllm-priority.io/renew-after": "1", "vllm-priority.io/ca-ends": "2"}
        bundle = base64.b64decode(one(documents(with_secret(stored, {})), "Secret")["data"]["ca.crt"])
        _, trusted_too = x509.load_pem_x509_certificates(bundle)
        assert trusted_too == x509.load_pem_x509_certificate(base64.b64decode(old))

    def test_an_existing_secret_is_mounted_and_none_is_created(self, rendered: dict[str, Objects]) -> None:
        objects = rendered["own-secret"]
        assert not find(objects, "Secret")
        volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
        (sources,) = (volume["projected"]["sources"] for volume in volumes if "projected" in volume)
        assert [source["secret"]["name"] for source in sources if "secret" in source] == ["webhook-tls"]
        (config,) = (c for c in find(objects, "ConfigMap") if {"configMap": {"name": c["metadata"]["name"]}} in sources)
        assert config["data"] == {"ca.crt": OWN_CA}
        (webhook,) = one(objects, "MutatingWebhookConfiguration")["webhooks"]
        assert base64.b64decode(webhook["clientConfig"]["caBundle"]).decode() == OWN_CA

    @pytest.mark.parametrize(
        ("name", "issuer"),
        [
            ("cert-manager", {"name": f"{RELEASE}-ca", "kind": "Issuer", "group": "cert-manager.io"}),
            ("cert-manager-issuer", {"name": "company-ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}),
        ],
    )
    def test_cert_manager_creates_it_and_inserts_the_ca(
        self, rendered: dict[str, Objects], name: str, issuer: dict[str, str]
    ) -> None:
        objects = rendered[name]
        assert not find(objects, "Secret")
        configurations = webhook_configurations(objects)
        assert not any("caBundle" in found["webhooks"][0]["clientConfig"] for found in configurations)
        sources = {found["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] for found in configurations}
        (source,) = sources
        (certificate,) = (c for c in find(objects, "Certificate") if f"{NAMESPACE}/{c['metadata']['name']}" == source)
        assert certificate["spec"]["issuerRef"] == issuer
        volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
        (source,) = next(volume["projected"]["sources"] for volume in volumes if "projected" in volume)
        assert source["secret"]["name"] == certificate["spec"]["secretName"]
        assert {item["key"] for item in source["secret"]["items"]} == {"tls.crt", "tls.key", "ca.crt"}


def test_with_a_token_for_the_api_prometheus_sends_it(rendered: dict[str, Objects]) -> None:
    (spec,) = (d["spec"]["template"]["spec"] for d in find(rendered["monitors"], "Deployment"))
    (container,) = spec["containers"]
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "api-token")
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "api-token")
    assert volume["secret"] == {"secretName": "api-token", "items": [{"key": "token", "path": "token"}]}
    assert f"--api-token-file={mount['mountPath']}/token" in container["args"]
    (endpoint,) = one(rendered["monitors"], "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "api-token", "key": "token"}}
    (everything,) = (d["spec"]["template"]["spec"] for d in find(rendered["everything-set"], "Deployment"))
    assert {"--console-proxy=10.1.2.3", "--console-proxy=2001:db8::1"} <= set(everything["containers"][0]["args"])


def test_newer_kinds_are_created_only_if_the_cluster_has_them(rendered: dict[str, Objects]) -> None:
    assert find(rendered["default"], "PodDisruptionBudget")
    assert not find(rendered["oldest"], "PodDisruptionBudget")
    assert find(rendered["monitors"], "ServiceMonitor")
    assert find(rendered["monitors"], "PodMonitor")
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert one(rendered["monitors"], "PrometheusRule")["spec"] == rules
    missing = rendered["monitors-without-their-kinds"]
    assert not [kind for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule") if find(missing, kind)]


def test_a_rollout_never_has_fewer_replicas_than_configured(rendered: dict[str, Objects]) -> None:
    spec = one(rendered["default"], "Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > process.DRAIN_ACCEPT_SECONDS + process.DRAIN_SECONDS
    assert "lifecycle" not in pod["containers"][0], "a preStop hook would delay the drain, which begins at SIGTERM"


def test_a_node_with_a_single_replica_can_be_drained() -> None:
    assert not find(documents(template({"replicas": 1})), "PodDisruptionBudget")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"certificates": {"source": "secret", "secretName": "s"}},
            "Set certificates.secretName and certificates.caBundle.",
        ),
        ({"certificates": {"secretName": "s"}}, "but the source is chart"),
        ({"certificates": {"source": "cert-manager"}}, "Install cert-manager first"),
        ({"certificates": {"issuer": {"name": "i"}}}, "certificates.issuer has an effect only with"),
        (
            {"webhook": {"enabled": False, "url": "https://h/inject"}},
            "webhook.url is set, but webhook.enabled is false",
        ),
        ({"policyConfigMap": "mine", "policy": {"default": 1}}, "would be ignored"),
        ({"policyConfigMap": "mine", "policies": [{"name": "a", "selector": {}}]}, "would be ignored"),
        ({"readServicesNamespaces": ["ml"]}, "but readServices is false"),
        ({"serviceAccount": {"create": False}}, "every pod of the namespace would get the same permissions"),
        ({"sidecar": {"numericServices": "redirect"}}, "knows the ports of Services only with readServices"),
        (
            {"readServices": True, "sidecar": {"numericServices": "redirect", "runAsUser": None}},
            "the redirect needs the user id",
        ),
        ({"podLabels": {"vllm-priority.io/inject": "true"}}, "would have to inject its own pods"),
    ],
)
def test_a_contradiction_fails_with_a_message(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HelmError, match=re.escape(sentence)):
        template(values)


@pytest.mark.parametrize(
    ("values", "where", "what"),
    [
        ({"replica": 3}, "", "additional properties 'replica' not allowed"),
        ({"replicas": "3"}, "/replicas", "got string, want integer"),
        ({"replicas": 0}, "/replicas", "minimum: got 0, want 1"),
        ({"webhook": {"failurePolicy": "Maybe"}}, "/webhook/failurePolicy", "'Ignore', 'Fail'"),
        ({"webhook": {"timeoutSeconds": 31}}, "/webhook/timeoutSeconds", "maximum: got 31, want 30"),
        ({"webhook": {"url": "http://h/inject"}}, "/webhook/url", "does not match pattern"),
        ({"policy": {"on_invalid": "drop"}}, "/policy/on_invalid", "'reject', 'ignore'"),
        ({"policy": {"on_unknown": "drop"}}, "/policy", "additional properties 'on_unknown' not allowed"),
        ({"policy": {"default": 1.5}}, "/policy/default", "want integer"),
        ({"policy": {"classes": {"1st": 3}}}, "/policy/classes", "additional properties '1st' not allowed"),
        ({"policy": {"routes": {"extra": ["v1/x"]}}}, "/policy/routes/extra/0", "does not match pattern"),
        ({"policies": [{"name": "A", "selector": {}}]}, "/policies/0/name", "does not match pattern"),
        ({"policies": [{"name": "a", "selector": {}, "policy": {"n": 1}}]}, "/policies/0/policy", "'n' not allowed"),
    ],
)
def test_the_message_names_a_wrong_value(values: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(HelmError) as error:
        template(values)
    assert f"at '{where}'" in str(error.value)
    assert what in str(error.value)


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**63 - 1, -(2**63)])
def test_a_number_that_helm_would_change_is_rejected(value: int) -> None:
    with pytest.raises(HelmError, match="imum: got"):
        template({"policy": {"range": {"min": value}}})


@pytest.mark.parametrize("value", [2**53 - 1, -(2**53) + 1, 1000000, 10**15])
def test_a_number_that_helm_keeps_arrives_unchanged(value: int) -> None:
    (config,) = find(documents(template({"policy": {"default": value}})), "ConfigMap")
    assert parse_policies(config["data"]["policy.yaml"]).default.default == value


FREE = {("monitoring", "dashboardLabels"), ("networkPolicy", "prometheusLabels"), ("resources",)}
"""Values whose keys are not the chart's."""


def test_every_value_has_a_comment() -> None:
    commented = {path for path, _ in value_comments()}

    def paths(values: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for key, value in values.items():
            yield (*at, key)
            if isinstance(value, dict) and (*at, key) not in FREE:
                yield from paths(value, (*at, key))

    assert set(paths(yaml.safe_load((CHART / "values.yaml").read_text()))) == commented


def test_the_test_pod_runs_the_unchanged_script(rendered: dict[str, Objects]) -> None:
    container = one(rendered["default"], "Pod")["spec"]["containers"][0]
    script = container["args"][0]
    assert script.strip() == (CHART / "files" / "connection_test.py").read_text().strip()
    compile(script, "connection_test.py", "exec")


def test_the_packaged_chart_renders_the_same(tmp_path: Path) -> None:
    helm("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("*.tgz")
    values = {
        "certificates": {"source": "secret", "secretName": "s", "caBundle": OWN_CA},
        "monitoring": {"dashboard": True},
    }
    assert documents(template(values, chart=package)) == documents(template(values))
    listed = subprocess.run(["tar", "tzf", str(package)], capture_output=True, text=True, check=True).stdout
    assert "vllm-priority/values.schema.json" in listed


@pytest.mark.parametrize(
    ("values", "there", "not_there"),
    [
        (
            {},
            ["helm test", "vllm-priority.io/inject", "start WITHOUT a sidecar", ":8080/console/"],
            ["older than 1.21", "No Pod"],
        ),
        ({"webhook": {"failurePolicy": "Fail"}}, [], ["start WITHOUT", "With one replica"]),
        ({"webhook": {"failurePolicy": "Fail"}, "replicas": 1}, ["With one replica"], []),
        ({"webhook": {"enabled": False}}, ["vllm-priority inject -f"], ["kubectl patch", "injects sidecars"]),
        ({"monitoring": {"podMonitor": True}}, ["No PodMonitor was created"], ["No ServiceMonitor"]),
        ({"monitoring": {"alerts": True}}, ["No PrometheusRule was created"], ["No PodMonitor"]),
    ],
)
def test_the_notes_name_the_next_steps(values: dict[str, Any], there: list[str], not_there: list[str]) -> None:
    notes = install_notes(values)
    assert [text for text in there if text not in notes] == []
    assert [text for text in not_there if text in notes] == []


def install_notes(values: dict[str, Any]) -> str:
    set_flags = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    shown = helm("install", RELEASE, CHART, "--namespace", NAMESPACE, "--dry-run=client", *set_flags)
    return shown.partition("NOTES:")[2]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_program_accepts_the_arguments_of_the_chart(
    rendered: dict[str, Objects], name: str, tmp_path: Path
) -> None:
    command, *arguments = one(rendered[name], "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    ca = tmp_path / "ca.crt"
    ca.write_text(Authority().pem)
    arguments = [argument.replace("/etc/vllm-priority-tls/ca.crt", str(ca)) for argument in arguments]
    options = cli.commands[command].make_context(command, arguments).params
    settings = injector_settings(options)
    assert str(settings.control_plane) == options["control_plane"].removeprefix("https://")
    assert settings.control_plane_trust is not None
    assert settings.control_plane_trust.server_name.endswith(f".{NAMESPACE}.svc")
    assert (settings.token_audience is None) == (name == "no-tokens")
    if name == "everything-set":
        assert (settings.image, settings.on_injection_failure) == ("images.example/envoy:v1.40.0", "ignore")
        assert settings.resources["limits"] == {"memory": "2Gi"}


def test_the_network_policy_is_on_and_lets_only_prometheus_read_the_status(rendered: dict[str, Objects]) -> None:
    spec = one(rendered["default"], "NetworkPolicy")["spec"]
    prometheus, anybody = spec["ingress"]
    assert prometheus["ports"] == [{"port": "http", "protocol": "TCP"}]
    labels = {"app.kubernetes.io/name": "prometheus"}
    assert prometheus["from"] == [{"namespaceSelector": {}, "podSelector": {"matchLabels": labels}}]
    assert anybody == {"ports": [{"port": "https", "protocol": "TCP"}]}
    assert not find(rendered["no-network-policy"], "NetworkPolicy")
