"""Endpoint strings and the clients they share."""
