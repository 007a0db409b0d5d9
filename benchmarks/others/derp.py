"""Tailscale's relay, derper, over TLS, and a client for it in Go that is built on demand (``derp_client/``).

DERP carries packets of up to 64 KiB and drops packets if a receiver's queue of 32 is full; reliability is left to its users.
So there are two rates: with as many packets in flight as the queue holds, of which none is lost, and with as many as the
relay takes, of which only those that arrive count.
"""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.others import LeftOut, find, run, serve, version_of
from benchmarks.processes import Cast, Child, process_cpu_s
from dmsg.testing.process import free_port

_HOST: Final = "127.0.0.1"
_SOURCE: Final = Path(__file__).parent / "derp_client"
PACKET_BYTES: Final = 64 * 1024
#: Packets that a receiver's queue holds.
WINDOW: Final = 32


class Derper:
    """A relay on ``port``, and the means to connect to it. Raises ``LeftOut``."""

    def __init__(self, cast: Cast) -> None:
        derper, go = find("derper"), find("go")
        self.name = f"derper {version_of(derper, '--version')}"
        directory = Path(tempfile.mkdtemp(prefix="bench-derp-"))
        cast.close_at_end(lambda: shutil.rmtree(directory, ignore_errors=True))
        self._client = _build(go, directory)
        self._certificate = _make_certificate(directory)
        self.port = free_port()
        command = (derper, "-a", f"{_HOST}:{self.port}", "-c", str(directory / "key.json"), "-http-port", "-1")
        command += ("-stun=false", "-certmode", "manual", "-certdir", str(directory), "-hostname", _HOST)
        self._process = serve(cast, command, self.port)
        self._cast = cast

    def client(self, port: int = 0) -> Child:
        """A client that connects to ``port``: the relay's own, or one that leads there."""
        url = f"https://{_HOST}:{port or self.port}/derp"
        return self._cast.start("derp", command=(str(self._client),), url=url, certificate=str(self._certificate))

    def cpu_s(self) -> float:
        """CPU seconds of the relay so far."""
        return process_cpu_s(self._process.pid)


def push(source: Child, sink: Child, total: int, window: int, limit_s: float) -> tuple[float, float]:
    """Send ``total`` bytes with ``window`` packets in flight (0: any number); MB/s that arrived, and the share lost."""
    count = max(1, total // PACKET_BYTES)
    order: dict[str, Any] = {"target": sink.facts["key"], "size": PACKET_BYTES, "total": count * PACKET_BYTES}
    result = source.ask("push", window=window, timeout_s=limit_s, **order)
    received = result["received_bytes"]
    return received / result["elapsed_s"] / 1e6, 1 - received / order["total"]


def _build(go: str, directory: Path) -> Path:
    source, program = directory / "source", directory / "derp_client"
    shutil.copytree(_SOURCE, source)
    run((go, "mod", "tidy"), directory=source)
    run((go, "build", "-o", str(program), "."), directory=source)
    if not program.exists():
        raise LeftOut("go has built no client of derper")
    return program


def _make_certificate(directory: Path) -> Path:
    """A certificate for the address, where derper looks for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _HOST)])
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(_HOST))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = directory / f"{_HOST}.crt"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / f"{_HOST}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path
