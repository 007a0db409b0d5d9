"""Relays that worked are remembered from one run to the next, in a file that may hold anything."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from threading import Thread

import pytest
import pytest_twisted
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import succeed
from twisted.internet.task import deferLater
from twisted.logger import globalLogPublisher
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import DMSG, Entry, ServerPart
from dmsg.discovery.errors import DiscoveryUnavailable, EntryNotFound
from dmsg.interfaces import IDiscovery
from dmsg.relays import state as module
from dmsg.relays.state import RelayFile, state_file
from tests.worlds import ScatteredRelays

NOW_S = 1_700_000_000
KEYS = [SecretKey.generate() for _ in range(40)]
RELAYS = [key.public_key for key in KEYS]
ME = SecretKey.generate()


def opened(path, now_s=NOW_S):
    return RelayFile(path, lambda: now_s)


def place(number):
    return HostPort(f"192.0.{number}.1", 80)


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_worked_is_there_in_the_next_run(tmp_path):
    path = tmp_path / "new" / "state" / "relays.json"
    first = opened(path)
    assert first.relays == []
    first.worked(RELAYS[0], place(0))
    first.worked(RELAYS[1], place(1))
    first.save()
    found = opened(path).relays
    assert [(one.public_key, one.address, one.remembered) for one in found] == [
        (RELAYS[0], place(0), True),
        (RELAYS[1], place(1), True),
    ]
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_only_a_change_is_written(tmp_path):
    path = tmp_path / "relays.json"
    kept = opened(path)
    kept.save()
    assert not path.exists()
    kept.worked(RELAYS[0], place(0))
    kept.save()
    path.unlink()
    kept.save()
    assert not path.exists()
    kept.forget(RELAYS[1])
    kept.save()
    assert not path.exists()
    kept.worked(RELAYS[0], place(0))
    kept.worked(RELAYS[1], place(1))
    kept.save()
    kept.forget(RELAYS[0])
    kept.save()
    assert [one.public_key for one in opened(path).relays] == [RELAYS[1]]


def test_a_file_that_others_may_have_written_counts_as_empty(tmp_path, monkeypatch):
    path = tmp_path / "relays.json"
    kept = opened(path)
    kept.worked(RELAYS[0], place(0))
    kept.save()
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert not opened(path).relays
    path.chmod(0o644)
    assert opened(path).relays
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert not opened(path).relays


def test_the_file_is_bounded_and_no_group_fills_it(tmp_path):
    path = tmp_path / "relays.json"
    kept = opened(path)
    for number in range(20):
        kept.worked(RELAYS[number], place(number))
    for number in range(20, 40):
        kept.worked(RELAYS[number], HostPort(f"198.51.100.{number}", 80))
    kept.save()
    found = [one.public_key for one in opened(path).relays]
    assert found == [*RELAYS[6:20], *RELAYS[38:]] and len(found) == module.RELAYS_LIMIT
    names = HostPort("a" * 63 + "." + "b" * 63 + "." + "c" * 63 + ".example.org", 65535)
    for number in range(16):
        kept.worked(RELAYS[number], HostPort(f"2001:db8:{number:x}::1", 65535))
    kept.worked(RELAYS[17], names)
    kept.save()
    assert path.stat().st_size < module.FILE_LIMIT_BYTES


def test_what_is_old_is_left_out(tmp_path):
    path = tmp_path / "relays.json"
    kept = opened(path)
    kept.worked(RELAYS[0], place(0))
    kept.save()
    assert opened(path, NOW_S + module.AGE_LIMIT_S - 1).relays
    assert not opened(path, NOW_S + module.AGE_LIMIT_S).relays


def test_a_clock_that_is_not_set_yet_makes_nothing_forgotten(tmp_path):
    """A machine without a battery for its clock is in 1970 until the network has told it the time."""
    path = tmp_path / "relays.json"
    kept = opened(path)
    for number in range(3):
        kept.worked(RELAYS[number], place(number))
    kept.save()
    booted = opened(path, 20)
    assert {one.public_key for one in booted.relays} == {*RELAYS[:3]}
    booted.worked(RELAYS[1], place(7))
    booted.save()
    later = {one.public_key: one.address for one in opened(path, NOW_S + 60).relays}
    assert later == {RELAYS[0]: place(0), RELAYS[1]: place(7), RELAYS[2]: place(2)}


GOOD = {"public_key": str(RELAYS[0]), "address": "192.0.2.1:80", "connected": NOW_S}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b"null",
        b" " * (module.FILE_LIMIT_BYTES + 1),
        json.dumps({"version": 2, "relays": [GOOD]}).encode(),
        json.dumps({"version": 1}).encode(),
        json.dumps({"version": 1, "relays": [GOOD, None]}).encode(),
        json.dumps({"version": 1, "relays": [{**GOOD, "public_key": "x"}]}).encode(),
        json.dumps({"version": 1, "relays": [{**GOOD, "public_key": 5}]}).encode(),
        json.dumps({"version": 1, "relays": [{**GOOD, "address": "nowhere"}]}).encode(),
        json.dumps({"version": 1, "relays": [{**GOOD, "address": None}]}).encode(),
        json.dumps({"version": 1, "relays": [{**GOOD, "connected": True}]}).encode(),
        b'{"version":1,"relays":[{"connected":' + b"9" * 5000 + b"}]}",
    ],
)
def test_a_file_that_is_not_ours_counts_as_empty_and_is_written_anew(tmp_path, content):
    path = tmp_path / "relays.json"
    path.write_bytes(content)
    path.chmod(0o600)
    kept = opened(path)
    assert kept.relays == []
    kept.worked(RELAYS[1], place(1))
    kept.save()
    assert [one.public_key for one in opened(path).relays] == [RELAYS[1]]


@settings(max_examples=50)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_content_raises(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("state") / "relays.json"
    path.write_bytes(content)
    path.chmod(0o600)
    assert opened(path).relays == []


def test_a_file_others_could_have_written_is_not_believed(tmp_path):
    path = tmp_path / "relays.json"
    kept = opened(path)
    kept.worked(RELAYS[0], place(0))
    kept.save()
    path.chmod(0o622)
    assert opened(path).relays == []
    path.chmod(0o644)
    assert len(opened(path).relays) == 1
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert opened(link).relays == []
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    assert opened(pipe).relays == []


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    kept = opened(tmp_path / "file" / "relays.json")
    kept.worked(RELAYS[0], place(0))
    kept.save()
    kept.worked(RELAYS[1], place(1))
    kept.save()
    assert len(kept.relays) == 2


# --- where it is -----------------------------------------------------------------------------------------------------


def test_each_key_has_a_file_for_each_discovery_whose_name_tells_neither(tmp_path):
    paths = {state_file(str(tmp_path), key.public_key, url) for key in KEYS[:3] for url in ("", "http://a", "http://b")}
    assert len(paths) == 9 and {path.parent for path in paths} == {tmp_path}
    assert not any(str(key.public_key)[:8] in path.name for key in KEYS[:3] for path in paths)
    protocols = {state_file(str(tmp_path), ME.public_key, "http://a", name) for name in (DMSG, "messaging", "other")}
    assert len(protocols) == 3 and not protocols & paths
    assert state_file(str(tmp_path), ME.public_key, "http://a") in protocols
    assert state_file("none", ME.public_key, "") is None


def test_by_default_it_is_where_the_system_has_such_things(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_file("", ME.public_key, "").parent == tmp_path / "dmsg"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_file("~/here", ME.public_key, "").parent == tmp_path / "here"


def test_files_of_keys_used_long_ago_make_room(tmp_path):
    for number in range(module.FILES_LIMIT + 5):
        old = state_file(str(tmp_path), KEYS[0].public_key, str(number))
        old.write_text("{}")
        os.utime(old, (number, number))
    (tmp_path / "mine.json").write_text("")
    kept = opened(state_file(str(tmp_path), ME.public_key, ""))
    kept.worked(RELAYS[0], place(0))
    kept.save()
    assert len(list(tmp_path.glob("relays-*"))) == module.FILES_LIMIT
    assert kept.path.exists() and (tmp_path / "mine.json").exists()


def test_programs_that_make_room_at_the_same_moment_have_no_trouble_with_each_other(tmp_path):
    def keep(name):
        for number in range(200):
            kept = opened(state_file(str(tmp_path), ME.public_key, f"{name} {number}"))
            kept.worked(RELAYS[0], place(0))
            kept.save()

    threads = [Thread(target=keep, args=(name,)) for name in range(4)]
    said = []
    globalLogPublisher.addObserver(said.append)
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        globalLogPublisher.removeObserver(said.append)
    assert not [one for one in said if "path" in one]


# --- what a client does with it --------------------------------------------------------------------------------------


@implementer(IDiscovery)
class Listing:
    """Lists ``hosts``; ``answers`` says whether it does anything at all. Knows the entries of all relays that are up."""

    def __init__(self):
        self.entries = {}
        self.listed = []
        self.looked_up = []
        self.answers = True
        self.delay = lambda: succeed(None)

    def add(self, key, address, listed=True):
        self.entries[key.public_key] = entry = Entry(
            "0.0.1", 0, 1, key.public_key, None, ServerPart(str(address), 5)
        ).sign(key)
        if listed:
            self.listed.append(entry)

    async def available_servers(self, protocol="dmsg"):
        self.check()
        return self.listed

    async def get_entry(self, public_key):
        self.looked_up.append(public_key)
        await self.delay()
        self.check()
        if public_key not in self.entries:
            raise EntryNotFound
        return self.entries[public_key]

    def check(self):
        if not self.answers:
            raise DiscoveryUnavailable("gone")


class World(ScatteredRelays):
    """Relays in groups of their own, and a client with a file."""

    def __init__(self, path):
        super().__init__(Listing())
        self.memory.clock.rightNow = float(NOW_S)
        self.path = path

    def add(self, number, *, listed=True):
        self.start_relay(KEYS[number], place(number).host)
        self.listing.add(KEYS[number], place(number), listed)

    def remember(self, *numbers):
        kept = opened(self.path)
        for number in numbers:
            kept.worked(RELAYS[number], place(number))
        kept.save()

    def client(self, **options):
        return self.start_client(relay_file=self.path, **options)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "relays.json")


@pytest_twisted.ensureDeferred
async def test_a_client_remembers_the_relays_it_chose(world):
    async with world:
        for number in range(2):
            world.add(number)
        client = world.client()
        world.memory.advance(5)
        assert (
            {one.public_key for one in opened(world.path, NOW_S + 9).relays}
            == set(client.pool.sessions)
            == {*RELAYS[:2]}
        )


def connected_for_months(world):
    """A client that has held sessions with two relays for as long as one that is not connected is remembered."""
    for number in range(2):
        world.add(number)
    client = world.client()
    world.memory.advance(5)
    world.memory.advance(module.AGE_LIMIT_S)
    return client


def remembered(world):
    """What the file holds now."""
    return {one.public_key for one in opened(world.path, world.memory.clock.seconds()).relays}


@pytest_twisted.ensureDeferred
async def test_relays_that_were_connected_all_the_time_are_not_forgotten(world):
    """What counts is when a relay was connected last, and not when its connection began."""
    async with world:
        for number in range(3):
            world.add(number, listed=number < 2)
        client = world.client()
        world.memory.advance(5)
        world.memory.advance(module.AGE_LIMIT_S)
        assert set(client.pool.sessions) == {*RELAYS[:2]}
        await client.stopService()
        assert remembered(world) == {*RELAYS[:2]}


@pytest_twisted.ensureDeferred
async def test_a_relay_that_was_lost_after_months_is_not_forgotten(world):
    async with world:
        client = connected_for_months(world)
        world.memory.refuse(place(0).host)
        client.pool.sessions[RELAYS[0]].abort()
        world.memory.advance(3600)
        await client.stopService()
        assert remembered(world) == {*RELAYS[:2]}


@pytest_twisted.ensureDeferred
async def test_a_relay_that_comes_back_says_that_the_other_one_is_still_there(world):
    async with world:
        client = connected_for_months(world)
        client.pool.sessions[RELAYS[0]].abort()
        world.memory.advance(10)
        assert set(client.pool.sessions) == {*RELAYS[:2]}
        assert remembered(world) == {*RELAYS[:2]}


@pytest_twisted.ensureDeferred
async def test_remembered_relays_are_found_though_only_sybils_are_listed(world):
    """Discovery's list has turned bad since the last run: 200 relays that take connections and are silent."""
    async with world:
        for number in range(2):
            world.add(number, listed=False)
        for number in range(200):
            host = f"10.0.{number}.1"
            world.memory.silence(host, 80)
            world.listing.add(SecretKey.generate(), HostPort(host, 80))
        world.remember(0, 1)
        client = world.client()
        world.memory.advance(2)
        assert set(client.pool.sessions) == {*RELAYS[:2]}


