"""Metadata of version 14: what is found in it, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scalecodec.base import RuntimeConfigurationObject, ScaleBytes
from scalecodec.type_registry import load_type_registry_preset

from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.metadata import MAX_METADATA_BYTES, Metadata, read_metadata
from dmsg.rmb.twins.scale import Reader, compact, with_length
from tests.rmb.twins.chain_bytes import EXTENSIONS, metadata


def test_numbers_are_the_nodes_own():
    assert read_metadata(metadata()) == Metadata(b"\x19\x12", (b"\x19\x0b", b"\x19\x0c"), EXTENSIONS)
    assert read_metadata(metadata(index=11)).update_twin == bytes.fromhex("0b12")
    assert read_metadata(metadata(update=200)).update_twin == b"\x19\xc8"
    assert read_metadata(metadata(extensions=["A", "B"])).extensions == ("A", "B")


def test_an_independent_library_reads_the_same():
    library = RuntimeConfigurationObject()
    library.update_type_registry(load_type_registry_preset("core"))
    read = library.create_scale_object("MetadataVersioned", ScaleBytes(Reader(metadata()).bytes(100_000)))
    read.decode()
    [pallet] = [one for one in read.pallets if one.name == "TfgridModule"]
    assert pallet.value["index"] == 25
    assert [one["identifier"] for one in read.value[1]["V14"]["extrinsic"]["signed_extensions"]] == list(EXTENSIONS)


@pytest.mark.parametrize(
    "data",
    [
        metadata(version=13),
        metadata(name="Another"),
        metadata(call="update_other"),
        metadata(calls=None),
        metadata(calls=99),
        metadata(extrinsics=5),
        metadata(extensions=["X"] * 33),
        metadata()[:-30],
        with_length(b"meta\x0e" + compact(2**32)),
        with_length(b"meta\x0e" + compact(2**32) + bytes(1000)),
        compact(MAX_METADATA_BYTES + 1) + bytes(MAX_METADATA_BYTES + 1),
        b"",
    ],
    ids=[
        "version",
        "no pallet",
        "no call",
        "no calls",
        "no type",
        "extrinsics",
        "extensions",
        "cut",
        "types",
        "zero types",
        "too long",
        "empty",
    ],
)
def test_other_metadata_is_refused(data):
    with pytest.raises(MalformedAnswer):
        read_metadata(data)


@pytest.mark.parametrize(
    "data",
    [
        compact(300_000) + (compact(1) + b"\0\0\1\0\0") * 300_000,  # types
        compact(3) + (compact(1) + b"\0\0\1\0" + compact(100_000) + bytes(100_000)) * 3,  # lines of documentation
    ],
    ids=["types", "lines"],
)
def test_more_things_than_any_chain_has_are_not_looked_at(data):
    with pytest.raises(MalformedAnswer) as error:
        read_metadata(with_length(b"meta\x0e" + data))
    assert error.value.problem == "more things than any chain has"


@given(st.data())
def test_altered_metadata_raises_nothing_else(data):
    good = metadata()
    place = data.draw(st.integers(0, len(good) - 1))
    altered = good[:place] + data.draw(st.binary(min_size=1, max_size=4)) + good[place + 1 :]
    try:
        read_metadata(altered)
    except MalformedAnswer:
        return
