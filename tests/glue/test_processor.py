"""Whether a machine has instructions for AES-GCM, from what Linux says of its processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsg.glue.processor import has_aes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 pclmulqdq aes avx\n", True),
        ("processor\t: 0\nflags\t\t: fpu sse2 aes avx\n", False),
        ("processor\t: 0\nflags\t\t: fpu sse2 pclmulqdq vaes\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd aes pmull sha1\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd crc32\n", False),  # a Raspberry Pi up to the fourth
        ("cpu : POWER9\n", False),
        ("", False),
        ("\u00ff\u0000", False),
    ],
)
def test_what_linux_says(tmp_path: Path, text: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert has_aes(path) is expected


@pytest.mark.parametrize(
    ("machine", "expected"), [("arm64", True), ("AMD64", True), ("x86_64", True), ("ppc64", False)]
)
def test_elsewhere_the_name_of_the_machine_decides(tmp_path: Path, machine: str, expected: bool) -> None:
    assert has_aes(tmp_path / "none", machine) is expected


def test_this_machine_has_an_answer() -> None:
    assert has_aes() in (True, False)
