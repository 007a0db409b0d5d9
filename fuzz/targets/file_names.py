"""Names of received files: a stranger's offer, and the name on the disk."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from dmsg.cli.files.names import LOCAL_NAME_LIMIT_BYTES, NAME_LIMIT_BYTES, check_name, local_name, second_name
from dmsg.cli.files.wire import TransferFailed
from fuzz.oracles import as_text

_DIGEST = "0123456789abcdef" * 4
#: Characters with a meaning to a shell, a terminal, a path or an option, and those that some systems turn into them.
_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f/\\:*?\"'`$&|;<>!#%^=\[\]{}\u2028\u2029]")
_OPTION = re.compile(r"(\A|\s)-")


def one_input(data: bytes) -> None:
    """The input is the name. The local name is harmless, maps to itself, and is never too long."""
    name = as_text(data)
    try:
        assert check_name(name) == name and len(name.encode()) <= NAME_LIMIT_BYTES
    except TransferFailed as error:
        assert error.code == "bad_name"
        assert not any(unicodedata.category(character)[0] == "C" for character in str(error))
        return
    local = local_name(name)
    assert local_name(local) == local
    for each in (local, second_name(local, _DIGEST)):
        assert 0 < len(each.encode()) <= LOCAL_NAME_LIMIT_BYTES, each
        assert check_name(each) == each and each.isprintable()
        for seen in (each, unicodedata.normalize("NFKC", each)):
            assert not _OBEYED.search(seen) and not _OPTION.search(seen), ascii(seen)
            assert not seen.startswith(("~", "@", "+", ".", " ")), ascii(seen)
        assert not each.endswith((".", " ")), ascii(each)
    assert second_name(local, _DIGEST) != local or _DIGEST[:16] in local


def seeds() -> Iterator[bytes]:
    """Ordinary names, and names that have deceived a program or an eye."""
    for name in (
        *("notes.txt", "naïve – résumé.tar.gz", "-rf", "--checkpoint-action=exec=sh x.sh", "*", "$(id)", "a b  -c"),
        *("..", "a/b", ".hidden", "~", "@file", "+cmd", "a\u0301\u0302\u0303\u0304\u0305", "\u0301a", "x.part"),
        *("\u202egpj.exe", "con.txt", "LPT1", "desktop.ini", "ａ：ｂ", "a\u2044b", "\uff0f", "\u3164", "ﬁ", "…"),
        *(
            "x" * 255,
            "ü" * 127,
            "é" * 90 + ".jpeg",
            "a." + "b" * 16,
            "a." + "b" * 17,
            "．．",
            "﹣rf",
            "a －c",
            "＠x",
            "¨",
            "a\u00a0-b",
            "\ufe0f",
        ),
    ):
        yield name.encode()
    yield b"\xed\xa0\x80"
