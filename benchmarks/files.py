"""The speed of ``dmsg send`` and ``dmsg receive``: a large file compared with the bare transport, and many small files.

A relay, ``dmsg receive`` and two clients that only send and count run all the time, sealed from end to end. In every repeat
the clients move as many bytes as the file has, then ``dmsg send`` the file, then many small files. The rate of a file is
the one that the command reports, from the first message about it to the confirmation that it is verified, synced and in
place. The time of the small files is that of the whole command, its start included. MB are 10^6 bytes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.commands import Command, send
from benchmarks.others import LeftOut
from benchmarks.others.files import Croc, Way, Wormhole
from benchmarks.processes import Cast, Child, process_cpu_s
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "files"
#: Least rate of a file, as a share of the transport's rate.
_TIMES_TRANSPORT: Final = 0.85
_WRITE_BYTES: Final = 16_384
_SMALL_BYTES: Final = 4_096
_PIECE_BYTES: Final = 1024 * 1024
_MB: Final = 1e6
_LIMIT_S: Final = 120.0


def run(sizes: Sizes) -> list[Row]:
    """Rows of a large file and its transport, then of many small files, by ours and by installed programs of others."""
    rates: dict[str, list[float]] = {"transport": [], "file": []}
    costs: dict[str, list[tuple[float, float]]] = {"transport": [], "file": []}
    times: dict[str, list[float]] = {}
    with Cast() as cast, tempfile.TemporaryDirectory(prefix="bench-files-") as directory:
        home = Path(directory)
        inbox = home / "inbox"
        inbox.mkdir()
        large = home / "large"
        write_random(large, sizes.file_bytes)
        server = cast.start("server")
        sink = cast.start("client", server=server.facts, security="e2e", listen="sink")
        source = cast.start("client", server=server.facts, security="e2e")
        relay = ("--server", f"{server.facts['key']}@127.0.0.1:{server.facts['port']}")
        receive = Command(cast, home, "receive", "receive", str(inbox), "--keep-free", "0", *relay)
        target = (receive.result["public_key"], *relay)
        others = _others(cast)
        for number in range(-1, sizes.repeats):  # the first one warms
            before = (server.cpu_s(), sink.cpu_s())
            rate = _push(source, sink, sizes.file_bytes)
            pushed = (server.cpu_s() - before[0], sink.cpu_s() - before[1])
            for path in inbox.iterdir():
                path.unlink()  # now, so that the next file can use its memory
            before = (server.cpu_s(), process_cpu_s(receive.pid))
            (sent,) = send((str(large),), target)
            filed = (server.cpu_s() - before[0], process_cpu_s(receive.pid) - before[1])
            if number < 0:
                continue
            for what, found, cost in (("transport", rate, pushed), ("file", sent["bytes_per_s"] / _MB, filed)):
                rates[what].append(found)
                costs[what].append((cost[0] / sizes.file_bytes * _MB * 1000, cost[1] / sizes.file_bytes * _MB * 1000))
            folder = home / f"small-{number}"
            folder.mkdir()
            for each in range(sizes.small_files):
                write_random(folder / f"{number}-{each}", _SMALL_BYTES)
            began = time.perf_counter()
            send([str(path) for path in folder.iterdir()], target)
            times.setdefault("dmsg send", []).append(time.perf_counter() - began)
            for one in list(others):
                to = home / f"{number}-by-{one.name.split()[0]}"
                to.mkdir()
                try:
                    times.setdefault(one.name, []).append(one.send(folder, to))
                except LeftOut as reason:
                    others.remove(one)
                    _leave_out(reason)
    return [*_large_rows(sizes, rates, costs), *_small_rows(sizes, times)]


def _large_rows(sizes: Sizes, rates: dict[str, list[float]], costs: dict[str, list[tuple[float, float]]]) -> list[Row]:
    name = f"a file of {sizes.file_bytes / 2**20:g} MiB"
    ratios = [file / transport for file, transport in zip(rates["file"], rates["transport"], strict=True)]
    rows = [
        row(NAME, f"{name}, dmsg send", rates["file"], "MB/s"),
        row(NAME, f"{name}, the transport alone", rates["transport"], "MB/s"),
        row(NAME, f"{name}, times the transport alone", ratios, "x", at_least=_TIMES_TRANSPORT),
    ]
    for what, whose in (("file", "dmsg receive"), ("transport", "the receiver of the transport alone")):
        rows.append(row(NAME, f"{name}, {whose}", [one for _, one in costs[what]], "ms CPU/MB"))
    rows.append(row(NAME, f"{name}, relay", [one for one, _ in costs["file"]], "ms CPU/MB"))
    return rows


def _small_rows(sizes: Sizes, times: dict[str, list[float]]) -> list[Row]:
    name = f"{sizes.small_files:,} files of 4 KiB"
    rows = []
    for whose, found in times.items():
        rows.append(row(NAME, f"{name}, {whose}", found, "s"))
        if whose != "dmsg send" and len(found) == len(times["dmsg send"]):
            ratios = [ours / theirs for ours, theirs in zip(times["dmsg send"], found, strict=True)]
            rows.append(row(NAME, f"{name}, dmsg send, times {whose}", ratios, "x"))
    return rows


def _others(cast: Cast) -> list[Any]:
    """Installed programs of others; reports missing ones."""
    found: list[Any] = []
    for make in (Croc, Wormhole):
        try:
            found.append(make(cast, Way(cast)))
        except LeftOut as reason:
            _leave_out(reason)
    return found


def _leave_out(reason: LeftOut) -> None:
    print(f"left out: {reason}", file=sys.stderr)


def _push(source: Child, sink: Child, amount: int) -> float:
    """MB/s."""
    total = max(1, amount // _WRITE_BYTES) * _WRITE_BYTES
    options = {"size": _WRITE_BYTES, "total": total, "transports": 1, "limit_s": _LIMIT_S}
    result = source.ask("push", target=sink.facts["key"], timeout_s=2 * _LIMIT_S, **options)
    if result["acked_bytes"] != total:
        raise RuntimeError(f"{total} sent, {result['acked_bytes']} acknowledged")
    rate: float = total / result["elapsed_s"] / _MB
    return rate


def write_random(path: Path, size: int) -> None:
    """A file that no compression makes smaller."""
    with path.open("wb") as file:
        for start in range(0, size, _PIECE_BYTES):
            file.write(os.urandom(min(_PIECE_BYTES, size - start)))
