"""Opens the registry that settings name: a file, or nodes of tfchain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dmsg.errors import ConfigError, InvalidAddress
from dmsg.glue.websocket import WebSocketUrl
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.twins.blocks import BlockConfig
from dmsg.rmb.twins.chain import ChainRegistry
from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.rpc import read_hash
from dmsg.rmb.twins.substrate import Substrate
from dmsg.rmb.twins.table import SqliteRegistry
from dmsg.sansio.jitter import Jitter


def parse_nodes(urls: Sequence[str]) -> list[WebSocketUrl]:
    """The URLs of nodes; raises ``ConfigError``."""
    try:
        return [WebSocketUrl.parse(url) for url in urls]
    except InvalidAddress as error:
        raise ConfigError("substrate", str(error)) from None


def parse_genesis(text: str | None) -> bytes | None:
    """The hash of a chain's first block, ``0x`` and 64 hex digits; raises ``ConfigError``."""
    try:
        return None if text is None else bytes.fromhex(read_hash(text)[2:])
    except MalformedAnswer:
        raise ConfigError("genesis", "must be 0x and 64 hex digits") from None


def check_registry(path: str | None, urls: Sequence[str]) -> None:
    """Raise ``ConfigError`` unless there is either a file or nodes, and the nodes have URLs."""
    if not (path or urls):
        raise ConfigError("registry", "must be given, or substrate: where twins are looked up")
    if path and urls:
        raise ConfigError("registry", "cannot be given together with substrate")
    parse_nodes(urls)


def check_registry_file(path: str) -> None:
    """Raise ``ConfigError`` unless the file exists: in a new file no twin would exist."""
    try:
        os.stat(path)
    except FileNotFoundError:
        raise ConfigError("registry", f"{path}: there is no such file; dmsg rmb twin create makes one") from None
    except OSError as error:  # it may well exist, behind a directory that is closed to us
        raise ConfigError("registry", f"{path} cannot be used ({error.strerror})") from None


def open_registry(
    reactor: Any,
    path: str | None,
    urls: Sequence[str] = (),
    blocks: BlockConfig | None = None,
    *,
    genesis: bytes | None = None,
) -> ITwinRegistry:
    """The registry in the file ``path``, or on the nodes at ``urls`` (``wss://host``); raises ``ConfigError``.

    With ``blocks`` it also listens for new blocks from now on, as relays do, because they look up many twins. ``genesis`` is
    the hash of the first block of the only chain to sign for.
    """
    check_registry(path, urls)
    if path:
        return SqliteRegistry(path, reactor)
    substrate = Substrate(reactor, parse_nodes(urls))
    registry = ChainRegistry(reactor, substrate, Jitter(os.urandom).random, blocks=blocks, genesis=genesis)
    registry.start()
    return registry
