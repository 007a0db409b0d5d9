"""A mark for tests in which Twisted speaks TLS."""

from __future__ import annotations

import pytest

#: Twisted hands pyOpenSSL what the newest pyOpenSSL would rather not take.
twisted_and_pyopenssl = pytest.mark.filterwarnings("ignore:.*(pyOpenSSL|OpenSSL|cryptography).*:DeprecationWarning")
