"""A chat over lines of text: each client hears what all the others say.

python chat_server.py tcp:6000:interface=127.0.0.1
python chat_server.py 'dmsg:key=chat.key:discovery=http\\://127.0.0.1\\:9090'
"""

import sys

from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.protocol import Factory
from twisted.protocols.basic import LineReceiver


class Chat(LineReceiver):
    delimiter = b"\n"
    MAX_LENGTH = 10_000

    def connectionMade(self):
        self.name = b""
        self.sendLine(b"Your name?")

    def lineReceived(self, line):
        if not self.name:
            self.name = line
            self.factory.present.add(self)
            self.factory.tell(b"%s is here, and now we are %d" % (line, len(self.factory.present)))
        elif line == b"/bye":
            self.transport.loseConnection()
        else:
            self.factory.tell(b"<%s> %s" % (self.name, line))

    def connectionLost(self, reason):
        if self in self.factory.present:
            self.factory.present.remove(self)
            self.factory.tell(b"%s has left" % self.name)


class Room(Factory):
    protocol = Chat

    def __init__(self):
        self.present = set()

    def tell(self, line):
        for chat in self.present:
            chat.sendLine(line)


async def main(reactor, description):
    port = await serverFromString(reactor, description).listen(Room())
    print("listening at", port.getHost(), flush=True)
    await Deferred()  # until interrupted


if __name__ == "__main__":
    task.react(lambda *arguments: Deferred.fromCoroutine(main(*arguments)), sys.argv[1:])
