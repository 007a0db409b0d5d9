"""Every core keeps the contract the shell relies on."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from dmsg.mux.core.connection import Connection
from dmsg.mux.core.handshake import Handshake
from dmsg.mux.relay.member import Member
from dmsg.sansio.core import Core

METHODS = [name for name, value in vars(Core).items() if inspect.isfunction(value) and not name.startswith("_")]

PURE = [
    "dmsg.errors",
    "dmsg.address",
    "dmsg.crypto.keys",
    "dmsg.crypto.noise",
    "dmsg.sansio.buffer",
    "dmsg.sansio.core",
    "dmsg.sansio.rate",
    "dmsg.mux.core.window",
    "dmsg.mux.core.wire",
    "dmsg.mux.core.tlv",
    "dmsg.mux.core.record",
    "dmsg.mux.core.handshake",
    "dmsg.mux.core.events",
    "dmsg.mux.core.stream",
    "dmsg.mux.core.connection",
    "dmsg.mux.relay.member",
    "dmsg.mux.relay.switch",
    "dmsg.mux.relay.events",
]


def test_the_contract_has_four_methods() -> None:
    assert set(METHODS) == {"receive_data", "data_to_send", "next_timeout", "handle_timeout"}


@pytest.mark.parametrize("core", [Handshake, Connection, Member])
@pytest.mark.parametrize("name", METHODS)
def test_cores_have_the_methods_of_the_contract(core: type, name: str) -> None:
    wanted = list(inspect.signature(getattr(Core, name)).parameters)
    assert list(inspect.signature(getattr(core, name)).parameters) == wanted


def test_cores_work_where_there_is_no_twisted() -> None:
    program = f"""
import sys
for name in ("twisted", "zope", "klein", "treq"):
    sys.modules[name] = None
import importlib
for name in {PURE!r}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=25)
