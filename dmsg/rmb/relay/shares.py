"""The room for envelopes on their way to other relays: the shares of senders and relays in it. Pure.

:ref:`spec-rmb-federation`. A sender and a relay may have half of it. Where something is full, the latest envelope of the one
that has most in it makes room for one that has less: of the relay with the most in the share of a sender, else of the sender
with the most. So a twin whose relay does not answer can ask another one as often as it likes: the answers that wait for
that relay keep no answer to others from being sent.
"""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.rmb.relay.lanes import Held, HeldOfSender, Outgoing


class Shares:
    """Room for ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held = Held()
        #: What counts for each relay.
        self.by_relay: dict[str, Held] = {}
        #: What senders have whose share was full, by relay: until half of it is free, because counting takes time.
        self._full: dict[int, HeldOfSender] = {}

    def add(self, outgoing: Outgoing, relay: str) -> None:
        """Count an envelope, for now for the share of ``relay``."""
        self.held.add(outgoing)
        self.charge(outgoing, relay)

    def remove(self, outgoing: Outgoing) -> None:
        """Count it no more."""
        self.held.remove(outgoing)
        self.charge(outgoing, "")
        source = outgoing.source
        if source in self._full and 4 * self.held.of(source) <= self._limit_bytes:
            del self._full[source]

    def charge(self, outgoing: Outgoing, relay: str) -> None:
        """Count the envelope to the share of ``relay`` from now on; "" is no relay."""
        if outgoing.charged == relay:
            return
        full = self._full.get(outgoing.source)
        if outgoing.charged:
            held = self.by_relay[outgoing.charged]
            held.remove(outgoing)
            if not held.used:
                del self.by_relay[outgoing.charged]
            if full is not None:
                full.remove(outgoing)
        outgoing.charged = relay
        if relay:
            self.by_relay.setdefault(relay, Held()).add(outgoing)
            if full is not None:
                full.add(outgoing)

    def room_for(self, source: int, relay: str, size: int) -> Iterator[Outgoing | None]:
        """The envelopes that make room for ``size`` bytes of ``source`` for ``relay``, or ``None`` if there is no room.

        Each has to be removed before the next one is asked for.
        """
        half = self._limit_bytes // 2
        while self.held.of(source) + size > half:
            surplus = self._of_sender(source).surplus(relay, size) if self.held.of(source) else None
            yield surplus
            if surplus is None:
                return
        for held, room in ((self.by_relay.get(relay), half), (self.held, self._limit_bytes)):
            if held is None:
                continue
            # A relay may have more than its half, because other relays did not answer. Its envelopes need not fail for that.
            most = max(room, held.used)
            while held.used + size > most:
                surplus = held.surplus(source, size)
                yield surplus
                if surplus is None:
                    return

    def _of_sender(self, source: int) -> HeldOfSender:
        found = self._full.get(source)
        if found is None:
            found = self._full[source] = HeldOfSender()
            for outgoing in self.held.all_of(source):
                found.add(outgoing)
        return found
