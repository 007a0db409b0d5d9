"""``dmsg send`` and ``dmsg receive``: file transfer between two peers."""
