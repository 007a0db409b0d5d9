"""What the generator says about a landing zone, held against the zone itself, read with nothing but ``json``."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from landing_zone import NAME, Zone, lines_of

from dmsg_logs.schemas import EVENTS
from dmsg_logs.synthetic import Truth, generate
from dmsg_logs.synthetic.texts import ADDED
from dmsg_logs.synthetic.traffic import Outcome, refusals

BUS_EVENTS = (
    "twin_session_opened",
    "twin_session_closed",
    "envelopes_routed",
    "envelope_failed",
    "rate_limited",
    "federation_attempted",
    "relay_rank_changed",
    "call_finished",
)


@pytest.fixture(scope="module")
def zone(tmp_path_factory: pytest.TempPathFactory) -> Zone:
    """Twelve thousand lines with everything that can be wrong."""
    out = tmp_path_factory.mktemp("zone")
    shares: dict[str, Any] = {"corrupt": 0.02, "duplicates": 0.05, "late": 0.03, "missing": 0.01, "newer": 0.01}
    return Zone(generate(out, events=12_000, seed=11, workers=1, **shares), out).read()


def test_lines_are_as_many_as_asked_for(zone: Zone) -> None:
    """in = good + dup + corrupt, and each of them is what the truth says and what was ordered."""
    truth = zone.truth
    assert sum(map(len, zone.lines.values())) == truth.lines == 12_000
    assert (len(zone.good), zone.dup, zone.corrupt) == (truth.good, truth.dup, truth.corrupt)
    assert (truth.dup, truth.corrupt, truth.missing) == (600, 240, 120)
    assert truth.good + truth.dup + truth.corrupt == truth.lines
    assert truth.late == pytest.approx(360, abs=20)
    assert truth.healed > 0
    assert sum(map(zone.is_newer, zone.good.values())) == truth.newer > 0
    assert sum(truth.corrupt_forms.values()) == truth.corrupt


def test_files_are_named_after_what_was_written(zone: Zone) -> None:
    """Digest, number of lines and places; only files that were cut have fewer lines than their names say."""
    short = []
    for name, lines in zone.lines.items():
        directory, _, file = name.rpartition("/")
        found = NAME.match(file)
        assert found
        packed = (zone.out / name).read_bytes()
        if len(lines) != int(found["lines"]):
            short.append(name)
        else:
            assert hashlib.sha256(packed).hexdigest()[:16] == found["digest"]
        assert directory.startswith("role=") and re.search(r"/date=2026-01-\d\d/hour=\d\d$", directory)
        assert all(line.endswith(b"\n") for line in lines)
    assert sorted(short) == zone.truth.missing_files != []
    assert sum(int(NAME.match(name.rpartition("/")[2])["lines"]) - len(zone.lines[name]) for name in short) == 120  # type: ignore[index]


def test_files_land_when_they_were_finished_or_days_later(zone: Zone) -> None:
    """The time a file landed is its modification time."""
    late = {file["name"] for file in zone.truth.file_list if file["late"]}
    assert len(late) == zone.truth.late_files > 0
    for name, lines in zone.lines.items():
        ends = [zone.good[key]["ts"] for key in _keys(lines) if key in zone.good]
        delay_s = (zone.out / name).stat().st_mtime - max(ends, default=0.0)
        if ends:
            assert (delay_s > 86_400) == (name in late), name


def _keys(lines: list[bytes]) -> list[tuple[str, str, int]]:
    keys = []
    for line in lines:
        try:
            value = json.loads(line)
            keys.append((value["node"], value["boot"], value["seq"]))
        except (ValueError, KeyError, TypeError):
            continue
    return keys


def test_truth_counts_events_and_runs(zone: Zone) -> None:
    """Counts by event and by run, gaps and what a log says it dropped."""
    assert Counter(value["event"] for value in zone.good.values()) == zone.truth.events
    runs: dict[tuple[str, str], list[int]] = {}
    for node, boot, seq in zone.good:
        runs.setdefault((node, boot), []).append(seq)
    assert len(runs) == len(zone.truth.runs)
    for run in zone.truth.runs:
        seqs = sorted(runs[run["node"], run["boot"]])
        steps = [b - a for a, b in itertools.pairwise(seqs)]
        assert (run["lines"], run["first_seq"], run["last_seq"]) == (len(seqs), seqs[0], seqs[-1])
        assert run["gaps"] == sum(step > 1 for step in steps)
        assert run["gap_lines"] == sum(step - 1 for step in steps)
        assert run["seq_sum"] == sum(seqs)
        own = [value for key, value in zone.good.items() if key[:2] == (run["node"], run["boot"])]
        assert run["events_dropped"] == sum(value["count"] for value in own if value["event"] == "events_dropped")
        assert run["ended"] == any(value["event"] == "server_stopped" for value in own)
    assert any(run["gap_lines"] for run in zone.truth.runs)
    assert {run["role"] for run in zone.truth.runs} == {"server", "client", "discovery", "shipper"}


def test_truth_counts_what_relays_wrote(zone: Zone) -> None:
    """Transports, bytes and refusals of each relay."""
    for key, counts in zone.truth.relays.items():
        own = [value for value in zone.good.values() if value["node"] == key[:16]]
        closed = [value for value in own if value["event"] == "transport_closed"]
        assert counts["transports_opened"] == sum(value["event"] == "transport_opened" for value in own)
        assert counts["transports_closed"] == sum(value["duration_s"] > 0 for value in closed)
        assert counts["transports_never_opened"] == sum(value["duration_s"] == 0 for value in closed)
        assert counts["bytes"] == sum(value["bytes_in"] + value["bytes_out"] for value in closed)
        assert counts["refusals"] == sum(value["count"] for value in own if value["event"] == "refused")
        assert counts["handshakes_failed"] == sum(value["event"] == "handshake_failed" for value in own)
        assert counts["connections_opened"] == sum(value["event"] == "connection_opened" for value in own)


def test_truth_counts_dials_and_resumptions(zone: Zone) -> None:
    """Dials, the leaves of their trees by relay, and transports that went on elsewhere."""
    dials = [value for value in zone.good.values() if value["event"] == "dial_finished"]
    assert zone.truth.dials["all"] == len(dials)
    assert zone.truth.dials["ok"] == sum(dial["ok"] for dial in dials)
    leaves: dict[str, Counter[str]] = {}
    for dial in dials:
        tree = json.loads(dial["attempts"])
        assert bool(tree) or dial["ok"]
        assert dial["reason"] in {"", *(leaf["reason"] for leaf in tree)}
        for leaf in tree:
            assert list(leaf) == ["stage", "server", "elapsed_ms", "reason", "detail"]
            leaves.setdefault(leaf["server"], Counter())[f"{leaf['stage']}/{leaf['reason']}"] += 1
    assert leaves == zone.truth.dial_failures
    resumed = [value for value in zone.good.values() if value["event"] == "transport_resumed"]
    assert Counter(f"{value['server']} {value['reason']}" for value in resumed) == zone.truth.resumptions
    assert resumed


def test_truth_counts_what_went_over_the_bus(zone: Zone) -> None:
    """Sessions of twins, envelopes, posts to other relays and calls; both sides tell the same of a session."""
    values = [value for value in zone.good.values() if value["event"] in BUS_EVENTS]
    assert {value["event"] for value in values} == set(BUS_EVENTS)
    found: dict[str, Counter[str]] = {name: Counter() for name in zone.truth.bus}
    for value in values:
        name, node, count = value["event"], value["node"], value.get("count", 1)
        if name == "twin_session_opened" and value["role"] == "server":
            found["sessions"][node] += 1
        elif name == "envelopes_routed":
            for way, amount in value.items():
                if f"{node} {way}" in zone.truth.bus["envelopes"]:
                    found["envelopes"][f"{node} {way}"] += amount
        elif name in ("envelope_failed", "rate_limited"):
            found["failures" if name == "envelope_failed" else "limits"][node] += count
        elif name == "federation_attempted":
            assert value["relay"] != node and value["ok"] == (not value["reason"])
            found["attempts"][f"{node} {value['relay']}"] += count
            found["failed"][f"{node} {value['relay']}"] += 0 if value["ok"] else count
        elif name == "call_finished":
            found["calls"][value["reason"]] += count
    assert found == zone.truth.bus
    assert set(zone.truth.bus["sessions"]) == set(zone.truth.planted["bus_relays"])
    routed = zone.truth.bus["envelopes"]
    for relay in zone.truth.planted["bus_relays"]:
        ways = {way: routed[f"{relay} {way}"] for way in ("local", "stored", "federated", "refused")}
        assert sum(ways.values()) == routed[f"{relay} received"] + routed[f"{relay} ingested"]


def test_some_programs_are_of_the_version_before(zone: Zone) -> None:
    """Their lines have the version before and none of the fields that came since; all others have every field."""
    seen: Counter[bool] = Counter()
    for value in zone.good.values():
        version, names = EVENTS[value["event"]].version, {column.name for column in EVENTS[value["event"]].columns}
        if value["event"] in ADDED and not zone.is_newer(value):
            older = value["v"] == version - 1
            seen[older] += 1
            assert names - value.keys() == (set(ADDED[value["event"]]) if older else set())
        else:
            assert names <= value.keys()
    assert seen[True] > 20 and seen[False] > 1000


def test_some_relays_are_of_the_messaging_system(tmp_path: Path) -> None:
    """Lines about them say so, and clients speak both protocols with one key."""
    truth = generate(tmp_path, events=6_000, seed=4, relays=4, workers=1)
    protocols = truth.planted["protocols"]
    assert sorted(protocols.values()) == ["dmsg", "dmsg", "dmsg", "messaging"]
    values = [json.loads(line) for path in tmp_path.rglob("*.zst") for line in lines_of(path)]
    told = [value for value in values if value["event"] in ADDED and value["role"] in ("server", "client")]
    for value in told:
        relay = value.get("server", value.get("public_key"))
        assert value.get("protocol", "dmsg") == (protocols[relay] if relay else value.get("protocol", "dmsg"))
        leaves = json.loads(value.get("attempts", "[]"))
        assert {protocols[leaf["server"]] for leaf in leaves if leaf["server"]} <= {value.get("protocol", "dmsg")}
    dials = [value for value in told if value["event"] == "dial_finished"]
    assert truth.dials["messaging"] == sum(value.get("protocol") == "messaging" for value in dials) > 10
    spoken: dict[str, set[str]] = {}
    for value in dials:
        spoken.setdefault(value["initiator"], set()).add(value.get("protocol", "dmsg"))
    assert {"dmsg", "messaging"} in spoken.values() and {"dmsg"} in spoken.values()


def test_both_ends_and_the_relay_tell_the_same_story(tmp_path: Path) -> None:
    """Every transport a client opened was opened on its relay, with the same bytes at its end."""
    generate(tmp_path, events=6_000, seed=4, workers=1)
    values = [json.loads(line) for path in tmp_path.rglob("*.zst") for line in lines_of(path)]
    by_role = {
        role: Counter(
            (value["initiator"], value["responder"], value["server"])
            for value in values
            if value["role"] == role and value["event"] == "transport_opened"
        )
        for role in ("server", "client")
    }
    resumed = Counter(
        (value["initiator"], value["responder"], value["server"])
        for value in values
        if value["event"] == "transport_resumed"
    )
    assert sum(by_role["server"].values()) > 300
    for ends, count in by_role["server"].items():  # at the end, some clients may not have written their last events
        assert abs(by_role["client"][ends] + 2 * resumed[ends] - 2 * count) <= 2, ends
    at = [(value["node"], value["boot"], value["seq"], value["ts"]) for value in values]
    assert all(a[3] <= b[3] for a, b in zip(sorted(at), sorted(at)[1:], strict=False) if a[:2] == b[:2])


def test_planted_troubles_show(tmp_path: Path) -> None:
    """The slow relay is the slowest, the failing one fails most, abusers are refused most, liars slander one relay."""
    truth = generate(tmp_path, events=30_000, seed=5, workers=1)
    values = [json.loads(line) for path in tmp_path.rglob("*.zst") for line in lines_of(path)]
    accept_ms: dict[str, list[float]] = {}
    refusals: Counter[str] = Counter()
    lies: Counter[str] = Counter()
    liars = {key[:16] for key in truth.planted["lying_keys"]}
    for value in values:
        if value["event"] == "transport_opened" and value["role"] == "server":
            accept_ms.setdefault(value["server"], []).append(value["accept_ms"])
        elif value["event"] == "refused" and value["reason"] == "rate_limited":
            refusals[value["remote"]] += value["count"]
        elif value["event"] == "dial_finished" and value["node"] in liars and not value["ok"]:
            lies.update(leaf["server"] for leaf in json.loads(value["attempts"]))
    means = {relay: sum(times) / len(times) for relay, times in accept_ms.items()}
    assert max(means, key=lambda relay: means[relay]) == truth.planted["slow_relay"]
    assert {key for key, _ in refusals.most_common(len(truth.planted["abusive_keys"]))} == set(
        truth.planted["abusive_keys"]
    )
    assert lies.most_common(1)[0][0] == truth.planted["slandered_relay"]
    others = set(truth.planted["relays"]) - {truth.planted["failing_relay"], truth.planted["slandered_relay"]}
    failures = {
        relay: leaves.get("accept/busy", 0) + leaves.get("accept/handshake_timeout", 0)
        for relay, leaves in truth.dial_failures.items()
    }
    assert all(failures[truth.planted["failing_relay"]] > 3 * failures[relay] for relay in others)


def _digests(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.rglob("*")
        if path.is_file()
    }


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """With any number of processes; another seed gives others."""
    shares: dict[str, Any] = {"corrupt": 0.01, "duplicates": 0.02, "late": 0.01}
    for name, seed, workers in (("a", 1, 1), ("b", 1, 3), ("c", 2, 1)):
        generate(tmp_path / name, events=4_000, seed=seed, workers=workers, **shares)
    assert _digests(tmp_path / "a") == _digests(tmp_path / "b") != _digests(tmp_path / "c")
    truth = Truth.read(tmp_path / "a")
    assert truth.lines == 4_000 and truth.seed == 1


@pytest.mark.parametrize(("events", "duplicates"), [(1, 0.1), (37, 0.1), (900, 0.1), (900, 0.5)])
def test_any_number_of_lines(tmp_path: Path, events: int, duplicates: float) -> None:
    """Also fewer than a whole fleet has to tell."""
    truth = generate(tmp_path, events=events, corrupt=0.1, duplicates=duplicates, late=0.1)
    assert sum(len(lines_of(path)) for path in tmp_path.rglob("*.zst")) == truth.lines == events


def test_what_makes_no_fleet_is_refused(tmp_path: Path) -> None:
    """Wrong shares and sizes, fleets that no memory holds, and a directory that is in use."""
    with pytest.raises(ValueError, match="corrupt"):
        generate(tmp_path / "a", events=100, corrupt=0.9)
    with pytest.raises(ValueError, match="relays"):
        generate(tmp_path / "a", events=100, relays=1)
    for days in (39, 366):
        with pytest.raises(ValueError, match="too many at once"):
            generate(tmp_path / "c", events=300, relays=100, clients=1000, days=days)
    assert not (tmp_path / "c").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thing").touch()
    with pytest.raises(FileExistsError):
        generate(tmp_path / "b", events=100)


_RE_ENCODE = """
import json, sys
from dmsg.eventlog.schema import EVENTS
from dmsg.eventlog.log import Encoder

