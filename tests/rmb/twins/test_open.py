"""Opening a registry as settings name it."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet import reactor

from dmsg.errors import ConfigError
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.twins.blocks import BlockConfig
from dmsg.rmb.twins.open import check_registry_file, open_registry, parse_genesis
from dmsg.rmb.twins.substrate import Substrate
from dmsg.rmb.twins.table import TwinTable
from tests.rmb.twins.fake_node import Chain, FakeNode

KEY = TwinKey(bytes([5]) * 32, KeyType.SR25519)
PK = b"\2" + bytes(32)


@pytest_twisted.ensureDeferred
async def test_a_file(tmp_path):
    table = TwinTable(str(tmp_path / "twins"))
    table.create(KEY, ["localhost"], None)
    table.close()
    registry = open_registry(reactor, str(tmp_path / "twins"))
    assert await registry.find(KEY.account) == 1
    await registry.close()


def test_a_file_that_cannot_be_reached_is_not_told_to_be_missing(tmp_path):
    """It would be made anew at a wrong place, or not at all."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path, why in (("file/twins", "Not a directory"), ("loop", "Too many levels of symbolic links")):
        with pytest.raises(ConfigError) as caught:
            check_registry_file(str(tmp_path / path))
        assert str(caught.value) == f"registry: {tmp_path / path} cannot be used ({why})"
    with pytest.raises(ConfigError, match="there is no such file; dmsg rmb twin create makes one"):
        check_registry_file(str(tmp_path / "twins"))


@pytest_twisted.ensureDeferred
async def test_a_node_over_a_socket():
    chain = Chain()
    chain.twin(7, KEY.account, "old.example")
    node = FakeNode(reactor, chain, 0, "127.0.0.1")
    url = f"ws://127.0.0.1:{node.port.getHost().port}"
    registry = open_registry(reactor, None, [url], BlockConfig())
    assert (await registry.get(7)).relays == ("old.example",)
    await registry.update(KEY, ["new.example"], PK)
    twin = await registry.get(7)
    assert (twin.relays, twin.pk) == (("new.example",), PK)
    assert node.connections == 1
    await registry.close()
    await node.close()


@pytest.mark.parametrize(
    ("path", "urls", "problem"),
    [
        (None, [], "registry: must be given"),
        ("", [], "registry: must be given"),
        ("twins", ["ws://a"], "together with substrate"),
        (None, ["http://a"], "substrate: must be ws://"),
        (None, ["ws://a", "wss://"], "substrate: must be ws://"),
    ],
)
def test_settings_that_name_no_registry_or_two(path, urls, problem):
    with pytest.raises(ConfigError, match=problem):
        open_registry(reactor, path, urls)


def test_a_chain_without_nodes_is_a_mistake():
    with pytest.raises(ValueError, match="no node"):
        Substrate(reactor, [])


def test_the_first_block_of_a_chain():
    assert parse_genesis(None) is None
    assert parse_genesis("0x" + "0F" * 32) == b"\x0f" * 32
    for text in ("", "0x", "0f" * 32, "0x" + "0f" * 31, "0x" + "0g" * 32):
        with pytest.raises(ConfigError, match="genesis: must be 0x and 64 hex digits"):
            parse_genesis(text)
