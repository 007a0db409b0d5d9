"""The other side of chat_server.py: standard input goes to the chat, the chat to standard output.

python chat_client.py tcp:127.0.0.1:6000
python chat_client.py 'dmsg:PUBLIC_KEY:discovery=http\\://127.0.0.1\\:9090'
"""

import sys

from twisted.internet import stdio, task
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import clientFromString, connectProtocol
from twisted.protocols.basic import LineReceiver


class Conversation(LineReceiver):
    delimiter = b"\n"

    def __init__(self):
        self.over = Deferred()

    def lineReceived(self, line):
        print(line.decode("utf-8", "replace"), flush=True)

    def connectionLost(self, reason):
        print("The end:", reason.getErrorMessage(), flush=True)
        self.over.callback(None)


class Keyboard(LineReceiver):
    delimiter = b"\n"

    def __init__(self, conversation):
        self.conversation = conversation

    def lineReceived(self, line):
        self.conversation.sendLine(line)

    def connectionLost(self, reason):
        self.conversation.transport.loseConnection()


async def main(reactor, description):
    conversation = await connectProtocol(clientFromString(reactor, description), Conversation())
    stdio.StandardIO(Keyboard(conversation), reactor=reactor)
    await conversation.over


if __name__ == "__main__":
    task.react(lambda *arguments: Deferred.fromCoroutine(main(*arguments)), sys.argv[1:])
