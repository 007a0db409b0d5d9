"""The dmsg protocol's relay: which transport goes where, and the server that runs it."""
