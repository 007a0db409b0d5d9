"""The families of discovery's paths, by their first part (:ref:`spec-discovery-http`). Pure."""

from __future__ import annotations

from typing import Final

#: Described in 2019; implemented by the reference in 2019, which every base discovery answers; and later.
DESCRIBED: Final = "discovery"
OF_2019: Final = "messaging-discovery"
OF_2023: Final = "dmsg-discovery"
