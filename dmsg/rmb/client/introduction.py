"""Finding our own twin in the registry, and publishing its relays and key there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.rmb.client.errors import NoTwin
from dmsg.rmb.core.keys import TwinKey
from dmsg.rmb.core.twin import Twin, format_relays, parse_relays
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.twins.errors import RegistryError
from dmsg.sansio.backoff import Backoff

_log = Logger()
#: The pauses after a failed look-up or update, in seconds.
_PAUSES: Final = Backoff(1.0, 30.0)


class Introduction:
    """Asks the registry, and retries with growing pauses while that fails.

    ``hosts`` are the relays to be published. If there are none, the relays in the registry stay; if it has none either,
    ``places`` are published. ``public_key`` is the encryption key to be published.
    """

    def __init__(
        self,
        clock: Any,
        key: TwinKey,
        registry: ITwinRegistry,
        public_key: bytes,
        *,
        hosts: Sequence[str],
        places: Sequence[str],
        uniform: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._key = key
        self._registry = registry
        self._public_key = public_key
        self._hosts = parse_relays(format_relays(hosts))
        self._places = places
        self._uniform = uniform
        #: Why the registry has not done what was asked last, for people and as :attr:`RegistryError.reason`; "" if it has, or
        #: nothing has failed yet.
        self.problem = self.reason = ""

    async def find(self) -> Twin:
        """Our twin; raises :class:`~dmsg.rmb.client.errors.NoTwin` if the registry has none with our key."""
        failures = 0
        while True:
            try:
                number = await self._registry.find(self._key.account)
                twin = await self._registry.get(number) if number is not None else None
            except RegistryError as error:
                failures += 1
                await self._rest("our twin is not known yet: {error}", error, failures)
            else:
                if twin is None:
                    raise NoTwin
                self.problem = self.reason = ""
                return twin

    async def publish(self, twin: Twin) -> None:
        """Publish the relays and key of ``twin``, ours; returns when the registry has them.

        Raises the permanent errors of :meth:`~dmsg.rmb.interfaces.ITwinRegistry.update`.
        """
        hosts = self._hosts or twin.relays or parse_relays("_".join(self._places))
        failures = 0
        while True:
            try:
                await self._registry.update(self._key, hosts, self._public_key)
            except RegistryError as error:
                failures += 1
                await self._rest("our twin is not published yet: {error}", error, failures)
            else:
                self.problem = self.reason = ""
                return

    async def _rest(self, text: str, error: RegistryError, failures: int) -> None:
        problem = str(error)
        if failures == 1 or problem != self.problem:  # log a problem once, because a registry may be away for days
            self.problem, self.reason = problem, error.reason
            _log.warn(text, error=error)
        await deferLater(self._clock, _PAUSES.pause_s(failures, self._uniform))
