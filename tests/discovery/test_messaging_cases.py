"""The messaging system's discovery: the cases its description names, and what its implementation of 2019 was seen to do."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from treq.client import HTTPClient

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.api import DiscoveryApi, make_site
from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.entry import Entry, check_iteration
from dmsg.discovery.errors import DiscoveryError, EntryNotFound, Unauthorized, WrongSequence

sync = pytest_twisted.ensureDeferred
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "messaging.json").read_text("utf-8"))
MESSAGING = "0.0.1+messaging"
SEQUENCE = "entry validation error: sequence field of new entry is not sequence of old entry + 1"


class Discovery:
    """A discovery on loopback over ``store``, a client on the described paths, and plain HTTP beside it."""

    def __init__(self, store: Any, serve: Any, agent: Any, reactor: Any, now_ns: int) -> None:
        api = DiscoveryApi(store, clock_ns=lambda: now_ns, random=random.Random(1))
        self._url = f"http://127.0.0.1:{serve(make_site(api.resource(), reactor=reactor))}"
        self._http, self._reactor = HTTPClient(agent), reactor
        self.client = HttpDiscovery(self._url, agent, reactor, prefix="discovery")

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        answer = await self._http.request(
            method, self._url + path, data=body or None, allow_redirects=False, reactor=self._reactor
        )
        content = await answer.content()
        return answer.code, json.loads(content) if content else None


@pytest.fixture
def discovery(store: Any, served: Any, agent: Any, reactor: Any, now_ns: int) -> Discovery:
    """Over a store of each kind."""
    return Discovery(store, served, agent, reactor, now_ns)


@pytest.fixture
def relays(make_entry: Any) -> list[Entry]:
    return [make_entry(f"relay {n}", address=f"10.0.{n}.1:80", version=MESSAGING) for n in range(4)]


# --- the five cases of the store ---------------------------------------------------------------------------------------


@sync
async def test_store_1_sets_an_entry_and_2_gets_it_back(store: Any, make_entry: Any, now_ns: int) -> None:
    alice = make_entry("alice", servers=("relay",))
    await store.put(alice, now_ns)
    assert await store.get(alice.static, now_ns) == alice


@pytest.mark.parametrize(
    ("limit", "drawn"), [(4, 4), (3, 3), (9, 4)], ids=["3 all", "4 fewer", "5 more than there are"]
)
@sync
async def test_store_3_to_5_gives_available_servers(
    store: Any, relays: Any, make_entry: Any, now_ns: int, limit: int, drawn: int
) -> None:
    await store.put(make_entry("client"), now_ns)
    for relay in relays:
        await store.put(relay, now_ns)
    found = await store.available_servers(limit, now_ns, "messaging")
    assert len(found) == len({one.static for one in found}) == drawn
    assert {one.static for one in found} <= {one.static for one in relays}


# --- the seven cases of the client library -----------------------------------------------------------------------------


@sync
async def test_client_1_sets_a_new_entry_and_2_updates_it_and_5_gets_it(discovery: Discovery, make_entry: Any) -> None:
    for sequence in range(3):
        alice = make_entry("alice", sequence, servers=("relay",) * sequence)
        await discovery.client.post_entry(alice)
        assert await discovery.client.get_entry(alice.static) == alice


@sync
async def test_client_3_is_refused_a_sequence_that_is_not_the_next_with_500(
    discovery: Discovery, make_entry: Any
) -> None:
    """The text is the implementation's, by which clients know what to do; its paths have its status, too."""
    await discovery.client.post_entry(make_entry("alice"))
    wrong = make_entry("alice", 2)
    with pytest.raises(WrongSequence):
        await discovery.client.post_entry(wrong)
    for path, status in (("/discovery/entries", 500), ("/messaging-discovery/entry/", 422)):
        assert await discovery.ask("POST", path, wrong.to_json()) == (status, {"message": SEQUENCE, "code": status})


@sync
async def test_client_4_is_refused_a_signature_of_another_key_with_401(
    discovery: Discovery, make_entry: Any, key_of: Any
) -> None:
    await discovery.client.post_entry(make_entry("alice"))
    entry = make_entry("alice", 1)
    forged = replace(entry, signature=key_of("bob").sign(entry.signed_json()).hex())
    with pytest.raises(Unauthorized):
        await discovery.client.post_entry(forged)
    for path in ("/discovery/entries", "/messaging-discovery/entry/"):
        answer = await discovery.ask("POST", path, forged.to_json())
        assert answer == (401, {"message": "invalid signature", "code": 401})


@sync
async def test_client_6_is_told_with_404_that_an_entry_is_not_there(discovery: Discovery, key_of: Any) -> None:
    key = key_of("alice").public_key
    with pytest.raises(EntryNotFound):
        await discovery.client.get_entry(key)
    answer = (404, {"message": "entry of public key is not found", "code": 404})
    assert await discovery.ask("GET", f"/discovery/entries/{key}") == answer
    assert await discovery.ask("GET", f"/messaging-discovery/entry/{key}") == answer


