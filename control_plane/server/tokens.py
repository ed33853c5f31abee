"""Who may poll, and who may read the status: bearer tokens, from a file or reviewed by Kubernetes."""

import asyncio
import base64
import hmac
import math
import time
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Protocol

from control_plane import strict_json
from control_plane.errors import InvalidField
from control_plane.kubernetes_api import FAILURES, ApiAccess, reason
from control_plane.server.bounded_cache import BoundedCache

MIN_TOKEN_LENGTH = 16
MAX_TOKEN_BYTES = 16 * 1024
"""Longer than any token of a service account."""
_TIMEOUT_SECONDS = 2
MAX_WAITING = 64
"""Tokens that may wait for a review at the same time. Further ones get 503, and are sent again with the next poll."""


class Verdict(NamedTuple):
    """What became of a request, by its token. `status` is that of the response: 200, 401, 403 or 503."""

    status: int
    detail: str = ""
    node_id: str | None = None
    """The only node id that this token may poll as. None, for a token of a file: any."""


ACCEPTED = Verdict(200)


class TokenCheck(Protocol):
    """Decides about bearer tokens."""

    async def check(self, token: str) -> Verdict:
        """Return the verdict on a token. The empty string stands for a request without one."""
        ...


class TokenFile:
    """Tokens in a file, one a line. All of them are accepted, so that a token can be replaced without a gap.

    Sidecars send the first line of their own file.
    """

    def __init__(self, path: Path, field: str) -> None:
        """Read the file. InvalidField, which names `field`, if it has no token that is long enough."""
        self.path = path
        self.problem: str | None = None
        self._field = field
        self._tokens = self._read()

    def reload(self) -> None:
        """Read the file again. A file that is not valid changes nothing but `problem`."""
        try:
            self._tokens = self._read()
            self.problem = None
        except InvalidField as error:
            self.problem = error.problem

    async def check(self, token: str) -> Verdict:
        """Return the verdict on a token, in a time that does not depend on how much of it is right."""
        digest = sha256(token.encode("latin-1", "replace")).digest()
        found = [hmac.compare_digest(digest, known) for known in self._tokens]
        return ACCEPTED if any(found) else Verdict(401, "The token is missing or not valid.")

    def _read(self) -> list[bytes]:
        try:
            lines = self.path.read_text(encoding="ascii").splitlines()
        except OSError as error:
            raise InvalidField(self._field, f"{self.path}: cannot be read: {error.strerror}.") from None
        except ValueError:
            lines = [""]
        tokens = [line.strip() for line in lines if line.strip()]
        if not tokens or any(len(token) < MIN_TOKEN_LENGTH or not token.isprintable() for token in tokens):
            raise InvalidField(
                self._field,
                f"{self.path}: not a token file. Use one token a line, each of {MIN_TOKEN_LENGTH} or"
                " more ASCII characters, for example from: openssl rand -hex 32",
            )
        return [sha256(token.encode()).digest() for token in tokens]


class ReviewedTokens:
    """Tokens of service accounts with an audience of their own, which the Kubernetes API reviews (TokenReview).

    `problem` is the reason why the last review failed, or None. An accepted token is not reviewed again for
    `cache_seconds`, so sidecars that are known go on polling while the API server is away.
    """

    def __init__(self, api: ApiAccess, audience: str, cache_seconds: float = 300.0) -> None:
        self.problem: str | None = None
        self.connected = False
        """Whether the API server has reviewed a token yet."""
        self._client = api.client(_TIMEOUT_SECONDS)
        self._audience = audience
        self._cache_seconds = cache_seconds
        self._accepted: BoundedCache[bytes, tuple[float, Verdict]] = BoundedCache(25_000)
        self._rejected: BoundedCache[bytes, tuple[float, Verdict]] = BoundedCache(1_000)
        self._reviews = asyncio.Semaphore(8)
        self._waiting = 0

    async def check(self, token: str) -> Verdict:
        """Return the verdict on a token."""
        key = sha256(token.encode("latin-1", "replace")).digest()
        now = time.time()
        for cache in (self._accepted, self._rejected):
            until, verdict = cache.get(key, (0.0, ACCEPTED))
            if now < until:
                return verdict
        expires = _expiry(token, self._audience)
        if expires <= now:
            # The API server would reject it too. It is not asked, so that nobody can make it review what is no token.
            return Verdict(401, f"The token is missing, has expired, or is not for the audience {self._audience}.")
        if self._waiting >= MAX_WAITING:
            return Verdict(503, "Too many tokens wait for their review. Poll again later.")
        self._waiting += 1
        try:
            async with self._reviews:
                verdict = await self._review(token)
        finally:
            self._waiting -= 1
        if verdict.status == 200:
            self._accepted.add(key, (min(now + self._cache_seconds, expires), verdict))
        elif verdict.status == 401:
            self._rejected.add(key, (now + 10.0, verdict))
        return verdict

    async def connect(self) -> bool:
        """Have a text reviewed that is no token, and return whether the API server did that."""
        return (await self._review("none")).status == 401

    async def close(self) -> None:
        """Close the connections to the API server."""
        await self._client.aclose()

    async def _review(self, token: str) -> Verdict:
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self._audience]},
        }
        try:
            response = await self._client.post("/apis/authentication.k8s.io/v1/tokenreviews", json=review)
            response.raise_for_status()
            status = strict_json.loads(response.content)["status"]
            authenticated = status.get("authenticated") is True and self._audience in (status.get("audiences") or ())
            user = status.get("user") or {}
            pods = (user.get("extra") or {}).get("authentication.kubernetes.io/pod-name") or []
            names = str(user.get("username", "")).split(":")
        except (*FAILURES, AttributeError) as error:
            self.problem = f"Tokens of sidecars cannot be reviewed: {reason(error)}"
            return Verdict(503, "The token cannot be reviewed at present. Poll again later.")
        self.problem, self.connected = None, True
        if not authenticated:
            return Verdict(401, "The API server rejected the token.")
        # The name is system:serviceaccount:NAMESPACE:NAME, and an injected sidecar's node id is NAMESPACE/POD.
        if len(names) != 4 or len(pods) != 1:
            # Such a token, for example of `kubectl create token`, could poll as any sidecar, and outlives its pod.
            return Verdict(401, "The token is not bound to a pod. Use a projected service account token.")
        return Verdict(200, node_id=f"{names[2]}/{pods[0]}")


def _expiry(token: str, audience: str) -> float:
    """When the token says that it ends, in seconds since the epoch; 0 if it is not one for this audience.

    Nothing is verified here.
    """
    parts = token.split(".")
    if len(parts) != 3 or len(token) > MAX_TOKEN_BYTES:
        return 0.0
    try:
        claims = strict_json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        audiences = claims["aud"]
        if audience not in ([audiences] if isinstance(audiences, str) else audiences):
            return 0.0
        expires = float(claims["exp"])
        return expires if math.isfinite(expires) else 0.0  # A text such as "nan" is a float, too.
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return 0.0


def bearer(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the bearer token of a request (RFC 6750), or the empty string."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
    return ""
