"""Where a relay keeps envelopes for sessions that are not connected, or connected to another process."""
