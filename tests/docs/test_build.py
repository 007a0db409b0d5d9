"""The documentation builds without a warning: references, includes, generated tables and names of tests included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import DOCS, ROOT

pytestmark = [pytest.mark.system, pytest.mark.time_limit(180)]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Run Sphinx as ``make docs`` does."""
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(source), str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_the_documentation_builds(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path / "html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html" / "explanation" / "life-of-a-message.html").read_text()
    for name in ("write", "send_data", "flush", "dataReceived", "route", "receive_data", "deliver"):
        assert f'<span class="nf">{name}</span>' in page, f"the page shows {name}"
    shown = set(re.findall(r'<dt [^>]*id="([^"]+)"', (tmp_path / "html" / "reference" / "api.html").read_text()))
    for name, options in CLASSES.findall((DOCS / "reference" / "api.rst").read_text()):
        members = re.search(r"^   :members: (.+)$", options, re.MULTILINE)
        if members is not None:
            listed = {f"{name}.{member}" for member in members[1].split(", ")}
            assert {one for one in shown if one.startswith(f"{name}.")} == listed


#: A class on the page of the API, and the options of its directive.
CLASSES = re.compile(r"^\.\. auto(?:class|exception):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)

BROKEN = {
    "a function that is gone": ".. literalinclude:: {root}/dmsg/mux/relay/switch.py\n   :pyobject: Switch.gone\n",
    "a test that is gone": ":test:`mux/relay/test_switch.py::test_gone`\n",
    "a generator that is gone": ".. generated:: gone\n",
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_gone_breaks_the_build(tmp_path: Path, what: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text(
        f"import sys\nsys.path[:0] = [{str(DOCS / '_ext')!r}]\nextensions = ['dmsg_docs']\nroot_doc = 'index'\n"
    )
    (source / "index.rst").write_text(f"Title\n=====\n\n{BROKEN[what].format(root=ROOT)}")
    done = build(source, tmp_path / "html")
    assert done.returncode == 1
    assert "gone" in done.stderr
