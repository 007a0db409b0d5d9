"""Keeps a client's or server's entry in discovery."""

from dmsg.discovery.registrar import EntryRegistrar

__all__ = ["EntryRegistrar"]
