"""Errors carry their data in attributes, and each slice has its own in one module."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Iterator
from copy import copy, deepcopy
from typing import Any

import pytest

import dmsg
from dmsg.crypto.errors import KeyFileError
from dmsg.endpoints.stream import DmsgConnectError
from dmsg.errors import Attempt, ConfigError, DialError, DmsgError, RemoteProtocolError, StageError
from dmsg.glue.stream_transport import TransportLost
from dmsg.relays.errors import SessionTimeout
from dmsg.rmb.client.errors import CallRefused, CallTimeout, NotConnected
from dmsg.rmb.core.address import SessionAddress


def subclasses(cls: type) -> Iterator[type]:
    for one in cls.__subclasses__():
        yield one
        yield from subclasses(one)


def test_every_error_of_the_package_stands_in_a_module_of_errors() -> None:
    for module in pkgutil.walk_packages(dmsg.__path__, "dmsg."):
        importlib.import_module(module.name)
    found = {error for error in subclasses(DmsgError) if error.__module__.startswith("dmsg.")}
    assert len(found) > 50
    assert all(error.__doc__ for error in found)
    strays = {error.__name__ for error in found if error.__module__.rpartition(".")[2] != "errors"}
    commands = {error.__name__ for error in found if error.__module__.startswith("dmsg.cli.")}
    assert strays == {"DmsgConnectError"} | commands, (
        "that one is a Twisted error, too; those of commands have exit codes"
    )


@pytest.mark.parametrize(
    ("error", "text", "attributes"),
    [
        (KeyFileError("/key", "missing"), "/key: missing", {"path": "/key", "problem": "missing"}),
        (ConfigError("port", "too big"), "port: too big", {"option": "port", "source": ""}),
        (ConfigError("port", "too big", "x.toml"), "port: too big (in x.toml)", {"source": "x.toml"}),
        (RemoteProtocolError("frame", "bad"), "frame: bad", {"stage": "frame", "reason": "bad"}),
        (StageError("connect", "refused"), "connect: refused", {"stage": "connect", "error": None}),
        (SessionTimeout("connect", 2.5), "connect took longer than 2.5 s", {"timeout_s": 2.5}),
        (SessionTimeout("dial", 9.99998), "dial took longer than 10 s", {"timeout_s": 9.99998}),
    ],
)
def test_data_is_in_attributes(error: Exception, text: str, attributes: dict[str, Any]) -> None:
    assert str(error) == text
    assert {name: getattr(error, name) for name in attributes} == attributes


CALLED = SessionAddress(7, "work")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("port", "too big", "x.toml"),
        StageError("connect", "refused"),
        TransportLost(SessionTimeout("connect", 2.5)),
        DmsgConnectError(DialError("02ff", [Attempt("connect", "02", 1.0, "refused", ConnectionRefusedError("no"))])),
        CallTimeout(CALLED, 1.5, ("wss://a.example",), ()),
        NotConnected(CALLED, {"wss://a.example": "silent"}),
        CallRefused(CALLED, 7, "no", CALLED),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reaches_another_process_whole(error: Any) -> None:
    """As those of a program that runs in a pool of processes do."""
    for again in (pickle.loads(pickle.dumps(error)), copy(error), deepcopy(error)):
        assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
        assert {name: str(value) for name, value in vars(again).items()} == {
            name: str(value) for name, value in vars(error).items()
        }


def test_a_failed_dial_tells_everything_that_was_tried() -> None:
    cause = ConnectionRefusedError("Connection refused")
    attempts = [
        Attempt("discovery", "", 1.0, "not found"),
        Attempt("connect", "02" * 33, 12.3456, "refused", cause),
        Attempt("handshake", "03" * 33, 20.0, "timeout", StageError("handshake", "timeout")),
        Attempt("connect", "02" * 33, 30.0, "Connection refused", cause),
        Attempt("accept", "02" * 33, 40.0, "unknown_peer", DmsgError("unknown peer")),
    ]
    error = DialError("02ff", attempts)
    assert error.attempts == tuple(attempts)
    assert str(error).splitlines() == [
        "could not reach 02ff",
        "  discovery: not found after 1 ms",
        "  connect via 020202020202…: refused (Connection refused) after 12 ms",
        "  handshake via 030303030303…: timeout after 20 ms",
        "  connect via 020202020202…: Connection refused after 30 ms",
        "  accept via 020202020202…: unknown_peer after 40 ms",
    ]
    assert error.reason == "unknown_peer", "of the attempt that got furthest"
    assert attempts[1].as_dict() == {
        "stage": "connect",
        "server": "02" * 33,
        "elapsed_ms": 12.346,
        "reason": "refused",
        "detail": "Connection refused",
    }
    assert attempts[0].as_dict()["detail"] == ""


def test_a_dial_without_attempts_and_with_an_unknown_stage() -> None:
    assert DialError("02ff", []).reason == "no attempt was made"
    odd = [Attempt("elsewhere", "", 0.0, "odd"), Attempt("discovery", "", 0.0, "not found")]
    assert DialError("02ff", odd).reason == "not found"


@pytest.mark.parametrize(
    ("stage", "reason", "expected"),
    [
        ("connect", "connection refused", True),
        ("handshake", "timeout", True),
        ("accept", "unknown_peer", True),
        ("accept", "server connection lost", True),
        ("accept", "access_denied", False),
        ("request", "busy", False),
        ("discovery", "unavailable", False),
        ("discovery", "no common server", True),
    ],
)
def test_a_failed_dial_says_whether_the_peer_may_be_elsewhere(stage: str, reason: str, expected: bool) -> None:
    assert DialError("02" * 33, [Attempt(stage, "", 1.0, reason)]).may_have_moved is expected


@pytest.mark.parametrize(
    ("stage", "reason", "expected"),
    [("discovery", "unavailable", True), ("discovery", "no entry", False), ("connect", "unavailable", False)],
)
def test_a_failed_dial_says_whether_discovery_has_answered(stage: str, reason: str, expected: bool) -> None:
    attempts = [Attempt(stage, "", 1.0, reason), Attempt("connect", "02", 2.0, "connection refused")]
    assert DialError("02" * 33, attempts).is_unanswered is expected
