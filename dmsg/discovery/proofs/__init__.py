"""How a discovery finds out that a relay is where its entry says, before it lists it."""
