"""``twistd dmsg-discovery --ranks``: settings that cannot work, and a discovery that goes by a signed file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.ranks import sign_ranks
from dmsg.taps.discovery import Options, makeService
from dmsg.testing.process import free_port

from .conftest import Program
from .test_twistd import get

OPERATOR = SecretKey(b"\x21" * 32)
KEY = str(OPERATOR.public_key)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--ranks", "ranks.json"], "ranks_key: must be given with ranks"),
        (["--ranks", "ranks.json", "--ranks-key", "02ab"], "ranks_key: a public key is written as 66 hex digits"),
        (["--ranks", "ranks.json", "--ranks-key", ", "], "ranks_key: must not be an empty list"),
        (
            ["--ranks", "ranks.json", "--ranks-key", KEY, "--ranks-refresh-s", "0"],
            "ranks_refresh_s: must be more than 0",
        ),
        (
            ["--ranks", "https://me:secret@host/ranks", "--ranks-key", KEY],
            "ranks: a URL with a user or password is not",
        ),
        (["--ranks", "https://[host/ranks", "--ranks-key", KEY], "ranks: is not a URL"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], problem: str, tmp_path: Path) -> None:
    options = Options({})
    with pytest.raises(SystemExit, match=problem):
        options.parseOptions(["--listen", "tcp:0:interface=127.0.0.1", *arguments])
        makeService(options)


def test_a_file_is_the_same_whatever_directory_a_daemon_goes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    both = f"{KEY},{SecretKey(b'x' * 32).public_key}"
    options = Options({"DMSG_RANKS": "ranks.json", "DMSG_RANKS_KEY": both})
    options.parseOptions(["--listen", "tcp:0:interface=127.0.0.1"])
    service = makeService(options)
    assert service.ranks is not None
    assert service.ranks.location == str(tmp_path / "ranks.json")
    options.parseOptions(["--ranks", "https://example.org/ranks", "--listen", "tcp:0:interface=127.0.0.1"])
    service = makeService(options)
    assert service.ranks is not None and service.ranks.location == "https://example.org/ranks"


@pytest.mark.system
@pytest.mark.time_limit(90)
def test_a_discovery_hands_out_the_file_it_was_given(start: Callable[..., Program], tmp_path: Path) -> None:
    names = ("score", "success", "latency", "capacity", "drops")
    document: dict[str, Any] = {
        "format": "dmsg-relay-ranks",
        "version": 1,
        "issued": int(time.time()) - 10,
        "lifetime_s": 86_400,
        "window_s": 3600,
        "relays": {KEY: dict.fromkeys(names, 700) | {"dials": 1, "clients": 1}},
        "excluded": {"clients": 0, "events": 0},
    }
    (tmp_path / "ranks.json").write_bytes(sign_ranks(document, OPERATOR))
    port, admin = free_port(), free_port()
    command = ["twistd", "-n", "--pidfile=", "dmsg-discovery", "--listen", f"tcp:{port}:interface=127.0.0.1"]
    ranks = ["--ranks", "ranks.json", "--ranks-key", KEY, "--ranks-refresh-s", "0.1"]
    program = start(*command, "--admin", f"tcp:{admin}:interface=127.0.0.1", "--events", "-", *ranks)
    told = json.loads("{" + program.wait_for('"event":"ranks_loaded",').join(["", ""]).lstrip(","))
    assert (told["ok"], told["reason"], told["relays"], told["issuer"]) == (True, "", 1, KEY)
    status, handed = get(port, "/discovery/relay_ranks")
    assert (status, handed["issued"], handed["relays"]) == (200, document["issued"], document["relays"])
    metrics = get(admin, "/metrics")[1]
    assert 'dmsg_ranks_documents_total{result="ok"} 1.0' in metrics
    assert "dmsg_discovery_ranked_relays 1.0" in metrics and "dmsg_discovery_ranks_freshness 1.0" in metrics
    (tmp_path / "ranks.json").write_bytes(b"{}")
    program.wait_for('"reason":"wrong_format"')
    assert get(port, "/discovery/relay_ranks")[0] == 200
    assert program.terminate() == 0
