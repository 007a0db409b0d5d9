"""The cache of parsed entries: one version of each key, a bounded number of keys."""

from __future__ import annotations

from collections import OrderedDict
from threading import Event, Thread
from typing import Any

import pytest

from dmsg.discovery.errors import DiscoveryError
from dmsg.discovery.stores import parsed_entries
from dmsg.discovery.stores.parsed_entries import ParsedEntries


def test_an_entry_is_parsed_once(make_entry: Any) -> None:
    entries, body = ParsedEntries(), make_entry("alice").to_json()
    assert entries.parse(body) is entries.parse(bytes(bytearray(body)))
    assert entries.parse(body).to_json() == body


def test_the_versions_of_a_key_have_one_place(make_entry: Any) -> None:
    entries = ParsedEntries()
    others = [make_entry(f"client {n}").to_json() for n in range(3)]
    held = [entries.parse(body) for body in others]
    for sequence in range(20):
        body = make_entry("relay", sequence, address="10.0.0.1:80").to_json()
        assert entries.parse(body).sequence == sequence
    assert len(entries) == 4
    assert all(entries.parse(body) is entry for body, entry in zip(others, held, strict=True))


def test_an_earlier_version_may_come_back(make_entry: Any) -> None:
    """As from a copy of the store that lags behind."""
    entries = ParsedEntries()
    versions = [make_entry("relay", sequence, address="10.0.0.1:80").to_json() for sequence in (0, 1)]
    for body in versions * 3:
        assert entries.parse(body).to_json() == body
        assert len(entries) == 1


def test_the_entry_used_longest_ago_is_evicted(make_entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed_entries, "ENTRIES_LIMIT", 3)
    entries = ParsedEntries()
    first, second, *later = [make_entry(f"client {n}").to_json() for n in range(4)]
    kept, dropped = entries.parse(first), entries.parse(second)
    entries.parse(later[0])
    assert entries.parse(first) is kept
    entries.parse(later[1])
    assert len(entries) == 3
    assert entries.parse(first) is kept
    assert entries.parse(second) is not dropped


def test_another_thread_may_evict_an_entry_that_is_being_looked_up(
    make_entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's jobs run in two threads, and read entries there."""
    monkeypatch.setattr(parsed_entries, "ENTRIES_LIMIT", 1)
    looking, evicted = Event(), Event()

    class Slow(OrderedDict[bytes, Any]):
        def get(self, body: bytes, default: Any = None) -> Any:
            found = super().get(body, default)
            if found is not None:
                looking.set()
                evicted.wait(0.2)
            return found

    entries, other = ParsedEntries(), make_entry("bob").to_json()
    body = make_entry("alice").to_json()
    entries._entries = Slow()
    entries.parse(body)

    def evict() -> None:
        looking.wait()
        entries.parse(other)
        evicted.set()

    thread = Thread(target=evict)
    thread.start()
    try:
        assert entries.parse(body).to_json() == body
    finally:
        thread.join()
    assert len(entries) == 1


def test_text_that_is_no_entry_is_not_held() -> None:
    entries = ParsedEntries()
    with pytest.raises(DiscoveryError):
        entries.parse(b'{"version":')
    assert len(entries) == 0
