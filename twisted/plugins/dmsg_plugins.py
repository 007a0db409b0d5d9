"""What Twisted finds of dmsg: its twistd plugins and its endpoint strings. Loads neither a role nor the reactor."""

from twisted.application.reactors import Reactor
from twisted.application.service import ServiceMaker

from dmsg.taps._parsers import LazyParser

dmsg_server = ServiceMaker("dmsg server", "dmsg.taps.server", "A dmsg server (relay).", "dmsg-server")
messaging_server = ServiceMaker(
    "messaging server", "dmsg.taps.messaging_server", "A server (relay) of the messaging system.", "messaging-server"
)
dmsg_discovery = ServiceMaker("dmsg discovery", "dmsg.taps.discovery", "A dmsg discovery (HTTP).", "dmsg-discovery")
dmsg_shipper = ServiceMaker("dmsg shipper", "dmsg.taps.shipper", "A shipper of event logs.", "dmsg-shipper")
rmb_relay = ServiceMaker("rmb relay", "dmsg.taps.rmb_relay", "A relay of the Reliable Message Bus.", "rmb-relay")
rmb_peer = ServiceMaker(
    "rmb peer", "dmsg.taps.rmb_peer", "Programs at a Redis on the Reliable Message Bus.", "rmb-peer"
)
dmsg_epoll = Reactor("dmsg-epoll", "dmsg.glue.lean_epoll", "epoll(7), with less work for each message.")
dmsg_epoll_sleep = Reactor(
    "dmsg-epoll-sleep", "dmsg.glue.sleeping_epoll", "The same, asleep whenever there is nothing to do."
)
dmsg_endpoints = LazyParser("dmsg", "dmsg.mux.client.endpoint")
messaging_endpoints = LazyParser("messaging", "dmsg.messaging.client.endpoint")