@pytest_twisted.ensureDeferred
async def test_remembered_relays_are_found_while_discovery_is_gone(world):
    async with world:
        world.add(0)
        world.listing.answers = False
        world.remember(0)
        client = world.client()
        world.memory.advance(3)
        assert set(client.pool.sessions) == {RELAYS[0]}


@pytest_twisted.ensureDeferred
async def test_a_relay_that_is_registered_no_more_is_forgotten(world):
    async with world:
        world.add(0)
        world.add(1)
        del world.listing.entries[RELAYS[1]]
        world.listing.listed.pop()
        world.remember(1)
        client = world.client()
        world.memory.advance(5)
        assert set(client.pool.sessions) == {RELAYS[0]}
        assert [one.public_key for one in opened(world.path, NOW_S + 9).relays] == [RELAYS[0]]


@pytest_twisted.ensureDeferred
async def test_a_remembered_relay_that_has_moved_to_a_network_in_use_is_looked_up_once(world):
    """Its owner could turn all clients that remember it on their discovery otherwise, each with a look-up after another."""
    async with world:
        world.add(0)
        world.remember(1)
        beside = HostPort(place(0).host.removesuffix(".1") + ".2", 80)
        world.listing.add(KEYS[1], beside, listed=False)
        world.listing.delay = lambda: deferLater(world.memory, 0.02)
        client = world.client()
        world.memory.advance(60)
        assert set(client.pool.sessions) == {RELAYS[0]}
        assert 1 <= world.listing.looked_up.count(RELAYS[1]) <= 2


@pytest_twisted.ensureDeferred
async def test_a_relay_that_only_a_dial_led_to_is_not_remembered(world):
    """A peer's entry names relays of its choice: a stranger must not fill the file with its own."""
    async with world:
        world.add(0)
        world.add(1, listed=False)
        client = world.client(min_servers=1)
        world.memory.advance(5)
        client.pool.get(RELAYS[1])
        world.memory.advance(5)
        assert set(client.pool.sessions) == {*RELAYS[:2]}
        await world.network.stop_client(client)
        assert [one.public_key for one in opened(world.path, NOW_S + 99).relays] == [RELAYS[0]]


@pytest_twisted.ensureDeferred
async def test_without_a_path_nothing_is_kept(world, tmp_path):
    async with world:
        world.add(0)
        world.path = None
        client = world.client()
        world.memory.advance(5)
        assert client.pool.sessions
        assert list(Path(tmp_path).iterdir()) == []
