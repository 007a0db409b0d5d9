"""Look-up of twins with their account keys, relays and encryption keys, in a registry file or on tfchain."""
