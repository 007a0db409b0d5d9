"""From files in the landing zone to the table of events: every line once."""
