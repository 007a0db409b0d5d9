"""The interface that an embedder of the Reliable Message Bus may implement itself: the look-up of twins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zope.interface import Interface

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dmsg.rmb.core.keys import TwinKey
    from dmsg.rmb.core.twin import Twin


class ITwinRegistry(Interface):
    """Who the twins are. Every method is ``async``.

    A temporary failure raises :class:`~dmsg.rmb.twins.errors.RegistryError`, from which callers may conclude nothing about
    the twin. Implementations have to cache: callers may ask for every envelope.
    """

    async def get(twin: int) -> Twin | None:
        """The ``Twin`` of this number, ``None`` if there is none."""

    async def find(account: bytes) -> int | None:
        """The number of the twin of an account (32 bytes), ``None`` if it has none."""

    async def update(key: TwinKey, relays: Iterable[str], pk: bytes | None) -> None:
        """Publish the relays (host names, perhaps with a port) and the encryption key of the twin whose account ``key`` is.

        Both replace the old values; if they equal these, nothing is written. Raises
        :class:`~dmsg.rmb.twins.errors.NoSuchAccount` if the account has no twin,
        :class:`~dmsg.rmb.core.errors.InvalidTwin` for values that the registry cannot hold.
        """

    async def close() -> None:
        """Close files and connections; no method may be called afterwards."""
