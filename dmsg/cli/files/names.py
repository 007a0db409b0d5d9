"""Names of files: which ones may be offered, and what a file is called on the receiver's disk. Pure.

A sender chooses the name, and people and programs use it later: in a shell (``rm *``), as an argument (``-rf``), on a
terminal, on another operating system. So names that try to leave the directory or to deceive a terminal are refused
(:func:`check_name`), and the others are written with characters that have no special meaning there (:func:`local_name`).
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from dmsg.cli.files.wire import PART_SUFFIX, TransferFailed

#: What file systems allow for one name, in bytes of UTF-8.
NAME_LIMIT_BYTES: Final = 255
#: Longest name on the receiver's disk, in bytes of UTF-8: leaves room for the endings of editors and backup programs.
LOCAL_NAME_LIMIT_BYTES: Final = 200
#: Accents on one letter: Hebrew and Thai use up to 3; more would run over the lines above and below.
MARKS_LIMIT: Final = 3
#: Digits of a file's SHA-256 in the name of a second file of one name: 64 bits, which two files never share by chance.
_DIGEST_DIGITS: Final = 16
#: An ending of at most this many characters is kept when a long name is cut.
_ENDING_LIMIT: Final = 16

#: The ASCII characters without a special meaning for a shell, ``awk`` (``=``), ``scp`` and ``tar`` (``:``), or Windows.
_SAFE_ASCII: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 ._-+,@()~")
#: At the beginning of a name these mean an option, a file of arguments (``curl``), a command (``vim``), or a home directory.
_BAD_BEGINNINGS: Final = ("-", "@", "+", "~", ".", " ")
#: These look like a slash, or are invisible although Unicode calls them letters, marks or symbols.
_DECEIVING: Final = frozenset("\u2044\u2215\u2571\u29f8\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5")
_VARIATIONS: Final = re.compile("[\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_DEVICE: Final = re.compile(r"(con|prn|aux|nul|clock|conin|conout|com[0-9]|lpt[0-9])_*\Z", re.IGNORECASE)
#: Files whose instructions some systems follow when they show a directory.
_OBEYED: Final = frozenset({"desktop.ini", "autorun.inf", "thumbs.db"})


def check_name(name: str) -> str:
    """Give ``name`` back if a file may be offered under it; raise ``TransferFailed`` (``bad_name``) otherwise.

    It is one path component of at most :data:`NAME_LIMIT_BYTES` bytes of UTF-8, is not hidden, does not look like a
    partial file, and holds no control, format (which covers bidirectional ones) or surrogate characters.
    """
    bad = (
        not name
        or name.startswith((".", "~"))
        or name != name.strip()
        or name.casefold().endswith(PART_SUFFIX)
        or any(character in "/\\" or not _is_plain(character) for character in name)
        or len(name.encode("utf-8", "surrogatepass")) > NAME_LIMIT_BYTES
    )
    if bad:
        raise TransferFailed("bad_name", "".join(one if _is_plain(one) else "�" for one in name[:NAME_LIMIT_BYTES]))
    return name


def local_name(name: str) -> str:
    """What a file offered as ``name`` is called on disk: ``name`` itself if it is an ordinary one.

    Special characters become ``_``: those that a shell or a program interprets, those that NFKC (which some systems apply)
    turns into one of these, those that deceive the eye, and accents beyond :data:`MARKS_LIMIT` on one letter. A name that
    would be an option, a device or the like gets ``_`` in front; a name that is too long is cut before its ending.
    """
    # A variation selector keeps an accent from its letter, so it goes first.
    text = unicodedata.normalize("NFC", _VARIATIONS.sub("", check_name(name)))
    kept: list[str] = []
    marks = MARKS_LIMIT  # at the beginning there is no letter to carry a mark
    for character in text:
        if unicodedata.combining(character) or unicodedata.category(character).startswith("M"):
            marks += 1
            if marks <= MARKS_LIMIT and _is_safe(character):
                kept.append(character)
            continue
        safe = " " if unicodedata.category(character) == "Zs" else character
        safe = safe if _is_safe(safe) else "_"
        marks = 0 if safe.isalnum() else MARKS_LIMIT  # count accents on the written character, not on the replaced one
        kept.append(safe)
    local = re.sub(r" +", " ", "".join(kept)).replace(" -", "_-").rstrip(". ")
    local = _shortened(local, LOCAL_NAME_LIMIT_BYTES)
    if not local or unicodedata.normalize("NFKC", local).startswith(_BAD_BEGINNINGS) or _is_reserved(local):
        local = "_" + _shortened(local, LOCAL_NAME_LIMIT_BYTES - 1)
    return local


def second_name(name: str, sha256: str) -> str:
    """The name of a file whose local name is taken: it has a part of the file's ``sha256`` (hex) in it."""
    stem, ending = _split(name)
    tag = f"-{sha256[:_DIGEST_DIGITS]}"
    # A space before the tag would make an option of it.
    return _cut(stem, LOCAL_NAME_LIMIT_BYTES - len((tag + ending).encode())).rstrip(". ") + tag + ending


def _is_plain(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] != "C" and category not in ("Zl", "Zp")


def _is_safe(character: str) -> bool:
    if character.isascii():
        return character in _SAFE_ASCII
    if character in _DECEIVING or unicodedata.category(character) == "Me":
        return False
    likened = unicodedata.normalize("NFKC", character)
    if "-" in likened:
        return False  # it would be an option after a space
    return all(one in _SAFE_ASCII if one.isascii() else one not in _DECEIVING for one in likened)


def _is_reserved(name: str) -> bool:
    likened = unicodedata.normalize("NFKC", name).casefold()
    return likened in _OBEYED or _DEVICE.match(likened.partition(".")[0].strip()) is not None


def _shortened(name: str, limit_bytes: int) -> str:
    if len(name.encode()) <= limit_bytes:
        return name
    stem, ending = _split(name)
    return _cut(stem, limit_bytes - len(ending.encode())) + ending


def _split(name: str) -> tuple[str, str]:
    """The name up to its ending, and the ending with its dot if it is a short one."""
    stem, dot, ending = name.rpartition(".")
    return (stem, dot + ending) if stem and len(ending) <= _ENDING_LIMIT else (name, "")


def _cut(text: str, limit_bytes: int) -> str:
    """As much of ``text`` as fits, with no letter cut and none left without its accents."""
    if len(text.encode()) <= limit_bytes:
        return text
    end = len(text.encode()[:limit_bytes].decode("utf-8", "ignore"))
    while end and unicodedata.category(text[end]).startswith("M"):
        end -= 1
    return text[:end].rstrip(". ")
