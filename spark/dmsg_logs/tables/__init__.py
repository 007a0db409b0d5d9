"""The tables: their definitions, how they are made and checked, and where readers find them."""
