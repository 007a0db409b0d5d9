"""Sphinx extension: ``.. generated:: NAME ARGUMENTS`` for tables made from the code, ``:test:`` for names of tests."""

from __future__ import annotations

from typing import Any

import tables
from docutils import nodes
from docutils.parsers.rst import states
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Generated(SphinxDirective):
    """Put what a generator of :mod:`tables` gives in place of the directive."""

    required_arguments = 1
    optional_arguments = 8

    def run(self) -> list[nodes.Node]:
        """Parse the text as if it stood in the page; a generator that does not exist ends the build."""
        name, *arguments = self.arguments
        if name not in tables.GENERATORS:
            raise self.error(f"there is no generator {name!r}")
        return self.parse_text_to_nodes(tables.GENERATORS[name](*arguments), allow_section_headings=True)


def test_role(
    name: str, rawtext: str, text: str, lineno: int, inliner: states.Inliner, *_: Any
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """The name of a test that exists; one that does not is an error of the page."""
    if not tables.test_exists(text):
        problem = inliner.reporter.error(f"there is no test {text}", line=lineno)
        return [inliner.problematic(rawtext, rawtext, problem)], [problem]
    return [nodes.literal(rawtext, text.partition("::")[2], classes=["test"])], []


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("generated", Generated)
    app.add_role("test", test_role)
    return {"version": "1", "parallel_read_safe": True}
