"""dmsg: an encrypted relay messaging framework for Twisted.

Programs find each other by secp256k1 public key and talk through relays that neither of them has to trust.
This module imports nothing, so that ``import dmsg`` never installs a reactor.
"""

__version__ = "0.1.0"
