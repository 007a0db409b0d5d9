"""A relay or a peer of the Reliable Message Bus exactly as ``twistd`` runs it: settings, event log on disk, clean stop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.processes import raise_open_files
from dmsg.ops.gc import settle_memory

USES_TWISTED = True


class Role:
    """Options: ``serve`` (``relay`` or ``peer``), ``limits`` (fields of RelayLimits), and the settings of the role.

    ``paths`` names those settings that are paths.
    """

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        raise_open_files()
        self._reactor = reactor
        self._serve = options.pop("serve")
        self._limits = options.pop("limits", {})
        self._settings: dict[str, Any] = {
            name: Path(value) if name in options["paths"] else tuple(value) if isinstance(value, list) else value
            for name, value in options.items()
            if name != "paths"
        }
        self.service: Any = None

    async def start(self) -> dict[str, Any]:
        """Serve."""
        from dmsg.taps.settings import PostScheme, RmbPeerSettings, RmbRelaySettings

        if self._serve == "relay":
            from dmsg.taps.rmb_relay import RmbRelayService

            settings = RmbRelaySettings(federation_scheme=PostScheme.HTTP, **self._settings)
            settings = dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, **self._limits))
            self.service = RmbRelayService(self._reactor, settings)
        else:
            from dmsg.taps.rmb_peer import RmbPeerService

            self.service = RmbPeerService(self._reactor, RmbPeerSettings(**self._settings))
        self.service.privilegedStartService()
        self.service.startService()
        settle_memory()
        return {}

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``ready``: empty, or why it is not ready; ``gauges``: the relay's; ``stop``: end as TERM ends it."""
        if command == "ready":
            return {"why": self.service.readiness()}
        if command == "gauges":
            return dict(self.service.gauges())
        if command == "stop":
            await self.service.stopService()
            return {}
        raise ValueError(command)
