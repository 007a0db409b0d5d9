"""Proves to a discovery that a relay is at an address and has a key, by the beginning of a handshake (:ref:`spec-proofs`)."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectError, ConnectionRefusedError, TimeoutError
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.discovery.errors import ProofFailed
from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.glue import names
from dmsg.glue.connecting import client_endpoint, lacks_descriptor, quiet_factory
from dmsg.glue.shell import Shell
from dmsg.interfaces import IRelayProver
from dmsg.sansio.core import Core

#: Longest time of a proof in seconds, even if its user sets no timeout.
TIMEOUT_S: Final = 10.0


@implementer(IRelayProver)
class HandshakeProver(ABC):
    """Connects through ``reactor`` with a temporary key, and disconnects before it is admitted.

    A subclass for each protocol makes the cores. Only a core's first bytes are sent.
    """

    def __init__(self, reactor: Any, *, random: Random = os.urandom) -> None:
        self._reactor = reactor
        self._random = random
        # The last message of the handshake, which would make the prover a client, is never sent.
        self._key = SecretKey.generate(random)

    @abstractmethod
    def make_core(self, key: SecretKey, relay: PublicKey, now: float) -> Core:
        """The client's side of a handshake with ``relay``, with a timeout of :data:`TIMEOUT_S`."""

    @abstractmethod
    def is_proof(self, core: Core, events: Sequence[object]) -> bool:
        """Whether the relay has shown its key, after one read; ``events`` are the core's events so far."""

    def resolve(self, host: str) -> Deferred[list[str]]:
        """See :class:`~dmsg.interfaces.IRelayProver`."""
        return names.resolve(self._reactor, host)

    def prove(self, public_key: PublicKey, address: HostPort) -> Deferred[None]:
        """See :class:`~dmsg.interfaces.IRelayProver`."""
        proof = _Proof(self, self._reactor, self.make_core(self._key, public_key, self._reactor.seconds()))
        endpoint = client_endpoint(self._reactor, address, TIMEOUT_S)
        return proof.begin(endpoint.connect(quiet_factory(lambda: proof.shell)))


class _Proof:
    """One handshake, as the owner of its shell."""

    def __init__(self, prover: HandshakeProver, clock: Any, core: Core) -> None:
        self.shell = Shell(core, self, clock)
        self._prover = prover
        self._events: list[object] = []
        self._connecting: Deferred[Any] | None = None
        self._done: Deferred[None] = Deferred(self._cancel)

    def begin(self, connecting: Deferred[Any]) -> Deferred[None]:
        """Wait for the connection, then for the handshake."""
        self._connecting = connecting
        connecting.addCallbacks(self._connected, self._not_connected)
        return self._done

    def _connected(self, shell: object) -> None:
        self._connecting = None

    def _not_connected(self, failure: Failure) -> None:
        if self._connecting is None:
            return  # cancelled: endpoints have an error of their own for that
        self._connecting = None
        if lacks_descriptor(failure.value):
            self._fail("not_tried")
        elif failure.check(ConnectionRefusedError):
            self._fail("refused")
        elif failure.check(TimeoutError):
            self._fail("timeout")
        elif failure.check(ConnectError, OSError):
            self._fail("unreachable")
        elif not self._done.called:
            self._done.errback(failure)

    def _cancel(self, done: Deferred[None]) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        self.shell.fail(ProofFailed("timeout"))

    def _fail(self, reason: str) -> None:
        if not self._done.called:
            self._done.errback(ProofFailed(reason))

    # --- from the shell ----------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Keep the core's events until the read is over."""
        self._events += events

    def after_read(self, shell: Shell) -> None:
        """Disconnect once the relay has shown its key. Send nothing: the core's next bytes may finish the handshake."""
        if self._prover.is_proof(shell.core, self._events):
            shell.fail(DmsgError("proved"))
            if not self._done.called:
                self._done.callback(None)

    def flushed(self, shell: Shell) -> None:
        """Ignored."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """The proof is over: report a failure unless it has succeeded."""
        if isinstance(error, RemoteProtocolError):
            self._fail("timeout" if error.reason == "timeout" else "wrong_key")
        else:
            self._fail("closed")