for line in sys.stdin.buffer:
    value = json.loads(line)
    cls = EVENTS[value["event"]]
    if value["v"] < cls.VERSION:
        continue
    encoder = Encoder(value["role"], value["node"], value["boot"])
    encoder.seq = value["seq"]
    fields = {name: value[name] for name in value if name not in ("event", "v", "ts", "role", "node", "boot", "seq")}
    again = encoder.encode(cls(**fields), value["ts"])
    if again != line:
        sys.exit(f"{line!r} is not {again!r}")
print("same")
"""


def test_lines_are_those_of_the_event_log(tmp_path: Path) -> None:
    """Byte for byte what the writer of the logs makes of the same events."""
    pytest.importorskip("coincurve")
    generate(tmp_path, events=3_000, seed=8, workers=1)
    lines = b"".join(line for path in sorted(tmp_path.rglob("*.zst")) for line in lines_of(path))
    done = subprocess.run([sys.executable, "-c", _RE_ENCODE], input=lines, capture_output=True, check=False, timeout=60)
    assert done.stdout.strip() == b"same", done.stderr.decode()[-2000:]


def test_large_fleets_have_the_same_refusals_in_lines_and_truth() -> None:
    """Numbers of dials come in 32 bits from one place and in 64 from the other; a product of them needs the latter."""
    dial = np.array([0, 271_180, 500_000, 2**31 - 1])
    outcome = np.full(len(dial), Outcome.RATE_LIMITED)
    expected = [1 + int(each) * 7919 % 23 for each in dial]
    assert refusals(outcome, dial.astype(np.int64)).tolist() == expected
    assert refusals(outcome, dial.astype(np.int32)).tolist() == expected
