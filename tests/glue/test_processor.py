"""Whether a machine has instructions for AES-GCM, from what Linux says of its processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsg.glue.processor import has_aes, uses_aes


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
    ("system", "machine", "expected"),
    [
        ("Darwin", "arm64", True),
        ("Darwin", "x86_64", True),
        ("Windows", "AMD64", True),
        ("FreeBSD", "arm64", False),  # may be a Raspberry Pi
        ("Linux", "x86_64", False),  # that does not say what it has
    ],
)
def test_elsewhere_system_and_machine_decide(tmp_path: Path, system: str, machine: str, expected: bool) -> None:
    assert has_aes(tmp_path / "none", system, machine) is expected


def test_a_setting_decides_before_the_processor_does() -> None:
    assert (uses_aes(True), uses_aes(False), uses_aes(None)) == (True, False, has_aes())
