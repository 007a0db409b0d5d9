"""Who is let in: tokens that are good, bad, old, seen before, for another relay, or of an unknown twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dmsg.eventlog import schema as ev
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.token import make_token
from dmsg.sansio.errors import WebSocketRefused

from .conftest import EPOCH, HOST, Client, World, key_of

ALICE = SessionAddress(1)


def refusal(world: World, query: str, **options: str) -> tuple[int, str]:
    """Status and text of the answer."""
    refused = world.dial(query, **options)
    assert isinstance(refused, WebSocketRefused), refused
    assert not world.relay.switch.sessions
    return refused.status, refused.text


def test_a_token_opens_the_session_it_names_on_any_path(world: World) -> None:
    for path in ("", "some/path"):
        assert isinstance(world.dial(f"{path}?{world.token(SessionAddress(1, path))}"), Client)
    assert set(world.relay.switch.sessions) == {(1, ""), (1, "some/path")}


def test_a_request_without_a_token_is_refused(world: World) -> None:
    assert refusal(world, "") == (400, "missing jwt")
    assert refusal(world, "?x") == (401, "invalid jwt: jwt: No claims component found in token string")


def test_a_token_is_good_until_the_second_it_expires_in(world: World) -> None:
    token = world.token(ALICE)
    world.network.advance(60)
    client = world.dial(f"?{token}")
    assert isinstance(client, Client)
    client.leave()
    world.network.advance(1)
    assert refusal(world, f"?{token}") == (401, "invalid jwt: jwt has expired")


def test_a_session_outlives_its_token(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2)
    world.network.advance(300)
    alice.send(alice.envelope(2))
    assert len(bob.received) == 1


def test_a_token_signed_by_another_twin_is_refused(world: World) -> None:
    token = make_token(key_of(2), 1, None, EPOCH)
    assert refusal(world, f"?{token}") == (401, "invalid jwt: jwt: Invalid signature")


def test_a_token_whose_claims_were_changed_is_refused(world: World) -> None:
    theirs, ours = world.token(SessionAddress(2)).split("."), world.token(ALICE).split(".")
    assert refusal(world, f"?{ours[0]}.{ours[1]}.{theirs[2]}")[0] == 401


def test_a_token_of_a_twin_that_there_is_not_is_refused(world: World) -> None:
    assert refusal(world, f"?{world.token(SessionAddress(99))}") == (401, "twin not found 99")


def test_a_registry_that_does_not_answer_is_no_reason_to_believe_a_token(world: World) -> None:
    world.registry.broken = True
    status, text = refusal(world, f"?{world.token(ALICE)}")
    assert status == 500 and text.startswith("failed to get twin: ")


@pytest.mark.parametrize("lifetime_s", [1_801, 10**9])
def test_a_token_that_would_live_too_long_is_refused(world: World, lifetime_s: int) -> None:
    token = world.token(ALICE, lifetime_s=lifetime_s)
    assert refusal(world, f"?{token}") == (401, "invalid jwt: jwt lifetime is too long")


def test_a_relay_may_have_a_shorter_limit_for_the_life_of_tokens(make_world: Callable[..., World]) -> None:
    world = make_world(token_lifetime_s=60)
    assert refusal(world, f"?{world.token(ALICE, lifetime_s=61)}")[1] == "invalid jwt: jwt lifetime is too long"
    assert isinstance(world.dial(f"?{world.token(ALICE, lifetime_s=60)}"), Client)


def test_a_token_from_the_future_is_refused(world: World) -> None:
    token = make_token(key_of(1), 1, None, EPOCH + 1_000)
    assert refusal(world, f"?{token}")[0] == 401


def test_a_token_for_another_relay_is_refused(world: World) -> None:
    status, text = refusal(world, f"?{world.token(ALICE, audience='evil.example')}")
    assert (status, text) == (401, "invalid jwt: jwt is not for this relay")
    assert isinstance(world.dial(f"?{world.token(ALICE, audience=HOST)}"), Client)


def test_a_relay_may_demand_that_tokens_are_for_it(make_world: Callable[..., World]) -> None:
    world = make_world(demand_audience=True)
    assert refusal(world, f"?{world.token(ALICE)}")[0] == 401
    assert isinstance(world.dial(f"?{world.token(ALICE, audience=HOST)}"), Client)


def test_a_token_that_was_used_is_refused_from_another_network(world: World) -> None:
    token = world.token(ALICE)
    alice = world.dial(f"?{token}", host="198.51.100.7")
    thief = world.dial(f"?{token}", host="203.0.113.5")
    assert isinstance(thief, WebSocketRefused) and thief.status == 401
    assert isinstance(alice, Client) and not alice.lost
    # A program that reconnects within a second may have made the same token again.
    assert isinstance(world.dial(f"?{token}", host="198.51.100.8"), Client)


def test_logins_of_a_network_are_limited_before_the_registry_is_asked(make_world: Callable[..., World]) -> None:
    world = make_world(handshake_burst_per_address=5, handshakes_per_s_per_address=1.0)
    for twin in range(1000, 1050):
        world.dial(f"?{world.token(SessionAddress(twin))}", host="198.51.100.7")
    assert len(world.registry.asked) <= 6
    assert refusal(world, f"?{world.token(ALICE)}", host="198.51.100.7") == (429, "too many logins")
    assert isinstance(world.dial(f"?{world.token(ALICE)}", host="203.0.113.7"), Client)


def test_networks_that_use_up_the_logins_of_all_do_not_keep_another_out(make_world: Callable[..., World]) -> None:
    world = make_world(handshake_burst=20, handshakes_per_s=5.0, handshake_burst_per_network=8)
    for second in range(3):
        for number in range(200):
            world.dial("?nonsense", host=f"198.51.{number % 5}.7")
        token = world.token(SessionAddress(1, str(second)))
        assert isinstance(world.dial(f"?{token}", host="203.0.113.7"), Client)
        world.network.advance(1)


def test_a_twin_that_logs_in_without_end_does_not_make_another_s_token_new_again(
    make_world: Callable[..., World],
) -> None:
    world = make_world(used_tokens=10)
    token = world.token(ALICE)
    alice = world.dial(f"?{token}")
    for number in range(50):
        world.dial(f"?{world.token(SessionAddress(6, str(number)))}", host="203.0.113.5")
    thief = world.dial(f"?{token}", host="203.0.113.5")
    assert isinstance(thief, WebSocketRefused) and thief.status == 401
    assert isinstance(alice, Client) and not alice.lost


def test_the_used_tokens_that_are_remembered_are_bounded(make_world: Callable[..., World]) -> None:
    world = make_world(used_tokens=2)
    tokens = [world.token(SessionAddress(twin)) for twin in (1, 2, 3)]
    for token in tokens:
        world.dial(f"?{token}", host="198.51.100.7")
    assert isinstance(world.dial(f"?{tokens[0]}", host="203.0.113.7"), Client)
    assert isinstance(world.dial(f"?{tokens[2]}", host="203.0.113.7"), WebSocketRefused)


def test_refused_logins_are_in_the_event_log_with_a_reason(world: World) -> None:
    refusal(world, "?x.y.z")
    refusal(world, f"?{world.token(SessionAddress(99))}")
    failed = world.events.of(ev.HandshakeFailed)
    assert [(one.stage, str(one.reason)) for one in failed] == [("token", "token malformed"), ("token", "unknown twin")]
