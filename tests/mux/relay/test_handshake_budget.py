"""The budget of handshakes, and cookies."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.crypto.keys import SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import COOKIE_BYTES, Handshake, Role
from dmsg.mux.core.hello import hello_payload
from dmsg.mux.relay.handshake_budget import COOKIE_SLOT_S, CookieJar, HandshakeBudget
from dmsg.mux.relay.limits import RelayLimits
from dmsg.serving.admission import Origin

ALICE, SERVER = (SecretKey(hashlib.sha256(name).digest()) for name in (b"alice", b"server"))
HOME = Origin.of("192.0.2.1")
#: Three handshakes of an address without a cookie, three more with one.
TIGHT = RelayLimits(handshakes_per_s_per_address=1e-9, handshake_burst_per_address=6)


def client(*, extended: bool = True) -> Handshake:
    payload = hello_payload() if extended else b""
    return Handshake(Role.CLIENT, ALICE, SERVER.public_key, now=0.0, payload=payload, takes_cookie=extended)


def server(budget: HandshakeBudget, origin: Origin = HOME, **options: float) -> Handshake:
    gate = budget.gate(origin)
    return Handshake(Role.SERVER, SERVER, now=0.0, payload=hello_payload(), gate=gate, **options)  # type: ignore[arg-type]


def exhausted(times: int, limits: RelayLimits = TIGHT, *, cookies: bool = True) -> HandshakeBudget:
    """A budget of which ``times`` first messages without a cookie were taken."""
    budget = HandshakeBudget(limits, 0.0, cookies=cookies)
    for _ in range(times):
        assert budget.judge(HOME, b"m" * 49, 0.0) == (b"m" * 49, b"")
    return budget


def shake(one: Handshake, other: Handshake) -> list[int]:
    """Pass everything on until both are done; the sizes of what the client was sent."""
    sizes = []
    for _ in range(4):
        other.receive_data(one.data_to_send(), 0.0)
        answer = other.data_to_send()
        sizes.append(len(answer))
        one.receive_data(answer, 0.0)
    return [size for size in sizes if size]


# --- cookies ---------------------------------------------------------------------------------------------------------

addresses, messages = st.sampled_from(["192.0.2.1", "192.0.2.2", "20010db800010002::/64"]), st.binary(max_size=60)


@given(addresses, messages, addresses, messages, st.floats(0, 1e9), st.floats(0, 3 * COOKIE_SLOT_S))
def test_a_cookie_opens_for_its_address_and_message_in_its_time(
    address: str, message: bytes, other: str, another: bytes, now: float, later: float
) -> None:
    jar = CookieJar()
    cookie = jar.make(address, message, now)
    assert len(cookie) == COOKIE_BYTES
    slots = int((now + later) // COOKIE_SLOT_S) - int(now // COOKIE_SLOT_S)
    assert jar.opens(cookie, address, message, now + later) is (slots <= 1)
    assert jar.opens(cookie, other, another, now) is ((address, message) == (other, another))
    assert not CookieJar().opens(cookie, address, message, now)


def test_secrets_are_drawn_anew_and_forgotten() -> None:
    drawn: list[int] = []

    def random(size: int) -> bytes:
        drawn.append(size)
        return len(drawn).to_bytes(size, "big")

    jar = CookieJar(random=random)
    cookies = [jar.make("a", b"m", at * COOKIE_SLOT_S) for at in (0, 0.5, 1, 2)]
    assert drawn == [32, 32, 32]
    assert cookies[0] == cookies[1]
    assert [jar.opens(cookie, "a", b"m", 2 * COOKIE_SLOT_S) for cookie in cookies] == [False, False, True, True]
    assert not jar.opens(cookies[0], "a", b"m", 0.0), "even if the clock is set back: its secret is gone"


# --- what is let through ---------------------------------------------------------------------------------------------


def test_without_load_a_handshake_is_as_ever() -> None:
    budget = HandshakeBudget(RelayLimits(), 0.0)
    one, other = client(), server(budget)
    assert shake(one, other) == [51 + len(hello_payload())]
    assert not one.challenged
    assert not other.challenged


def test_above_half_an_extended_client_is_asked_for_a_cookie_and_gets_in() -> None:
    budget = exhausted(3)
    one, other = client(), server(budget)
    first = one.data_to_send()
    other.receive_data(first, 0.0)
    assert other.messages == 0, "no Diffie-Hellman yet"
    cookie = other.data_to_send()
    assert len(cookie) == 2 + COOKIE_BYTES
    one.receive_data(cookie, 0.0)
    again = one.data_to_send()
    assert again == (49 + COOKIE_BYTES).to_bytes(2, "big") + first[2:] + cookie[2:]
    other.receive_data(again, 0.0)
    [done] = one.receive_data(other.data_to_send(), 0.0)
    assert isinstance(done, HandshakeDone)
    [there] = other.receive_data(one.data_to_send(), 0.0)
    assert isinstance(there, HandshakeDone)
    assert there.records.open(done.records.seal(b"up")) == [b"up"]


def test_a_base_client_takes_a_cookie_for_a_broken_message_2() -> None:
    other, one = server(exhausted(3)), client(extended=False)
    other.receive_data(one.data_to_send(), 0.0)
    with pytest.raises(RemoteProtocolError, match="message 2 does not open"):
        one.receive_data(other.data_to_send(), 0.0)


def test_a_cookie_does_not_help_when_the_budget_is_used_up() -> None:
    budget = exhausted(3)
    for _ in range(3):
        shake(client(), server(budget))
    one, other = client(), server(budget)
    other.receive_data(one.data_to_send(), 0.0)
    one.receive_data(other.data_to_send(), 0.0)
    with pytest.raises(RemoteProtocolError) as caught:
        other.receive_data(one.data_to_send(), 0.0)
    assert (caught.value.stage, caught.value.reason) == ("accept", "handshakes_per_address")


def test_a_client_answers_one_cookie_only() -> None:
    other, one = server(exhausted(3)), client()
    other.receive_data(one.data_to_send(), 0.0)
    cookie = other.data_to_send()
    one.receive_data(cookie, 0.0)
    with pytest.raises(RemoteProtocolError, match="message 2 does not open"):
        one.receive_data(cookie, 0.0)


@pytest.mark.parametrize("again", ["bare", "forged", "another address"])
def test_a_message_without_a_good_cookie_is_answered_once(again: str) -> None:
    budget = exhausted(3)
    one, other = client(), server(budget)
    first = one.data_to_send()
    other.receive_data(first, 0.0)
    cookie = other.data_to_send()[2:]
    if again == "another address":
        elsewhere = server(budget, Origin.of("192.0.2.99"))
        with pytest.raises(RemoteProtocolError, match="message 1 does not open"):  # a cookie is no part of a message
            elsewhere.receive_data((49 + COOKIE_BYTES).to_bytes(2, "big") + first[2:] + cookie, 0.0)
        return
    forged = (49 + COOKIE_BYTES).to_bytes(2, "big") + first[2:] + bytes(COOKIE_BYTES)
    with pytest.raises(RemoteProtocolError, match="no cookie"):
        other.receive_data(first if again == "bare" else forged, 0.0)


def test_a_message_1_with_a_payload_of_a_cookies_length_is_no_cookie() -> None:
    """Message 1 has no payload, but a peer may try."""
    budget = HandshakeBudget(RelayLimits(), 0.0)
    message = b"m" * (49 + COOKIE_BYTES)
    assert budget.judge(HOME, message, 0.0) == (message, b"")


def test_a_server_without_extension_asks_for_none_and_uses_the_whole_budget() -> None:
    budget = exhausted(6, cookies=False)
    with pytest.raises(RemoteProtocolError, match="handshakes_per_address"):
        budget.judge(HOME, b"m" * 49, 0.0)


def test_an_address_cannot_use_up_what_a_network_has_nor_a_network_what_all_have() -> None:
    """Each at its worst: a message a millisecond for 10 seconds, with a cookie each time."""
    limits = RelayLimits()
    budget = HandshakeBudget(limits, 0.0)
    passed = {"one address": 0, "one network": 0}
    for step in range(10_000):
        now = step / 1_000
        for name, host in (("one address", "192.0.2.1"), ("one network", f"198.51.100.{step % 250}")):
            origin = Origin.of(host)
            try:
                message, cookie = budget.judge(origin, b"m" * 49, now)
                if cookie:
                    message, _ = budget.judge(origin, b"m" * 49 + cookie, now)
            except RemoteProtocolError:
                continue
            passed[name] += bool(message)
    assert passed["one address"] <= limits.handshake_burst_per_address + 10 * limits.handshakes_per_s_per_address
    assert passed["one network"] <= limits.handshake_burst_per_network + 10 * limits.handshakes_per_s_per_network
    assert budget.judge(Origin.of("203.0.113.1"), b"m" * 49, 10.0) == (b"m" * 49, b"")


def test_networks_that_bring_cookies_and_use_up_the_rate_of_all_do_not_keep_a_client_out() -> None:
    budget = HandshakeBudget(RelayLimits(), 0.0)
    bare = b"m" * 49

    def comes(host: str, now: float) -> bool:
        """Whether a handshake from ``host`` passes, with a cookie if it is asked for one."""
        origin = Origin.of(host)
        try:
            message, cookie = budget.judge(origin, bare, now)
            return bool(message or budget.judge(origin, bare + cookie, now)[0])
        except RemoteProtocolError:
            return False

    for step in range(1_000):
        now = step / 100
        for network in range(20):
            comes(f"198.18.{network}.{step % 100}", now)
            comes(f"198.18.{network}.{step % 100}", now)
        if step % 10 == 5:
            assert comes(f"203.0.{step // 10}.1", now)


def test_connections_are_counted_by_address_and_network() -> None:
    limits = RelayLimits(
        handshakes_per_s_per_address=0.25,
        handshake_burst_per_address=2,
        handshakes_per_s_per_network=1e-9,
        handshake_burst_per_network=5,
    )
    budget = HandshakeBudget(limits, 0.0)
    assert [budget.connects(HOME, 0.0) for _ in range(9)] == [""] * 8 + ["connects_per_address"]
    assert budget.connects(HOME, 1.0) == ""
    neighbours = [budget.connects(Origin.of(f"192.0.2.{host}"), 1.0) for host in range(2, 14)]
    assert neighbours == [""] * 11 + ["connects_per_network"]


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_silent_client_has_less_time_than_one_that_began() -> None:
    budget = HandshakeBudget(RelayLimits(), 0.0)
    silent = server(budget, timeout_s=5.0, first_byte_timeout_s=1.0)
    assert silent.next_timeout() == 1.0
    assert silent.handle_timeout(0.9) == []
    with pytest.raises(RemoteProtocolError, match="silent"):
        silent.handle_timeout(1.0)
    begun = server(budget, timeout_s=5.0, first_byte_timeout_s=1.0)
    begun.receive_data(b"\0", 0.5)
    assert begun.next_timeout() == 5.0
    assert begun.handle_timeout(1.0) == []
    with pytest.raises(RemoteProtocolError, match="timeout"):
        begun.handle_timeout(5.0)
    waiting = server(budget, timeout_s=5.0, first_byte_timeout_s=1.0)
    waiting.heard()  # what it sent waits for its turn
    assert waiting.next_timeout() == 5.0
    short = server(budget, timeout_s=0.5, first_byte_timeout_s=1.0)
    assert short.next_timeout() == 0.5
