"""rathole, a tunnel for TCP services: its server replaces our relay and ``dmsg forward``, its client
``dmsg expose``. Between the two it uses Noise, as ours does.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from pathlib import Path

from benchmarks.others import LeftOut, find, run, serve, version_of
from benchmarks.processes import Cast, process_cpu_s
from dmsg.testing.process import free_port


class Rathole:
    """A server and a client that carry ``services`` (ports by name); ``ports`` are their local ports.

    Raises ``LeftOut``.
    """

    def __init__(self, cast: Cast, services: dict[str, int]) -> None:
        rathole = find("rathole")
        self.name = f"rathole {version_of(rathole, '--version')}"
        directory = Path(tempfile.mkdtemp(prefix="bench-rathole-"))
        cast.close_at_end(lambda: shutil.rmtree(directory, ignore_errors=True))
        keys = re.findall(r"^[A-Za-z0-9+/]{43}=$", run((rathole, "--genkey")), re.MULTILINE)
        if len(keys) != 2:
            raise LeftOut("rathole makes no keys")
        private, public = keys
        self.ports = {name: free_port() for name in services}
        port, token = free_port(), secrets.token_hex(16)
        server = _noise("server", f'bind_addr = "127.0.0.1:{port}"', token, f'local_private_key = "{private}"')
        client = _noise("client", f'remote_addr = "127.0.0.1:{port}"', token, f'remote_public_key = "{public}"')
        for name, target in services.items():
            server += f'[server.services.{name}]\nbind_addr = "127.0.0.1:{self.ports[name]}"\n'
            client += f'[client.services.{name}]\nlocal_addr = "127.0.0.1:{target}"\n'
        self._processes = []
        # The server listens for a service once the client has announced it.
        for role, text, opens in (("server", server, port), ("client", client, max(self.ports.values()))):
            path = directory / f"{role}.toml"
            path.write_text(text)
            self._processes.append(serve(cast, (rathole, f"--{role}", str(path)), opens))

    def cpu_s(self) -> float:
        """CPU seconds of both so far."""
        return sum(process_cpu_s(process.pid) for process in self._processes)


def _noise(role: str, address: str, token: str, key: str) -> str:
    transport = f'[{role}.transport]\ntype = "noise"\n[{role}.transport.noise]\n{key}\n'
    return f'[{role}]\n{address}\ndefault_token = "{token}"\n{transport}'
