"""The server's cost of forwarding one FWD, relative to the cryptography that the protocol demands.

The base is one ChaCha20-Poly1305 decryption and encryption of the same length, measured in the same repeat. Frames
come one in a record, as reference clients send them. ``pure`` is the switch alone, fed 64 KiB at a time; ``process`` is
all of the server process, sockets and reactor included.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from benchmarks.processes import Cast
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes
from dmsg.crypto.keys import SecretKey
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import ACCEPT, FWD, HEADER, REQUEST, encode_frame
from dmsg.mux.relay.member import Member
from dmsg.mux.relay.switch import Switch

NAME: Final = "relay_cost"
#: Data bytes in a frame, and its greatest cost in bases.
TARGETS: Final = ((64, 5.0), (1024, 6.0), (16384, 6.0))
_SMALL_FRAME_LIMIT_US: Final = 11.0
_READ_BYTES: Final = 65_536


def run(sizes: Sizes) -> list[Row]:
    """Rows for both forms and all sizes."""
    pure = _pure(sizes)
    process = _process(sizes)
    rows: list[Row] = []
    for form, costs in (("pure", pure), ("process", process)):
        for size, multiple in TARGETS:
            pairs = costs[size]
            name = f"{size} B, {form}"
            multiples = [cost / base for cost, base in pairs]
            rows.append(row(NAME, f"{name}, multiple of AEAD", multiples, "x", at_most=multiple))
            limit = _SMALL_FRAME_LIMIT_US if size == 64 else None
            rows.append(row(NAME, f"{name}, CPU a frame", [cost for cost, _ in pairs], "µs", at_most=limit))
    return rows


def aead_us(size: int, count: int) -> float:
    """CPU microseconds of one encryption and one decryption of ``size`` bytes."""
    cipher = ChaCha20Poly1305(os.urandom(32))
    nonce, data = bytes(12), os.urandom(size)
    began = time.process_time()
    for _ in range(count):
        cipher.decrypt(nonce, cipher.encrypt(nonce, data, None), None)
    return (time.process_time() - began) / count * 1e6


def _count(sizes: Sizes, size: int) -> int:
    return sizes.relay_frames if size < 8192 else sizes.relay_large_frames


def _pure(sizes: Sizes) -> dict[int, list[tuple[float, float]]]:
    costs: dict[int, list[tuple[float, float]]] = {size: [] for size, _ in TARGETS}
    for _ in range(sizes.repeats):
        for size, _ in TARGETS:
            count = _count(sizes, size)
            costs[size].append((_switch_us(size, count), aead_us(size, count)))
    return costs


def _switch_us(size: int, count: int) -> float:
    switch = Switch()
    asking, asking_records = _member(switch)
    asked, asked_records = _member(switch)

    def sent_to(member: Member, records: RecordLayer) -> bytes:
        switch.dirty.clear()
        return b"".join(records.open(member.data_to_send()))

    sent_to(asking, asking_records), sent_to(asked, asked_records)
    keys = asking.remote.raw + asked.remote.raw
    asking.receive_data(asking_records.seal(encode_frame(REQUEST, 2, keys)), 0)
    transport_id = HEADER.unpack_from(sent_to(asked, asked_records))[1]
    asked.receive_data(asked_records.seal(encode_frame(ACCEPT, transport_id, keys)), 0)
    sent_to(asking, asking_records)

    payload = b"\x00\x01" + os.urandom(size)
    records = b"".join(asking_records.seal(encode_frame(FWD, 2, payload)) for _ in range(count))
    reads = [records[at : at + _READ_BYTES] for at in range(0, len(records), _READ_BYTES)]
    gc.collect()
    began = time.process_time()
    for data in reads:
        switch.route(asking, data, 0)
        for member in switch.dirty:
            member.data_to_send()
        switch.dirty.clear()
    return (time.process_time() - began) / count * 1e6


def _member(switch: Switch) -> tuple[Member, RecordLayer]:
    key, there, back = SecretKey.generate(), os.urandom(32), os.urandom(32)
    member, _ = switch.add_member(key.public_key, RecordLayer(there, back), 0)
    return member, RecordLayer(back, there)


def _process(sizes: Sizes) -> dict[int, list[tuple[float, float]]]:
    costs: dict[int, list[tuple[float, float]]] = {size: [] for size, _ in TARGETS}
    with Cast() as cast:
        server = cast.start("server")
        receiver = cast.start("raw_receiver", server=server.facts)
        sender = cast.start("raw_sender", server=server.facts)
        receiver.send("accept")
        sender.ask("dial", target=receiver.facts["key"])
        receiver.answer()
        for _ in range(sizes.repeats):
            for size, _ in TARGETS:
                count = _count(sizes, size)
                sender.ask("prepare", size=size, count=count)
                # outgoing frames share records, so at least the frames themselves arrive
                receiver.send("drain", least_bytes=count * (size + 7), limit_s=60)
                before = server.cpu_s()
                sender.ask("send", timeout_s=60)
                receiver.answer()
                costs[size].append(((server.cpu_s() - before) / count * 1e6, aead_us(size, count)))
    return costs