@sync
async def test_client_7_lists_available_servers(discovery: Discovery, relays: Any, make_entry: Any) -> None:
    assert await discovery.client.available_servers("messaging") == []
    assert (await discovery.ask("GET", "/discovery/available_servers?protocol=messaging"))[0] == 404
    for relay in (*relays, make_entry("relay of dmsg", address="10.0.9.1:80")):
        await discovery.client.post_entry(relay)
    assert set(await discovery.client.available_servers("messaging")) == set(relays)


@sync
async def test_an_entry_that_was_changed_in_the_store_is_not_handed_out(
    discovery: Discovery, store: Any, make_entry: Any, now_ns: int
) -> None:
    alice = make_entry("alice")
    await store.put(replace(alice, timestamp=alice.timestamp + 1), now_ns)
    for path in ("/discovery/entries/", "/messaging-discovery/entry/"):
        assert await discovery.ask("GET", f"{path}{alice.static}") == (
            401,
            {"message": "invalid signature", "code": 401},
        )


# --- what the implementation of 2019 did -------------------------------------------------------------------------------

#: A POST without the slash was redirected, which made a GET of it; here it is taken.
NOT_SENT = "post no trailing slash"
#: Requests that are answered otherwise on purpose: what is no entry is 400, nothing may stand behind one, each thing has
#: one path and one method, unknown paths have answers in JSON.
STATUSES = {
    "get empty key": 405,
    "get no trailing slash": 405,
    "get with extra path element": 404,
    "post not JSON": 400,
    "post empty body": 400,
    "post JSON array": 400,
    "post trailing garbage after JSON": 400,
    "POST available servers": 405,
    "available servers with trailing slash": 404,
    "DELETE entry (treated as GET)": 405,
    "PUT entry (treated as GET)": 405,
    "static x>=p (Go panics inside handler)": 400,
    "high-s signature (Go log.Fatal: server process exits)": 401,
}
GONE = "available servers after server became client-only"


@pytest.mark.parametrize("kind", ["mock", "redis"])
@sync
async def test_recorded_requests_are_answered_as_they_were(
    served: Any, agent: Any, reactor: Any, opened: Any, now_ns: int, kind: str
) -> None:
    discovery = Discovery(opened("memory:"), served, agent, reactor, now_ns)
    cases = [case for case in VECTORS["discovery_http"][kind] if "request" in case and case["case"] != NOT_SENT]
    assert len(cases) > 30
    for case in cases:
        name, request = case["case"], case["request"]
        if request["path"].startswith("/discovery/"):
            continue  # it knew nothing of these paths
        status, body = await discovery.ask(request["method"], request["path"], (request["body"] or "").encode())
        if name in STATUSES:
            assert status == STATUSES[name], name
        elif name == GONE:
            assert (status, body) == (200, []), "it stayed on the list there"
        else:
            assert (status, body) == (case["status"], json.loads(case["body"]) if case["body"] else None), name


#: It was signed over bytes that are no UTF-8, which its JSON does not have: no reader can tell what was signed.
LOST = "invalid UTF-8 replaced"


@pytest.mark.parametrize("vector", [pytest.param(one, id=one["name"]) for one in VECTORS["entries"]])
def test_recorded_entries_are_read_verified_and_written_to_the_byte(vector: Any) -> None:
    entry = Entry.parse(vector["signed_json"].encode())
    if vector["name"] == LOST:
        with pytest.raises(Unauthorized):
            entry.verify()
        return
    assert entry.signed_json() == bytes.fromhex(vector["hashed_json_hex"])
    assert entry.to_json() == vector["signed_json"].encode()
    entry.verify()
    key = SecretKey(bytes.fromhex(vector["sk"]))
    assert key.public_key == entry.static
    entry.sign(key).verify()


@pytest.mark.parametrize("case", [pytest.param(one, id=one["case"]) for one in VECTORS["entry_body_cases"]])
def test_recorded_bodies_are_taken_or_refused(case: Any) -> None:
    """One that ended the reference's program is refused like any other."""

    def read() -> None:
        entry = Entry.parse(case["body"].encode())
        entry.validate()
        entry.verify()

    if case["outcome"] == "accepted":
        read()
        return
    with pytest.raises(DiscoveryError) as caught:
        read()
    if case["go_output"].startswith("VALIDATE: "):
        assert caught.value.text == case["go_output"].removeprefix("VALIDATE: ")


@pytest.mark.parametrize("case", [pytest.param(one, id=one["case"]) for one in VECTORS["entry_iteration_cases"]])
def test_recorded_iterations_are_taken_or_refused(case: Any) -> None:
    error = None
    try:
        check_iteration(*(case[f"{age}_{name}"] for age in ("new", "old") for name in ("sequence", "timestamp")))
    except DiscoveryError as refused:
        error = refused.text
    assert error == case["error"]
