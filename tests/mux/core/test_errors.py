"""CLOSE codes and their exceptions, and how connections to relays end."""

from __future__ import annotations

from typing import Any

import pytest

from dmsg.errors import DmsgError
from dmsg.mux.core.errors import (
    CLOSE_ERRORS,
    Busy,
    ConnectionRefusedByServer,
    RateLimited,
    TransportClosed,
    close_error,
)
from dmsg.mux.core.wire import CloseReason, reason_name
from dmsg.relays.errors import ServerLost


@pytest.mark.parametrize(
    ("error", "text", "attributes"),
    [
        (
            ConnectionRefusedByServer("too many connections"),
            "the server refused the connection: too many connections",
            {"reason": "too many connections"},
        ),
        (
            ConnectionRefusedByServer("connections_per_address"),
            "the server refused the connection: connections_per_address",
            {"reason": "connections_per_address", "own_text": "connections_per_address"},
        ),
        (
            ConnectionRefusedByServer("\x1b]0;owned\x07\nvertrau mir \u202e"),
            r"the server refused the connection: '\x1b]0;owned\x07\nvertrau mir \u202e'",
            {"reason": "refused by server"},
        ),
        (
            ConnectionRefusedByServer("x" * 101),
            f"the server refused the connection: '{'x' * 100}'…",
            {"reason": "refused by server"},
        ),
        (
            ServerLost("02ab", "reset"),
            "the connection to server 02ab was lost: reset",
            {"server": "02ab", "reason": "reset"},
        ),
        (Busy(), "busy", {"by": "peer", "code": 3}),
        (RateLimited(), "rate limited", {"code": 4}),
        (Busy("all taken", by="local"), "all taken", {"by": "local"}),
    ],
)
def test_data_is_in_attributes(error: DmsgError, text: str, attributes: dict[str, Any]) -> None:
    assert str(error) == text
    assert {name: getattr(error, name) for name in attributes} == attributes


def test_close_codes_and_classes_belong_to_each_other() -> None:
    """:ref:`spec-close-reasons`: a class for each code from 1 to 17, a code and a name for each class."""
    classes = TransportClosed.__subclasses__()
    assert sorted(CLOSE_ERRORS) == sorted(cls.code for cls in classes) == sorted(set(CloseReason) - {0})
    assert sorted(CLOSE_ERRORS) == list(range(1, 18))
    assert len({cls.name for cls in [TransportClosed, *classes]}) == 18
    for code, cls in CLOSE_ERRORS.items():
        error = close_error(code, by="local")
        assert type(error) is cls
        assert cls.name == reason_name(code) == CloseReason(code).name.lower()
        assert (error.code, error.by, str(error)) == (code, "local", cls.name.replace("_", " "))
        assert str(close_error(code, "because")) == "because"


@pytest.mark.parametrize("code", [0, 18, 255])
def test_close_codes_without_a_class(code: int) -> None:
    """Normal ends, and reasons a later version may send."""
    error = close_error(code)
    assert type(error) is TransportClosed
    assert error.by == "peer"
    assert str(error) == (f"closed with unknown reason {code}" if code else "normal")
