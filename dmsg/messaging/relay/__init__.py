"""The relay of the messaging system: its switch, pure, and the service around it."""
