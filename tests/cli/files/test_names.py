"""Names of files that strangers choose."""

from __future__ import annotations

import shlex
import subprocess
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.cli.files.names import LOCAL_NAME_LIMIT_BYTES, MARKS_LIMIT, check_name, local_name, second_name
from dmsg.cli.files.wire import TransferFailed


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "report 2024.pdf",
        "report (1).pdf",
        "café.txt",
        "日本語.txt",
        "किताब.txt",
        "ที่นี่.txt",
        "שָׁלוֹם.txt",
        "смета_v2-final.xlsx",
        "😀.png",
        "archive.tar.gz",
        "a~",
        "x" * LOCAL_NAME_LIMIT_BYTES,
        "console.log",
        "a@b,c+d",
    ],
)
def test_ordinary_names_stay_as_they_are(name):
    assert local_name(name) == unicodedata.normalize("NFC", name)


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("-rf", "_-rf"),
        ("--checkpoint-action=exec=sh x", "_--checkpoint-action_exec_sh x"),
        ("*", "_"),
        ("a?[b]{c}", "a__b__c_"),
        ("$(id)", "_(id)"),
        ("`id`.txt", "_id_.txt"),
        ("a;id|sh&", "a_id_sh_"),
        ("a'b\"c", "a_b_c"),
        ("a<b>c!d#e%f^g", "a_b_c_d_e_f_g"),
        ("x -rf", "x_-rf"),
        ("a\u00a0-rf", "a_-rf"),
        ("host:file", "host_file"),
        ("FS=x", "FS_x"),
        ("@args", "_@args"),
        ("+cmd", "_+cmd"),
        ("\uff04\uff08id\uff09", "_\uff08id\uff09"),
        ("a\uff0fb", "a_b"),
        ("\ufe63rf", "_rf"),
        ("\u3164\u0306", "_"),
        ("a \uff0dc", "a _c"),
        ("\u2026", "_\u2026"),
        ("\uff20args", "_\uff20args"),
        ("a\u2215b\u2044c", "a_b_c"),
        ("\u3164", "_"),
        ("\u2800\u115f", "__"),
        ("a\u20dd", "a"),
        ("\u0301a", "a"),
        ("NUL", "_NUL"),
        ("con.txt", "_con.txt"),
        ("Com1.tar.gz", "_Com1.tar.gz"),
        ("COM\u00b9", "_COM\u00b9"),
        ("lpt9 .x", "_lpt9 .x"),
        ("Desktop.ini", "_Desktop.ini"),
        ("a...", "a"),
        ("a. .", "a"),
        ("\ufe0f.bashrc", "_.bashrc"),
    ],
)
def test_names_that_mean_something_elsewhere_are_made_harmless(name, local):
    assert local_name(name) == local


def test_stacked_accents_are_bounded():
    stacked = "".join(letter + "\u0334\u0315\u031b\u0322\u0489" * 4 for letter in "zalge")
    local = local_name(stacked)
    assert "".join(one for one in local if one.isascii()) == "zalge"
    assert len(local) <= len("zalge") * (1 + MARKS_LIMIT)


def test_a_selector_between_a_letter_and_its_accents_changes_nothing():
    accents = "\u0301\u0302\u0304\u0305"
    assert local_name("a\ufe0f" + accents) == local_name("a" + accents)


@pytest.mark.parametrize("name", ["x" * 250 + ".pdf", "é" * 120 + ".tar", "日" * 84, "e\u0334" * 84, "a." * 127])
def test_a_long_name_is_cut_and_keeps_its_ending(name):
    local = local_name(name)
    assert len(local.encode()) <= LOCAL_NAME_LIMIT_BYTES
    _, dot, ending = name.rpartition(".")
    assert local.endswith(f".{ending}" if dot and ending else local)
    assert len(second_name(local, "ab" * 32).encode()) <= LOCAL_NAME_LIMIT_BYTES


def test_a_second_name_keeps_the_ending():
    assert second_name("a.tar.gz", "ab" * 32) == "a.tar-abababababababab.gz"
    assert second_name("README", "ab" * 32) == "README-abababababababab"


@given(st.one_of(st.text(max_size=80), st.text("-$()`*?[]{};&|<>'\"\\!#%^=:@+~. ab\u0301\u202e\uff04", max_size=40)))
def test_no_name_means_anything_to_a_shell(name):
    try:
        local = local_name(check_name(name))
    except TransferFailed as error:
        assert error.code == "bad_name"
        return
    assert 0 < len(local.encode()) <= LOCAL_NAME_LIMIT_BYTES
    assert not local.startswith(("-", ".", "~", "@", "+", " ")) and " -" not in local
    assert local == local_name(local)  # so that a name that was made harmless stays the same when it is sent on
    likened = unicodedata.normalize("NFKC", local)
    assert not set(likened) & set("/\\$`*?[]{};&|<>'\"!#%^=:\n\0")
    assert not any(unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp") for one in local)


def test_a_shell_that_expands_what_was_received_runs_nothing(tmp_path):
    evil = ["$(touch pwned)", "`touch pwned`", "-rf", "--help", "*", ";touch pwned", "a&touch pwned"]
    for name in evil:
        (tmp_path / local_name(name)).touch()
    subprocess.run(["sh", "-c", "ls -d *; for f in *; do echo $f; done"], cwd=tmp_path, check=True, capture_output=True)
    for path in list(tmp_path.iterdir()):
        assert shlex.split(path.name)
    subprocess.run(["sh", "-c", "rm -- *"], cwd=tmp_path, check=True)
    assert not list(tmp_path.iterdir())


def test_the_tag_of_a_second_file_is_no_option():
    assert second_name("a .txt", "ab" * 32) == "a-abababababababab.txt"
