"""The dmsg protocol's relay: which transport goes where, and the service that runs it."""
