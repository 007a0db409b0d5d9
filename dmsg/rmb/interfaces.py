"""The seam an embedder of the Reliable Message Bus may replace: where twins are looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zope.interface import Interface

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dmsg.rmb.core.keys import TwinKey
    from dmsg.rmb.core.twin import Twin


class ITwinRegistry(Interface):
    """Who the twins are. Every method is ``async``.

    A failure that may pass is :class:`~dmsg.rmb.twins.errors.RegistryError`: the question is still open, and nothing may
    be concluded about the twin. Implementations cache: these may be asked for every envelope.
    """

    async def get(twin: int) -> Twin | None:
        """The ``Twin`` of this number, ``None`` if there is none."""

    async def find(account: bytes) -> int | None:
        """The number of the twin of an account (32 bytes), ``None`` if it has none."""

    async def update(key: TwinKey, relays: Iterable[str], pk: bytes | None) -> None:
        """Publish the relays (host names, perhaps with a port) and the encryption key of the twin whose account ``key`` is.

        Both replace what was there. Nothing is written when nothing differs. Raises
        :class:`~dmsg.rmb.twins.errors.NoSuchAccount` if the account has no twin,
        :class:`~dmsg.rmb.core.errors.InvalidTwin` for what the registry cannot hold.
        """

    async def close() -> None:
        """Let go of files and connections; nothing may be asked afterwards."""
