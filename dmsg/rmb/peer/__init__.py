"""The gateway of one twin: services and clients behind it speak JSON through Redis."""
