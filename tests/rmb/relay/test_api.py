"""The HTTP side of a relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.web.resource import Resource

from dmsg.ops.admin import KEPT_S, admin_pages
from dmsg.ops.metrics import CollectorRegistry, add_gauges
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.api import RelayApi

from .conftest import World

UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
KEY = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"


class Posted(Resource):
    """Takes posts."""

    isLeaf = True

    def render_POST(self, request: Any) -> bytes:
        request.setResponseCode(202)
        return b"took " + request.content.read()


@pytest.fixture
def world(world: World) -> World:
    serve(world, CollectorRegistry())
    return world


def serve(world: World, registry: CollectorRegistry) -> None:
    pages = admin_pages(registry, lambda: "", world.network)
    world.site.resource = RelayApi(world.relay, {b"/" + name: page for name, page in pages.items()}, Posted())


def get(world: World, path: str, method: str = "GET", headers: str = "", body: bytes = b"") -> tuple[int, str, bytes]:
    """Status, content type and body of an answer."""
    head, _, answer = world.http(method, path, body, headers).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    types = [line.split(": ")[1] for line in lines if line.lower().startswith("content-type")]
    return int(lines[0].split()[1]), types[0] if types else "", answer


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/other"),
        ("PUT", "/"),
        ("DELETE", "/metrics"),
        ("POST", "/metrics"),
        ("POST", "/x"),
        ("GET", "/%ff%fe"),
        ("GET", "//metrics"),
        ("GET", "/metrics/"),
        ("BREW", "/"),
    ],
)
def test_everything_else_is_not_found(world: World, method: str, path: str) -> None:
    status, kind, body = get(world, path, method)
    assert (status, body) == (404, b"page not found") and kind.startswith("text/plain")


def test_head_is_answered_without_a_body(world: World) -> None:
    assert get(world, "/nowhere", "HEAD")[::2] == (404, b"")
    assert get(world, "/livez", "HEAD")[::2] == (200, b"")


def test_metrics_say_what_type_they_are(world: World) -> None:
    status, kind, _ = get(world, "/metrics")
    assert status == 200 and kind.startswith("text/plain; version=")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_metrics_that_strangers_ask_for_without_end_are_made_ten_times_a_second(world: World, method: str) -> None:
    """Making them takes up to 5 ms, and each of some hundred connections has one request answered in each turn."""
    registry, made = CollectorRegistry(), []
    add_gauges(registry, "", lambda: {"times_made": made.append(None) or len(made)})
    serve(world, registry)
    for _ in range(20):
        assert b"times_made 1.0" in get(world, "/metrics", method)[2] or method == "HEAD"
    assert len(made) == 1
    world.network.advance(KEPT_S)
    assert get(world, "/metrics")[2].endswith(b"times_made 2.0\n")


def test_it_says_whether_it_lives_and_is_ready(world: World) -> None:
    assert get(world, "/livez")[0] == get(world, "/readyz")[0] == 200


def test_posts_go_to_the_ingest_whatever_their_query(world: World) -> None:
    assert get(world, "/?a=b", "POST", body=b"x")[::2] == (202, b"took x")


def test_a_body_that_is_too_long_is_refused_before_it_is_read(world: World) -> None:
    answer = world.raw(b"POST / HTTP/1.1\r\nHost: relay\r\nContent-Length: 99999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ("Sec-WebSocket-Version: 13\r\n", (500, b'No "Sec-WebSocket-Key" header')),
        (KEY, (500, b'No "Sec-WebSocket-Version: 13" header')),
        (KEY + "Sec-WebSocket-Version: 12\r\n", (500, b'No "Sec-WebSocket-Version: 13" header')),
    ],
)
def test_what_is_no_handshake_is_refused_and_ends_no_session(
    world: World, headers: str, answer: tuple[int, bytes]
) -> None:
    older = world.connect(1)
    reply = world.raw(
        f"GET /?{world.token(SessionAddress(1))} HTTP/1.1\r\nHost: relay\r\n{UPGRADE}{headers}\r\n".encode(),
        host="198.51.100.7",
    )
    head, _, body = reply.partition(b"\r\n\r\n")
    assert (int(head.split()[1]), body) == answer and not older.lost


def test_a_client_that_goes_while_its_twin_is_looked_up_gets_no_session(world: World) -> None:
    world.registry.slow = Deferred()
    opening = f"GET /?{world.token(SessionAddress(1))} HTTP/1.1\r\nHost: relay\r\n{UPGRADE}{KEY}"
    world.raw((opening + "Sec-WebSocket-Version: 13\r\n\r\n").encode())
    [pipe] = world.network.pipes_to(80)
    pipe.cut()
    world.turn()
    world.registry.slow.callback(None)
    world.turn()
    assert not world.relay.switch.sessions and world.site.connections == 0


def test_a_session_holds_no_place_of_the_http_site(world: World) -> None:
    for twin in range(1, 6):
        world.connect(twin)
    assert world.site.connections == 0 and len(world.relay.switch.sessions) == 5


_TOKENS = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-"), min_size=1, max_size=12)
_PATHS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="#"), max_size=40)
_VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40)
_HEADERS = st.lists(
    st.one_of(
        st.tuples(_TOKENS, _VALUES),
        st.sampled_from(
            [
                ("Connection", "Upgrade"),
                ("Upgrade", "websocket"),
                ("Sec-WebSocket-Version", "13"),
                ("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="),
                ("Dmsg-Relay", "1 a b 2 3 one 4"),
            ]
        ),
    ),
    max_size=6,
).filter(
    lambda headers: not {"host", "content-length", "transfer-encoding", "expect"} & {one.lower() for one, _ in headers}
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"]) | _TOKENS,
    path=st.sampled_from(["/", "/metrics", "/livez", "/readyz", "/?", "/x?y.z.a"]) | _PATHS.map("/".__add__),
    headers=_HEADERS,
    body=st.binary(max_size=200),
)
def test_any_request_has_one_of_the_documented_answers(
    world: World, method: str, path: str, headers: list[tuple[str, str]], body: bytes
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    world.network.advance(1)
    answer = world.http(method, path, body, lines)
    status = int(answer.split()[1])
    # 500 is for a WebSocket without key or version, 202 for what the ingest of these tests takes.
    assert status in {200, 202, 400, 401, 404, 429, 500}
    assert status != 500 or b'No "Sec-WebSocket-' in answer
    assert status != 202 or (method, path.partition("?")[0]) == ("POST", "/")
    assert not world.relay.switch.sessions


def statuses(answer: bytes) -> list[int]:
    return [int(part.split()[0]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("path", ["/metrics", "/", "/other"])
def test_requests_over_the_rate_of_an_address_are_refused_and_end_its_connection(
    make_world: Callable[..., World], path: str
) -> None:
    world = make_world(gets_per_s_per_address=1.0, get_burst_per_address=3)
    serve(world, CollectorRegistry())
    ask = f"GET {path} HTTP/1.1\r\nHost: relay\r\n\r\n".encode()
    answer = world.raw(20 * ask)
    assert statuses(answer)[-1] == 429 and len(statuses(answer)) == 4 and 429 not in statuses(answer)[:3]
    assert answer.lower().endswith(b"\r\n\r\ntoo many requests") and b"retry-after: 1" in answer.lower()
    assert world.site.connections == 0
    assert statuses(world.raw(ask)) == [429] and statuses(world.raw(ask, host="203.0.113.10")) != [429]
    # Logins and posts have rates of their own.
    assert get(world, "/", "POST", body=b"x")[0] == 202 and world.connect(1, host="203.0.113.9").lost is False
    world.network.advance(1)
    assert statuses(world.raw(ask)) != [429]


def test_logins_over_the_rate_of_an_address_end_its_connection(make_world: Callable[..., World]) -> None:
    world = make_world(handshakes_per_s_per_address=1.0, handshake_burst_per_address=3)
    serve(world, CollectorRegistry())
    answer = world.raw(20 * f"GET /?token HTTP/1.1\r\nHost: relay\r\n{UPGRADE}{KEY}\r\n".encode())
    assert statuses(answer) == [401, 401, 401, 429] and world.site.connections == 0


def test_addresses_that_use_up_the_rate_of_all_do_not_keep_others_from_metrics(
    make_world: Callable[..., World],
) -> None:
    world = make_world(gets_per_s=1.0, get_burst=3, gets_per_s_per_network=1.0, get_burst_per_network=1)
    serve(world, CollectorRegistry())
    for at in range(10):
        world.http("GET", "/", host=f"198.51.100.{at}")
    assert statuses(world.http("GET", "/metrics", host="198.51.100.99")) == [429]
    assert statuses(world.http("GET", "/metrics", host="203.0.113.9")) == [200]


def test_connections_over_the_rate_of_an_address_are_closed_before_anything_is_read(
    make_world: Callable[..., World],
) -> None:
    world = make_world(arrivals_per_s_per_address=1.0, arrival_burst_per_address=3)
    serve(world, CollectorRegistry())
    answers = [world.http("GET", "/livez") for _ in range(5)]
    assert list(map(bool, answers)) == [True, True, True, False, False] and world.site.refused == 2
    assert world.http("GET", "/livez", host="203.0.113.10")
    world.network.advance(1)
    assert world.http("GET", "/livez")
