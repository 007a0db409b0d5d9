"""Errors carry their data in attributes, and the tables that join them to the wire are complete."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dmsg import errors
from dmsg.errors import Attempt, DialError


def test_every_error_of_the_package_has_one_base() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(found) > 40
    assert all(issubclass(error, errors.DmsgError) for error in found)
    assert all(error.__doc__ for error in found)


@pytest.mark.parametrize(
    ("error", "text", "attributes"),
    [
        (errors.KeyFileError("/key", "missing"), "/key: missing", {"path": "/key", "problem": "missing"}),
        (errors.ConfigError("port", "too big"), "port: too big", {"option": "port", "source": ""}),
        (errors.ConfigError("port", "too big", "x.toml"), "port: too big (in x.toml)", {"source": "x.toml"}),
        (errors.RemoteProtocolError("frame", "bad"), "frame: bad", {"stage": "frame", "reason": "bad"}),
        (errors.StageError("connect", "refused"), "connect: refused", {"stage": "connect", "error": None}),
        (
            errors.ConnectionRefusedByServer("too many connections"),
            "the server refused the connection: too many connections",
            {"reason": "too many connections"},
        ),
        (
            errors.ConnectionRefusedByServer("\x1b]0;owned\x07\nvertrau mir \u202e"),
            r"the server refused the connection: '\x1b]0;owned\x07\nvertrau mir \u202e'",
            {"reason": "refused by server"},
        ),
        (
            errors.ConnectionRefusedByServer("x" * 101),
            f"the server refused the connection: '{'x' * 100}'…",
            {"reason": "refused by server"},
        ),
        (
            errors.ServerLost("02ab", "reset"),
            "the connection to server 02ab was lost: reset",
            {"server": "02ab", "reason": "reset"},
        ),
        (errors.SessionTimeout("connect", 2.5), "connect took longer than 2.5 s", {"timeout_s": 2.5}),
        (errors.Busy(), "busy", {"by": "peer", "code": 3}),
        (errors.RateLimited(), "rate limited", {"code": 4}),
        (errors.Busy("all taken", by="local"), "all taken", {"by": "local"}),
        (errors.BadInput(), "error bad input", {"detail": "", "status": 400}),
        (errors.BadInput("no key"), "error bad input: no key", {"detail": "no key"}),
        (
            errors.EntryNotFound(next_sequence=4, after_timestamp=9),
            "entry of public key is not found",
            {"next_sequence": 4, "after_timestamp": 9, "status": 404},
        ),
        (errors.EntryRolledBack("older", entry=5), "entry is older than one seen before: older", {"entry": 5}),
    ],
)
def test_data_is_in_attributes(error: Exception, text: str, attributes: dict[str, Any]) -> None:
    assert str(error) == text
    assert {name: getattr(error, name) for name in attributes} == attributes


def test_texts_of_discovery_have_one_class_each(vectors: Any) -> None:
    assert len(errors.DISCOVERY_ERRORS) == 12
    for text, error in errors.DISCOVERY_ERRORS.items():
        assert error.text == text
    assert json.dumps(vectors["discovery_messages"]).count("entry validation error") >= 6
    assert str(errors.WrongTime()).startswith("entry validation error: previous entry timestamp")


def test_a_failed_dial_tells_everything_that_was_tried() -> None:
    cause = ConnectionRefusedError("Connection refused")
    attempts = [
        Attempt("discovery", "", 1.0, "not found"),
        Attempt("connect", "02" * 33, 12.3456, "refused", cause),
        Attempt("handshake", "03" * 33, 20.0, "timeout", errors.StageError("handshake", "timeout")),
        Attempt("connect", "02" * 33, 30.0, "Connection refused", cause),
    ]
    error = DialError("02ff", attempts)
    assert error.attempts == tuple(attempts)
    assert str(error).splitlines() == [
        "could not reach 02ff",
        "  discovery: not found after 1 ms",
        "  connect via 020202020202…: refused (Connection refused) after 12 ms",
        "  handshake via 030303030303…: timeout (handshake: timeout) after 20 ms",
        "  connect via 020202020202…: Connection refused after 30 ms",
    ]
    assert error.reason == "timeout", "of the attempt that got furthest"
    assert attempts[1].as_dict() == {
        "stage": "connect",
        "server": "02" * 33,
        "elapsed_ms": 12.346,
        "reason": "refused",
        "detail": "Connection refused",
    }
    assert attempts[0].as_dict()["detail"] == ""


def test_a_dial_without_attempts_and_with_a_stage_nobody_knows() -> None:
    assert DialError("02ff", []).reason == "no attempt was made"
    odd = [Attempt("elsewhere", "", 0.0, "odd"), Attempt("discovery", "", 0.0, "not found")]
    assert DialError("02ff", odd).reason == "not found"


def test_close_codes_and_classes_belong_to_each_other() -> None:
    """:ref:`spec-close-reasons`: a class for each code from 1 to 17, a code and a name for each class."""
    classes = errors.TransportClosed.__subclasses__()
    assert sorted(errors.CLOSE_ERRORS) == sorted(cls.code for cls in classes) == list(range(1, 18))
    assert len({cls.name for cls in [errors.TransportClosed, *classes]}) == 18
    for code, cls in errors.CLOSE_ERRORS.items():
        error = errors.close_error(code, by="local")
        assert type(error) is cls
        assert (error.code, error.by, str(error)) == (code, "local", cls.name.replace("_", " "))
        assert str(errors.close_error(code, "because")) == "because"


@pytest.mark.parametrize("code", [0, 18, 255])
def test_close_codes_without_a_class(code: int) -> None:
    """Normal ends, and whatever a later version may send."""
    error = errors.close_error(code)
    assert type(error) is errors.TransportClosed
    assert error.by == "peer"
    assert str(error) == (f"closed with unknown reason {code}" if code else "normal")
