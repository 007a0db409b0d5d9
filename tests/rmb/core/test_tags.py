"""The tag that relays heed."""

from __future__ import annotations

import pytest

from dmsg.rmb.core.tags import fails_fast

from .conftest import DERIVED


@pytest.mark.parametrize(("tags", "expected"), [*DERIVED["tags/fail-fast"]["cases"], ["a\u2003fail-fast", True]])
def test_fail_fast_is_one_whole_tag(tags, expected):
    assert fails_fast(tags) is expected
