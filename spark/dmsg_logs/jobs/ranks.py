"""For ``spark-submit``: scores the relays, signs the result. Options: those of ``python -m dmsg_logs ranks``."""

from __future__ import annotations

from dmsg_logs.__main__ import make_ranks

if __name__ == "__main__":
    make_ranks(prog_name="ranks.py")
