"""Sphinx configuration. ``make docs`` builds with warnings as errors; nothing beyond Sphinx itself is needed."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import dmsg  # noqa: E402

project = "dmsg"
author = "the dmsg authors"
version = release = dmsg.__version__

extensions = ["sphinx.ext.autodoc", "dmsg_docs"]
exclude_patterns = ["_build", "examples"]
root_doc = "index"
default_role = "literal"

html_theme = "alabaster"
html_theme_options = {"description": "Encrypted relay messaging for Twisted", "page_width": "1100px"}
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
