"""A relay or a discovery exactly as ``twistd`` runs it: settings, event log on disk, metrics, admin site, clean stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.processes import raise_open_files
from dmsg.address import HostPort
from dmsg.crypto.keys import read_key_file

USES_TWISTED = True


class Role:
    """Options: ``serve`` (``relay`` or ``discovery``), ``port``, ``admin`` (a port), ``events`` (a directory); a relay's
    ``key_file`` and ``discovery`` (a URL); a discovery's ``store``.
    """

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        raise_open_files()
        self._options = options
        self._reactor = reactor
        self.service: Any = None

    async def start(self) -> dict[str, Any]:
        """Serve."""
        options = self._options
        common: dict[str, Any] = {
            "listen": f"tcp:{options['port']}:interface=127.0.0.1",
            "admin": f"tcp:{options['admin']}:interface=127.0.0.1",
            "events": options["events"],
            "events_limit": 64 * 1024 * 1024,
        }
        if options["serve"] == "relay":
            from dmsg.taps.server import RelayService
            from dmsg.taps.settings import ServerSettings

            key_file = Path(options["key_file"])
            self.service = RelayService(
                self._reactor,
                ServerSettings(
                    key=key_file,
                    public_address=HostPort("127.0.0.1", options["port"]),
                    discovery=options["discovery"],
                    drain_timeout=1.0,
                    **common,
                ),
            )
            facts = {"key": str(read_key_file(key_file).public_key), "port": options["port"]}
        else:
            from dmsg.taps.discovery import DiscoveryService
            from dmsg.taps.settings import DiscoverySettings

            self.service = DiscoveryService(self._reactor, DiscoverySettings(store=options["store"], **common))
            facts = {"url": f"http://127.0.0.1:{options['port']}"}
        self.service.privilegedStartService()
        self.service.startService()
        return facts

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``stop``: end as TERM ends it."""
        assert command == "stop"
        await self.service.stopService()
        return {}
