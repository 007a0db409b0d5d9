"""Which commands of others get a list."""

from __future__ import annotations

import pytest

from dmsg.rmb.peer.commands import (
    KEEP_COMMAND_S,
    UNSERVED_COMMANDS,
    UNSERVED_COMMANDS_OF_A_TWIN,
    Commands,
    list_of,
)


@pytest.mark.parametrize(
    "command", ["calc.add", "zos.system.version", "noop", "systematic", "a b", "ü", "x" * 255, "rmb", "rmbs.x"]
)
def test_a_command_has_a_list_of_its_name(command: str) -> None:
    assert list_of(command) == f"msgbus.{command}"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "system.local",
        "system.reply",
        "system",
        "system.x",
        "backlog.1",
        "backlog",
        "rmb.version",
        "rmb.",
        "a\n",
        "\0",
        "\x1b[2J",
        "x" * 256,
    ],
)
def test_names_of_the_peers_own_lists_and_unprintable_ones_have_none(command: str) -> None:
    assert list_of(command) is None


def test_a_twin_makes_so_many_lists_and_others_still_can() -> None:
    commands = Commands()
    names = [f"a{number}" for number in range(UNSERVED_COMMANDS_OF_A_TWIN + 1)]
    assert [commands.admit(name, 1, 0) for name in names] == [True] * UNSERVED_COMMANDS_OF_A_TWIN + [False]
    assert commands.admit(names[0], 1, 0)
    assert commands.admit(names[-1], 2, 0)
    assert commands.admit(names[-1], 1, 0)


def test_all_twins_together_make_so_many() -> None:
    commands = Commands()
    taken = [commands.admit(f"a{number}", number, 0) for number in range(UNSERVED_COMMANDS + 1)]
    assert taken.index(False) == UNSERVED_COMMANDS


def test_many_twins_with_many_lists_do_not_keep_another_from_its_few() -> None:
    commands = Commands()
    for number in range(2 * UNSERVED_COMMANDS):
        commands.admit(f"a{number}", 100 + number % 20, 0)
    assert not commands.gone
    for number in range(10):
        assert commands.admit(f"real{number}", 1, 0)
    assert [int(name[1:]) for name in commands.gone] == list(range(10))
    assert not commands.admit("b", 100 + 15, 0)
    assert commands.admit("a0", 2, 0) and len(commands.gone) == 11


def test_a_list_that_a_service_takes_from_counts_no_more() -> None:
    commands = Commands()
    for number in range(2 * UNSERVED_COMMANDS):
        assert commands.admit(f"a{number}", 1, 0)
        commands.pushed(f"a{number}", commands.list_made(f"a{number}"), 1, 0)
        assert commands.admit(f"a{number}", 1, 0)
        commands.pushed(f"a{number}", commands.list_made(f"a{number}"), 1, 0)  # the first one is gone
        assert commands.admit(f"a{number}", 1, 0)
        commands.pushed(f"a{number}", commands.list_made(f"a{number}"), 7, 0)


def test_lists_that_have_expired_count_no_more() -> None:
    commands = Commands()
    for number in range(UNSERVED_COMMANDS_OF_A_TWIN):
        commands.admit(f"a{number}", 1, 0)
        commands.pushed(f"a{number}", commands.list_made(f"a{number}"), 1, 0)
    assert not commands.admit("b", 1, KEEP_COMMAND_S - 1)
    assert commands.admit("b", 1, KEEP_COMMAND_S)
    commands.pushed("b", commands.list_made("b"), 1, KEEP_COMMAND_S)
    commands.admit("b", 1, KEEP_COMMAND_S)
    commands.pushed("b", commands.list_made("b"), 1, KEEP_COMMAND_S)
    assert commands.admit("c", 1, 3 * KEEP_COMMAND_S)


def test_commands_that_nobody_pushed_are_not_known() -> None:
    commands = Commands()
    commands.pushed("a", commands.list_made("a"), 0, 0)
    assert commands.admit("a", 1, 0)
