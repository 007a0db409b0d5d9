"""What a shell offers for the words of a command."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from dmsg.cli.commands import group


@pytest.mark.parametrize(
    ("words", "begun", "offered"),
    [
        ([], "se", ["send", "servers"]),
        (["ping"], "--se", ["--server", "--security", "--service"]),
        (["send", "--security"], "", ["e2e", "prefer", "hop"]),
        (["send", "--relays-mode"], "o", ["only"]),
        (["receive", "--key"], "al", [("file", "al")]),
        (["receive", "--config"], "", [("file", "")]),
        (["receive", "--relays"], "", [("file", "")]),
        (["receive", "--events"], "", [("dir", "")]),
        (["receive"], "", [("dir", "")]),
        (["send", "02ab"], "", [("file", "")]),
        (["pubkey"], "", [("file", "")]),
        (["rmb", "call", "--registry"], "", [("file", "")]),
        (["rmb", "twin", "create", "--key"], "", [("file", "")]),
        (["echo", "--min-servers"], "", []),
    ],
)
def test_words_are_completed(words, begun, offered):
    found = ShellComplete(group, {}, "dmsg", "_DMSG_COMPLETE").get_completions(words, begun)
    assert [one.value if one.type == "plain" else (one.type, one.value) for one in found] == offered
