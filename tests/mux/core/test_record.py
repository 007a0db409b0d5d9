"""Sealed records (:ref:`spec-records`): any chunking opens to the same bytes; what is out of place does not open."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.aead import AES_MESSAGES, Cipher
from dmsg.crypto.errors import NonceExhausted
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.record import COUNTER_LIMIT, COUNTER_SOFT_LIMIT, RECORD_MIN_BYTES, RecordLayer
from dmsg.mux.core.wire import RECORD_PLAINTEXT_LIMIT_BYTES
from dmsg.testing.strategies import cuts

ONE, OTHER = bytes(32), bytes(range(32))


def pair() -> tuple[RecordLayer, RecordLayer]:
    return RecordLayer(ONE, OTHER), RecordLayer(OTHER, ONE)


def at(counter: int) -> tuple[RecordLayer, RecordLayer]:
    """A pair that has sent and received ``counter`` records."""
    sender, reader = pair()
    sender._sent = reader._received = counter
    return sender, reader


plaintexts = st.lists(st.binary(max_size=50), max_size=8)


@given(plaintexts, st.data())
def test_any_chunking_opens_to_the_same_plaintexts(wanted: list[bytes], data: st.DataObject) -> None:
    sender, reader = pair()
    stream = b"".join(map(sender.seal, wanted))
    opened: list[bytes] = []
    for piece in data.draw(cuts(stream)):
        opened += reader.open(piece)
    assert opened == wanted


@given(plaintexts, st.data())
def test_what_is_read_into_one_buffer_again_and_again_opens_to_the_same(
    wanted: list[bytes], data: st.DataObject
) -> None:
    sender, reader = pair()
    stream = b"".join(map(sender.seal, wanted))
    buffer = bytearray(len(stream))
    opened: list[bytes] = []
    for piece in data.draw(cuts(stream)):
        buffer[: len(piece)] = piece
        opened += reader.open(memoryview(buffer)[: len(piece)])
        buffer[:] = b"?" * len(buffer)
    assert opened == wanted


def test_full_records_read_four_at_a_time_and_one_byte_askew() -> None:
    sender, reader = pair()
    wanted = [bytes((number,)) * RECORD_PLAINTEXT_LIMIT_BYTES for number in range(12)]
    stream = b"".join(map(sender.seal, wanted))
    step = 4 * 65_537 - 1
    assert [
        one for at in range(0, len(stream), step) for one in reader.open(memoryview(stream)[at : at + step])
    ] == wanted


def test_a_read_of_nothing_leaves_what_has_begun() -> None:
    for begun in range(30):
        sender, reader = pair()
        record = sender.seal(b"ten bytes.")
        assert reader.open(record[:begun]) == reader.open(b"") == []
        assert reader.open(record[begun:]) == [b"ten bytes."]


@given(plaintexts)
def test_byte_at_a_time(wanted: list[bytes]) -> None:
    sender, reader = pair()
    stream = b"".join(map(sender.seal, wanted))
    assert [p for at in range(len(stream)) for p in reader.open(stream[at : at + 1])] == wanted


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=4), st.data())
@settings(max_examples=200)
def test_any_changed_bit_is_noticed(wanted: list[bytes], data: st.DataObject) -> None:
    sender, reader = pair()
    stream = bytearray(b"".join(map(sender.seal, wanted)))
    bit = data.draw(st.integers(0, len(stream) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    opened: list[bytes] = []
    try:
        for position in range(len(stream)):
            opened += reader.open(bytes(stream[position : position + 1]))
    except RemoteProtocolError as error:
        assert error.stage == "record"
    else:
        # a length that grew: the reader waits for bytes that never come, and gave out nothing it should not have
        assert len(opened) < len(wanted)
    assert opened == wanted[: len(opened)]


@given(st.integers(2, 6), st.data())
def test_dropped_repeated_and_swapped_records_are_noticed(count: int, data: st.DataObject) -> None:
    sender, reader = pair()
    records = [sender.seal(bytes((n,))) for n in range(count)]
    what = data.draw(st.sampled_from(["drop", "repeat", "swap"]))
    at = data.draw(st.integers(0, count - 2))
    if what == "drop":
        del records[at]
    elif what == "repeat":
        records.insert(at, records[at])
    else:
        records[at], records[at + 1] = records[at + 1], records[at]
    opened: list[bytes] = []
    with pytest.raises(RemoteProtocolError, match="out of sequence"):
        for record in records:
            opened += reader.open(record)
    assert opened == [bytes((n,)) for n in range(len(opened))]


@given(st.binary(max_size=200))
def test_any_bytes_raise_nothing_but_a_protocol_error(data: bytes) -> None:
    _, reader = pair()
    try:
        assert reader.open(data) == []
    except RemoteProtocolError as error:
        assert error.stage == "record"


@pytest.mark.parametrize("size", range(RECORD_MIN_BYTES))
def test_packets_of_0_to_19_bytes(size: int) -> None:
    _, reader = pair()
    with pytest.raises(RemoteProtocolError, match="too short"):
        reader.open(size.to_bytes(2, "big"))


def test_layout() -> None:
    sender, _ = pair()
    record = sender.seal(b"plain")
    assert record[:6].hex() == "0019" + "00000001"
    nonce = bytes(4) + (1).to_bytes(8, "little")
    assert ChaCha20Poly1305(ONE).decrypt(nonce, record[6:], None) == b"plain"
    assert sender.seal(b"")[:6].hex() == "0014" + "00000002"


def test_the_two_directions_have_keys_and_counters_of_their_own() -> None:
    sender, reader = pair()
    assert reader.open(sender.seal(b"there")) == [b"there"]
    assert sender.open(reader.seal(b"back")) == [b"back"]
    with pytest.raises(RemoteProtocolError, match="does not open"):
        pair()[0].open(pair()[0].seal(b"reflected"))


@pytest.mark.parametrize(
    ("size", "records"),
    [
        (0, 1),
        (RECORD_PLAINTEXT_LIMIT_BYTES, 1),
        (RECORD_PLAINTEXT_LIMIT_BYTES + 1, 2),
        (3 * RECORD_PLAINTEXT_LIMIT_BYTES, 3),
    ],
)
def test_as_few_records_as_hold_it(size: int, records: int) -> None:
    sender, reader = pair()
    plaintext = bytes(size)
    opened = reader.open(sender.seal(plaintext))
    assert len(opened) == records
    assert b"".join(opened) == plaintext


def test_an_incomplete_packet_is_all_that_is_kept() -> None:
    sender, reader = pair()
    longest = sender.seal(bytes(RECORD_PLAINTEXT_LIMIT_BYTES))
    assert len(longest) == 65_537
    assert reader.open(longest[:-1]) == []
    assert reader.open(longest[-1:] + sender.seal(b"next")) == [bytes(RECORD_PLAINTEXT_LIMIT_BYTES), b"next"]


def test_the_counter_ends_before_it_wraps() -> None:
    sender, reader = at(COUNTER_LIMIT - 1)
    assert reader.open(sender.seal(b"last")) == [b"last"]
    with pytest.raises(NonceExhausted):
        sender.seal(b"one too many")
    with pytest.raises(NonceExhausted):
        sender.seal(bytes(2 * RECORD_PLAINTEXT_LIMIT_BYTES))
    sender, reader = at(COUNTER_LIMIT)
    nonce = bytes(4) + (COUNTER_LIMIT + 1).to_bytes(8, "little")
    body = (COUNTER_LIMIT + 1).to_bytes(4, "big") + ChaCha20Poly1305(ONE).encrypt(nonce, b"", None)
    with pytest.raises(RemoteProtocolError, match="out of sequence"):
        reader.open(len(body).to_bytes(2, "big") + body)


def test_near_exhaustion_is_told_long_before_the_last_counter() -> None:
    sender, reader = at(COUNTER_SOFT_LIMIT - 1)
    assert not sender.near_exhaustion and not reader.near_exhaustion
    reader.open(sender.seal(b""))
    assert sender.near_exhaustion and reader.near_exhaustion


# --- AES (:ref:`spec-ciphers`) ---------------------------------------------------------------------------------------


def aes(records: int = AES_MESSAGES) -> tuple[RecordLayer, RecordLayer]:
    return (
        RecordLayer(ONE, OTHER, Cipher.AES, aes_records=records),
        RecordLayer(OTHER, ONE, Cipher.AES, aes_records=records),
    )


def sealed_by(key: bytes, counter: int, plaintext: bytes) -> bytes:
    """A record of AES-256-GCM, made by hand."""
    body = counter.to_bytes(4, "big") + AESGCM(key).encrypt(bytes(4) + counter.to_bytes(8, "little"), plaintext, None)
    return len(body).to_bytes(2, "big") + body


def key_behind(key: bytes) -> bytes:
    """Noise's REKEY, by hand."""
    return AESGCM(key).encrypt(bytes(4) + b"\xff" * 8, bytes(32), b"")[:32]


