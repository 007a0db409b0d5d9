"""Proofs that a relay is at the address in its entry, which discovery demands before it lists the relay."""
