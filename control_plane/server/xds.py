"""Policy discovery: policies and a resource key -> the resources, and the hash of their content as the version.

The control plane speaks REST xDS v3 in JSON (Envoy docs, "xDS REST and gRPC protocol"). Envoy posts a discovery request
every few seconds, and expects 200 with resources, or 304. No response depends on state that is kept here: every replica
and every process gives the same response to the same request and the same policies.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from control_plane.policy.model import Policies, Policy
from control_plane.render.clusters import clusters
from control_plane.render.filter import FILTER_NAME, ManagedEnvoy, filter_config
from control_plane.render.listener import listeners
from control_plane.render.placement import DEFAULT_ADMIN, DEFAULT_LISTEN, DEFAULT_UPSTREAM, Placement
from control_plane.render.templates import Resource
from control_plane.server.bounded_cache import BoundedCache
from control_plane.server.discovery_request import MAX_REMEMBERED_BYTES, TYPE_URLS, DiscoveryClient, ResourceKey, shown
from control_plane.vllm import ROLES, Role

State = Literal["found", "not_modified", "not_found", "busy"]

RENDERINGS_PER_SECOND, RENDERINGS_AT_ONCE = 10.0, 50.0
"""How many resources may be rendered for what was not polled for before. Each takes up to 10 ms of the event loop, and
clients choose the addresses and the header that they send."""


def _extension_configs(policy: Policy, key: ResourceKey) -> list[Resource]:
    envoy = ManagedEnvoy(key.report_header)
    return [{"name": FILTER_NAME, "typed_config": filter_config(policy, key.role, envoy)}]


def _listeners(policy: Policy, key: ResourceKey) -> list[Resource]:
    return listeners(policy, _placement(key))


def _clusters(policy: Policy, key: ResourceKey) -> list[Resource]:
    return clusters(policy, _placement(key))


def _placement(key: ResourceKey) -> Placement:
    return Placement(
        key.role,
        key.listen or DEFAULT_LISTEN[key.role],
        key.upstream or DEFAULT_UPSTREAM[key.role],
        DEFAULT_ADMIN[key.role],
    )


_RESOURCES: Mapping[str, Callable[[Policy, ResourceKey], list[Resource]]] = {
    "extension_configs": _extension_configs,
    "listeners": _listeners,
    "clusters": _clusters,
}


@dataclass(frozen=True, slots=True)
class DiscoveryResponse:
    """A response: `body` is an encoded DiscoveryResponse if found, `reason` says why if not found."""

    state: State
    version: str = ""
    body: bytes = b""
    reason: str = ""
    policy: Policy | None = None
    """The policy that was rendered, if found."""


_BUSY = DiscoveryResponse(
    "busy", reason="Too many sidecars poll with addresses of their own at the same time. Poll again later."
)
_NOT_MODIFIED = DiscoveryResponse("not_modified")


class Snapshot:
    """The responses for one set of policies. Caches what it rendered, within bounds."""

    def __init__(self, policies: Policies) -> None:
        """Render each policy's filter for each role, so that a policy that cannot be rendered fails here, not later."""
        self.policies = policies
        self._responses: BoundedCache[ResourceKey, DiscoveryResponse] = BoundedCache(25_000, MAX_REMEMBERED_BYTES)
        self._rendered: BoundedCache[tuple[object, ...], DiscoveryResponse] = BoundedCache(500)
        self._renderings = RENDERINGS_AT_ONCE
        self._renderings_at = time.monotonic()
        for name, policy in policies.by_name.items():
            for role in ROLES:
                self.version(name, policy, role)

    def respond(self, client: DiscoveryClient, version: str) -> DiscoveryResponse:
        """Return the response for a client that has `version`."""
        current = self.current(client)
        return _NOT_MODIFIED if current.version == version and current.state == "found" else current

    def current(self, client: DiscoveryClient) -> DiscoveryResponse:
        """Return the response for a client that has no version yet."""
        if client.key is None:
            return DiscoveryResponse("not_found", reason=client.reason)
        return self._responses.get(client.key) or self._respond(client.key, client.size)

    def version(self, name: str, policy: Policy, role: Role) -> str:
        """Return the version of a policy's filter configuration, for a sidecar whose bootstrap has that policy."""
        return self._respond(_bootstrap_key(policy, name, role)).version

    def versions(self) -> list[str]:
        """Return the versions of everything that was rendered so far."""
        return [response.version for response in self._rendered.values()]

    def _respond(self, key: ResourceKey, size: int | None = None) -> DiscoveryResponse:
        """Respond to a client that takes `size` bytes; None: to nobody, and without a bound on renderings."""
        policy = self.policies.choose(dict(key.labels), key.policy_name)
        if policy is None:
            names = ", ".join(self.policies.by_name)
            response = DiscoveryResponse(
                "not_found",
                reason=f"node.metadata.policy: {shown(key.policy_name)} is not a known policy. Use one of: {names}.",
            )
        else:
            # The identity of the policy is enough, because the policies live as long as this snapshot.
            content = key.type_name, key.role, id(policy), key.listen, key.upstream, key.report_header, key.root_path
            rendered = self._rendered.get(content)
            if rendered is None:
                if size is not None and not self._may_render():
                    return _BUSY
                rendered = _render(key, policy.below(key.root_path))
                self._rendered.add(content, rendered)
            response = rendered
        self._responses.add(key, response, size or 0)
        return response

    def _may_render(self) -> bool:
        now = time.monotonic()
        refilled = self._renderings + (now - self._renderings_at) * RENDERINGS_PER_SECOND
        self._renderings, self._renderings_at = min(refilled, RENDERINGS_AT_ONCE), now
        if self._renderings < 1:
            return False
        self._renderings -= 1
        return True


def _bootstrap_key(policy: Policy, name: str, role: Role) -> ResourceKey:
    """Return the key of a sidecar whose bootstrap was rendered from this policy."""
    return ResourceKey("extension_configs", role, name, (), None, None, ManagedEnvoy.of(policy).report_header)


def _render(key: ResourceKey, policy: Policy) -> DiscoveryResponse:
    type_url = TYPE_URLS[key.type_name]
    resources = [{"@type": type_url, **resource} for resource in _RESOURCES[key.type_name](policy, key)]
    version = sha256(_json(resources)).hexdigest()[:16]
    body = _json({"version_info": version, "resources": resources, "type_url": type_url})
    return DiscoveryResponse("found", version, body, policy=policy)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
