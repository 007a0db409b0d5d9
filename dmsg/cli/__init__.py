"""The ``dmsg`` command."""
