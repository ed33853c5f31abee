"""Tokens for tests, and the keys that sign them."""

import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://issuer.test"


class Issuer:
    """An issuer with a key pair; `jwks` is its public set of keys."""

    def __init__(self, kind: str = "RS256", name: str = ISSUER) -> None:
        self.kind, self.name = kind, name
        self.key: Any
        if kind == "RS256":
            self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        elif kind == "ES256":
            self.key = ec.generate_private_key(ec.SECP256R1())
        else:
            self.key = ed25519.Ed25519PrivateKey.generate()
        algorithm: Any = jwt.get_algorithm_by_name(kind)
        public = algorithm.to_jwk(self.key.public_key(), as_dict=True)
        self.jwks = {"keys": [{**public, "kid": "one", "alg": kind}]}

    @property
    def keys(self) -> str:
        """The set of keys as YAML on one line."""
        return json.dumps(self.jwks)

    def token(self, *, without: tuple[str, ...] = (), **claims: Any) -> str:
        """A token that is valid for an hour, with these claims besides."""
        content = {"iss": self.name, "aud": "vllm", "exp": int(time.time()) + 3600, "scope": "priority", **claims}
        for name in without:
            del content[name]
        return jwt.encode(content, self.key, self.kind, headers={"kid": "one"})