def test_layout_with_aes() -> None:
    sender, reader = aes()
    assert [sender.seal(b"plain"), sender.seal(b"")] == [sealed_by(ONE, 1, b"plain"), sealed_by(ONE, 2, b"")]
    assert reader.open(sealed_by(ONE, 1, b"plain") + sealed_by(ONE, 2, b"")) == [b"plain", b""]


def test_an_aes_key_is_followed_by_the_next_one_in_each_direction() -> None:
    sender, reader = aes(3)
    second = key_behind(ONE)
    keys = [ONE] * 3 + [second] * 3 + [key_behind(second)] * 2
    records = [sender.seal(bytes((n,))) for n in range(8)]
    assert records == [sealed_by(key, n + 1, bytes((n,))) for n, key in enumerate(keys)]
    assert reader.open(b"".join(records)) == [bytes((n,)) for n in range(8)]
    # The other direction counts its own records.
    assert reader.seal(b"first") == sealed_by(OTHER, 1, b"first")


@given(plaintexts, st.integers(1, 3), st.data())
def test_any_chunking_opens_to_the_same_plaintexts_with_aes(
    wanted: list[bytes], records: int, data: st.DataObject
) -> None:
    sender, reader = aes(records)
    stream = b"".join(map(sender.seal, wanted))
    opened: list[bytes] = []
    for piece in data.draw(cuts(stream)):
        opened += reader.open(piece)
    assert opened == wanted


