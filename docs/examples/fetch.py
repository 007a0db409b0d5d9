"""Fetch pages with HTTP through any client endpoint, over one connection; prints statuses and lengths.

python fetch.py tcp:127.0.0.1:8080 /index.html /picture.png
python fetch.py 'dmsg:PUBLIC_KEY:discovery=http\\://127.0.0.1\\:9090' /index.html /picture.png
"""

import sys

from treq.client import HTTPClient
from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import clientFromString
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer


@implementer(IAgentEndpointFactory)
class OneEndpoint:
    """Connects to the same place whatever a URL says."""

    def __init__(self, endpoint):
        self.endpoint = endpoint

    def endpointForURI(self, uri):
        return self.endpoint


async def main(reactor, description, *paths):
    endpoints = OneEndpoint(clientFromString(reactor, description))
    pool = HTTPConnectionPool(reactor)
    http = HTTPClient(Agent.usingEndpointFactory(reactor, endpoints, pool))
    for path in paths:
        response = await http.get(f"http://site{path}", reactor=reactor)
        body = await response.content()
        print(path, response.code, len(body), flush=True)
    await pool.closeCachedConnections()


if __name__ == "__main__":
    task.react(lambda *arguments: Deferred.fromCoroutine(main(*arguments)), sys.argv[1:])
