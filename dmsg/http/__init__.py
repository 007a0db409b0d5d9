"""HTTP as every side of it needs: limits for what strangers send, strict JSON, a client that believes no server."""
