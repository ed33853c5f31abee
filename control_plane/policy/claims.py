"""Clients that are trusted by a token: a JSON Web Token (RFC 7519) that an issuer has signed."""

import base64
import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import BeforeValidator, Field, StringConstraints, ValidationInfo

from control_plane.policy.fields import HeaderName, PolicyModel


class NamedFiles:
    """The files that a policy names, relative to the policy's own folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths: list[Path] = []

    def named(self, text: str) -> Path:
        """Return the path of a file that the policy names."""
        path = self._folder / text
        if path not in self.paths:
            self.paths.append(path)
        return path


ClaimName = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$")]
ClaimValue = Annotated[str, StringConstraints(pattern=r"^[ -~]{1,512}$")]
_Text = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,512}$")]

SPACE_SEPARATED = frozenset({"scope", "scp"})
"""Claims that hold several values in one string (RFC 8693, 4.2)."""

_MAX_FILE_BYTES = 256 * 1024
_KEY = "trust.claims.jwks"
_USE = "Use an https:// URI, a file in JSON, or the keys themselves: {keys: [...]}."
_MEMBERS: Mapping[str, tuple[str, ...]] = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
"""The types of public keys, and the members that each must have (RFC 7518, 6; RFC 8037, 2)."""

_CURVES: Mapping[str, tuple[ec.EllipticCurve, str]] = {
    "P-256": (ec.SECP256R1(), "ES256"),
    "P-384": (ec.SECP384R1(), "ES384"),
    "P-521": (ec.SECP521R1(), "ES512"),
}
_RSA_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")


def _jwks(value: Any, info: ValidationInfo) -> str | dict[str, Any]:
    """Return a URI, or the keys. A file is read here, so that every sidecar of the policy gets its keys."""
    if isinstance(value, str) and "://" in value:
        return _uri(value)
    if isinstance(value, str):
        value = _file(value, info)
    if not isinstance(value, dict) or not isinstance(value.get("keys"), list) or not value["keys"]:
        raise ValueError(f"{_KEY}: not a set of keys. {_USE}")
    for index, key in enumerate(value["keys"]):
        _check_key(f"{_KEY}.keys[{index}]", key)
    return {"keys": value["keys"]}


def _uri(text: str) -> str:
    try:
        parts = urlsplit(text)
        valid = parts.scheme == "https" and parts.hostname and parts.port != 0 and not parts.username
    except ValueError:
        valid = False
    if not valid or len(text) > 512 or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{_KEY}: '{text[:60]}' is not a valid https:// URI. {_USE}")
    return text


def _read(path: str, text: str, info: ValidationInfo, use: str) -> bytes:
    """Return what is in a file that the policy names, and note that it was read."""
    files: NamedFiles | None = (info.context or {}).get("files")
    if files is None:
        raise ValueError(f"{path}: '{text[:60]}' is a file, which only a policy from a file can name. {use}")
    try:
        with files.named(text).open("rb") as file:
            read = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: '{text[:60]}' cannot be read: {error.strerror}. {use}") from None
    except ValueError:  # a NUL, which no path has
        raise ValueError(f"{path}: not a valid path. {use}") from None
    if len(read) > _MAX_FILE_BYTES:
        raise ValueError(f"{path}: '{text[:60]}' is larger than {_MAX_FILE_BYTES} bytes. {use}")
    return read


def _file(text: str, info: ValidationInfo) -> Any:
    try:
        return json.loads(_read(_KEY, text, info, _USE))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"{_KEY}: '{text[:60]}' is not a file in JSON. {_USE}") from None


def _ca(value: Any, info: ValidationInfo) -> str | None:
    """Return the certificates of a CA in PEM. A file is read here."""
    path, use = "trust.claims.jwks_ca", "Use a file in PEM format, or its text."
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{path}: not a text. {use}")
    pem = value.encode() if "-----BEGIN" in value else _read(path, value, info, use)
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ValueError(f"{path}: not a certificate in PEM format. {use}") from None
    # Only the certificates: a file may contain comments, and it must not contain a key.
    return "".join(certificate.public_bytes(Encoding.PEM).decode() for certificate in certificates)


def _check_key(path: str, key: Any) -> None:
    kind = key.get("kty") if isinstance(key, dict) else None
    members = _MEMBERS.get(kind) if isinstance(kind, str) else None
    if members is None:
        raise ValueError(f"{path}: not a public key. Use keys whose kty is RSA, EC or OKP.")
    if "d" in key:
        raise ValueError(f"{path}: a private key. Use the public one, and replace the pair if this file was published.")
    missing = [member for member in members if not isinstance(key.get(member), str)]
    if missing:
        raise ValueError(f"{path}: {missing[0]} is missing. A key of kty {kind} needs {', '.join(members)}.")
    # Envoy does not start with a key that it cannot use.
    algorithms = _algorithms(path, key)
    if key.get("alg", algorithms[0]) not in algorithms:
        raise ValueError(f"{path}.alg: not an algorithm of this key. It must be one of: {', '.join(algorithms)}.")


def _algorithms(path: str, key: Mapping[str, str]) -> tuple[str, ...]:
    """Return the algorithms of a public key (RFC 7518, 3.1; RFC 8037, 3.1). The first one is the default."""
    try:
        if key["kty"] == "RSA":
            size = rsa.RSAPublicNumbers(_integer(key["e"]), _integer(key["n"])).public_key().key_size
            if size < 2048:
                raise ValueError(f"{size} bits")
            return _RSA_ALGORITHMS
        if key["kty"] == "EC" and key["crv"] in _CURVES:
            curve, algorithm = _CURVES[key["crv"]]
            ec.EllipticCurvePublicNumbers(_integer(key["x"]), _integer(key["y"]), curve).public_key()
            return (algorithm,)
        if key["kty"] == "OKP" and key["crv"] == "Ed25519":
            ed25519.Ed25519PublicKey.from_public_bytes(_bytes(key["x"]))
            return ("EdDSA",)
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError(f"{path}: not a valid key of kty {key['kty']}, or RSA with less than 2048 bits.") from None
    raise ValueError(f"{path}.crv: not a supported curve. It must be one of: {', '.join(_CURVES)} or Ed25519.")


def _bytes(text: str) -> bytes:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,4096}", text):
        raise ValueError("not base64url")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _integer(text: str) -> int:
    return int.from_bytes(_bytes(text))


class Claims(PolicyModel):
    """A token that a trusted client sends. Envoy verifies it."""

    issuer: _Text = Field(description="Issuer of the tokens: their claim iss.")
    audiences: Annotated[tuple[_Text, ...], Field(strict=False)] = Field(
        default=(), description="Audiences, one of which a token must name in its claim aud. Empty: aud is not checked."
    )
    jwks: Annotated[str | dict[str, Any], BeforeValidator(_jwks)] = Field(
        description="The issuer's public keys, a JSON Web Key Set: an https:// URI, a file, which is read with the "
        "policy, or the keys themselves."
    )
    jwks_ca: Annotated[str | None, BeforeValidator(_ca)] = Field(
        default=None,
        description="The CA of the server in the URI of `jwks`, in PEM: a file, which is read with the policy, or its "
        "text. null: /etc/ssl/certs/ca-certificates.crt in the sidecar.",
    )
    header: HeaderName = Field(
        default="authorization",
        description="Request header of the token. In authorization it comes after Bearer, in another one alone.",
    )
    require: Mapping[ClaimName, ClaimValue] = Field(
        default={},
        description="Claims that the token must have, all of them: a string, a list with this member, or in scope and "
        "scp a word. Empty: every valid token is trusted.",
    )

    @property
    def verifier(self) -> str:
        """What Envoy verifies by, as a short text: equal texts verify the same tokens."""
        parts = [self.issuer, self.audiences, self.jwks, self.jwks_ca, self.header]
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def check_claims(claims: Claims) -> None:
    """Reject requirements that no valid token meets. The message of the ValueError starts with the key's path."""
    if claims.jwks_ca is not None and not isinstance(claims.jwks, str):
        raise ValueError("trust.claims.jwks_ca: has no effect without an https:// URI in jwks. Remove it.")
    for name, value in claims.require.items():
        path = f"trust.claims.require.{name}"
        if name in ("exp", "nbf", "iat"):
            raise ValueError(f"{path}: this claim is a number, which never matches a text. Remove it.")
        if name == "iss" and value != claims.issuer:
            raise ValueError(f"{path}: '{value}' is not the issuer, so no token matches. Remove it.")
        if name == "aud" and claims.audiences and value not in claims.audiences:
            raise ValueError(f"{path}: '{value}' is not one of the audiences, so no token may match. Add it there.")
        if name in SPACE_SEPARATED and " " in value:
            raise ValueError(f"{path}: '{value}' has a space, which separates values of this claim. Use one value.")
