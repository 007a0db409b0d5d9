"""Who is who: twins, their account keys, relays and encryption keys, from a registry file or from tfchain."""
