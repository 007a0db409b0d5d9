"""Limits of control groups, as version 1 and version 2 show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsg.glue.cpu_limit import has_cpu_limit


@pytest.mark.parametrize(
    ("groups", "files", "limited"),
    [
        ("0::/\n", {}, False),
        ("0::/\n", {"cpu.max": "max 100000\n"}, False),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, True),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}, True),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"}, True),
        ("0::/a/b\n", {"c/cpu.max": "50000 100000\n"}, False),
        ("0::/outside/only\n", {"cpu.max": "50000 100000\n"}, True),
        ("4:cpu,cpuacct:/a\n0::/\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n"}, True),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000\n"}, True),
        ("4:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n"}, False),
        ("3:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "50000\n"}, False),
        ("nonsense\n", {"cpu.max": ""}, False),
    ],
)
def test_a_limit_is_found_where_there_is_one(tmp_path: Path, groups: str, files: dict[str, str], limited: bool) -> None:
    (tmp_path / "groups").write_text(groups)
    root = tmp_path / "root"
    root.mkdir()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert has_cpu_limit(tmp_path / "groups", root) is limited


def test_where_there_are_no_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert not has_cpu_limit(tmp_path / "groups", tmp_path)