def test_a_record_under_the_key_before_does_not_open() -> None:
    _, reader = aes(1)
    assert reader.open(sealed_by(ONE, 1, b"")) == [b""]
    with pytest.raises(RemoteProtocolError, match="does not open"):
        reader.open(sealed_by(ONE, 2, b""))


def test_an_aes_key_seals_2_to_the_22_records() -> None:
    """Side by side in one process, as many as that take too long; the 16 around the change show it."""
    sender, reader = aes()
    sender._sent = reader._received = 2**22 - 8
    records = [sender.seal(b"") for _ in range(16)]
    assert records == [sealed_by(ONE if n <= 2**22 else key_behind(ONE), n, b"") for n in range(2**22 - 7, 2**22 + 9)]
    assert reader.open(b"".join(records)) == [b""] * 16


@pytest.mark.parametrize("cipher", Cipher)
def test_the_counter_ends_before_it_wraps_whatever_the_cipher(cipher: Cipher) -> None:
    """The counter reaches its limit before the second AES key has sealed as many records as it may."""
    sender = RecordLayer(ONE, OTHER, cipher, aes_records=COUNTER_LIMIT // 2 + 1)
    reader = RecordLayer(OTHER, ONE, cipher, aes_records=COUNTER_LIMIT // 2 + 1)
    sender._sent = reader._received = COUNTER_LIMIT // 2
    reader.open(sender.seal(b"") + sender.seal(b""))
    sender._sent = reader._received = COUNTER_LIMIT - 1
    assert reader.open(sender.seal(b"last")) == [b"last"]
    with pytest.raises(NonceExhausted):
        sender.seal(b"one too many")
    body = (COUNTER_LIMIT + 1).to_bytes(4, "big") + bytes(16)
    with pytest.raises(RemoteProtocolError, match="out of sequence"):
        reader.open(len(body).to_bytes(2, "big") + body)
