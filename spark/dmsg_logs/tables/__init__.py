"""The tables: what each is, how all of them are made and checked, and where readers find them."""
