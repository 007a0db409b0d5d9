"""The older messaging system: links with a JSON handshake, and channels between two clients over one relay."""
