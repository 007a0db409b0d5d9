"""Endpoint strings over the messaging system: ``messaging:PUBLIC_KEY`` to connect, ``messaging:key=FILE`` to listen.

They have the arguments and settings of :mod:`dmsg.mux.client.endpoint`, except ``service=``, ``security=`` and those about
resumption, which this protocol does not have. In addition they have ``dialect=``, which must be the same at both ends, and
``layout=``. A program that has a client uses :class:`~dmsg.endpoints.stream.ClientEndpoint` with a
``DmsgAddress(public_key, scheme="messaging")``, and :class:`~dmsg.endpoints.stream.ServerEndpoint`.
"""

from __future__ import annotations

from typing import Final

from dmsg.endpoints.strings import Scheme
from dmsg.messaging.client.service import MessagingClient
from dmsg.messaging.client.session import SCHEME
from dmsg.messaging.client.settings import ROLE, MessagingSettings

STRINGS: Final = Scheme(SCHEME, ROLE, MessagingSettings, MessagingClient.from_parts)
parse_client = STRINGS.parse_client
parse_server = STRINGS.parse_server
