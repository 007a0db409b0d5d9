"""Choosing relays and keeping connections to them, for the sessions of any protocol."""
