"""Bytes as a node of tfchain serves them, made from the recorded facts: metadata, twins, events."""

from __future__ import annotations

from dmsg.rmb.twins.scale import compact, optional, with_length

#: Facts of the recorded runtime: vector chain/event-indices.
PALLET, UPDATE_TWIN, TWIN_STORED, TWIN_UPDATED = 25, 18, 11, 12
EXTENSIONS = (
    "CheckNonZeroSender",
    "CheckSpecVersion",
    "CheckTxVersion",
    "CheckGenesis",
    "CheckMortality",
    "CheckNonce",
    "CheckWeight",
    "ChargeTransactionPayment",
)


def text(value):
    return with_length(value.encode())


def listed(*items):
    return compact(len(items)) + b"".join(items)


def field(kind, name=None):
    of = None if name is None else b"a type's name"
    return optional(None if name is None else name.encode()) + compact(kind) + optional(of) + listed(text("a doc"))


def variant(name, index, *fields):
    return text(name) + listed(*fields) + bytes([index]) + listed(text("a doc"))


def a_type(number, path, kind, content, parameters=()):
    return compact(number) + listed(*map(text, path)) + listed(*parameters) + bytes([kind]) + content + listed()


def pallet(name, index, calls=None, events=None, storage=None, errors=None):
    return (
        text(name)
        + (b"\0" if storage is None else b"\1" + storage)
        + b"".join(b"\0" if kind is None else b"\1" + compact(kind) for kind in (calls, events))
        + listed(text("AConstant") + compact(0) + with_length(b"\1\2\3\4") + listed(text("a doc")))
        + (b"\0" if errors is None else b"\1" + compact(errors))
        + bytes([index])
    )


def metadata(
    *,
    index=PALLET,
    update=UPDATE_TWIN,
    extensions=EXTENSIONS,
    name="TfgridModule",
    version=14,
    call="update_twin",
    calls=11,
    extrinsics=4,
):
    """The runtime's metadata, with a type of every kind, as ``state_call`` gives it."""
    types = [
        a_type(0, (), 5, b"\5"),  # u32
        a_type(1, ("sp_core", "AccountId32"), 0, listed(field(4))),
        a_type(2, (), 5, b"\3"),  # u8
        a_type(3, ("pallet", "Twin"), 0, listed(field(0, "id"), field(1, "account_id"))),
        a_type(4, (), 3, (32).to_bytes(4, "little") + compact(2)),  # [u8; 32]
        a_type(5, (), 2, compact(2)),  # Vec<u8>
        a_type(6, ("Option",), 1, listed(variant("None", 0), variant("Some", 1, field(5))), [text("T") + b"\1\x14"]),
        a_type(7, (), 6, compact(0)),  # Compact<u32>
        a_type(8, (), 4, listed(compact(0), compact(2))),  # (u32, u8)
        a_type(9, (), 7, compact(2) + compact(10)),  # bits
        a_type(10, ("bitvec", "order", "Lsb0"), 0, listed(), [text("T") + b"\0"]),
        a_type(11, ("pallet", "Call"), 1, listed(variant("create_twin", 17), variant(call, update, field(6, "relay")))),
        a_type(
            12,
            ("pallet", "Event"),
            1,
            listed(variant("TwinStored", TWIN_STORED, field(3)), variant("TwinUpdated", TWIN_UPDATED, field(3))),
        ),
    ]
    entries = listed(
        text("TwinID") + b"\1\0" + compact(0) + with_length(bytes(4)) + listed(),
        text("Twins") + b"\0\1" + listed(b"\2") + compact(0) + compact(3) + with_length(b"\0") + listed(text("a doc")),
    )
    pallets = [pallet("System", 0), pallet(name, index, calls, 12, text(name) + entries, 6), pallet("Other", 30, 6)]
    extrinsic = compact(5) + bytes([extrinsics]) + listed(*(text(one) + compact(0) + compact(0) for one in extensions))
    inner = b"meta" + bytes([version]) + listed(*types) + listed(*pallets) + extrinsic + compact(0)
    return with_length(inner)


def twin(number, account, relays=None, pk=None):
    """A stored twin."""
    relay = None if relays is None else relays.encode()
    return number.to_bytes(4, "little") + account + optional(relay) + listed() + optional(pk)


def events(*of_twins):
    """The events of a block: one of another pallet, and for each twin's bytes that it was updated."""
    started = b"\0" + bytes(4) + b"\0\0" + bytes(20) + listed()
    phase = b"\0" + (1).to_bytes(4, "little")
    return listed(started, *(phase + bytes([PALLET, TWIN_UPDATED]) + one + listed() for one in of_twins))
