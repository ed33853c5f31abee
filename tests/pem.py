"""Certificates for tests."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


def write_pair(folder: Path, name: str = "one", days: float = 30, password: bytes | None = None) -> tuple[Path, Path]:
    """A self-signed certificate for `name` that ends in `days` days, as tls.crt and tls.key."""
    key = ec.generate_private_key(ec.SECP256R1())
    cert = _builder(name, key, _name(name), days).sign(key, hashes.SHA256())
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return _write(folder, cert.public_bytes(_PEM), key, encryption)


class Authority:
    """A CA. `pem` is its certificate."""

    def __init__(self, name: str = "ca") -> None:
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.pem = (
            _builder(name, self._key, self._name, 30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
            .public_bytes(_PEM)
            .decode()
        )

    def write(self, folder: Path, *names: str, days: float = 20) -> tuple[Path, Path]:
        """A certificate for DNS names, IP addresses and URIs, signed by this CA, as tls.crt and tls.key in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        cert = _builder("leaf", key, self._name, days).add_extension(alternatives, critical=False)
        return _write(folder, cert.sign(self._key, hashes.SHA256()).public_bytes(_PEM), key)

    def write_ca(self, path: Path) -> Path:
        """The CA's certificate as a file."""
        path.write_text(self.pem)
        return path


def _alternative(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + timedelta(days=days))
    )


def _write(
    folder: Path,
    cert: bytes,
    key: ec.EllipticCurvePrivateKey,
    encryption: serialization.KeySerializationEncryption | None = None,
) -> tuple[Path, Path]:
    """Both files are replaced by a rename, so that no reader sees half of one."""
    private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, encryption or serialization.NoEncryption())
    for name, content in (("tls.key", private), ("tls.crt", cert)):
        (folder / f"{name}.new").write_bytes(content)
        (folder / f"{name}.new").rename(folder / name)
    return folder / "tls.crt", folder / "tls.key"
