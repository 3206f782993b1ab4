"""Policy sync and the journal: packets, replicas, logs, publisher and subscriber.

A trainer appends packets (Updates in envelopes) to a log; whoever holds the base weights applies them in order and then holds
the trainer's weights to the last bit. Logs: `MemoryLog` (one process), `Journal` (a folder; read-only elsewhere), and `serve`
with `HttpSource` (another machine).
"""

from logra.sync.acknowledge import Acknowledgement
from logra.sync.anchors import Anchor, AnchorInfo
from logra.sync.http import Server, make_app, serve
from logra.sync.http_source import HttpSource, UnreachableError
from logra.sync.journal import Journal
from logra.sync.log import Log, LogInfo, NotYetError, Source
from logra.sync.memory import MemoryLog
from logra.sync.packet import Packet
from logra.sync.publisher import Publisher, SubscriberError
from logra.sync.replay import bring_to
from logra.sync.replica import ForkedError, Replica
from logra.sync.state import TailState
from logra.sync.subscriber import Subscriber
from logra.sync.token import load_or_make_token

__all__ = [
    "Acknowledgement",
    "Anchor",
    "AnchorInfo",
    "ForkedError",
    "HttpSource",
    "Journal",
    "Log",
    "LogInfo",
    "MemoryLog",
    "NotYetError",
    "Packet",
    "Publisher",
    "Replica",
    "Server",
    "Source",
    "Subscriber",
    "SubscriberError",
    "TailState",
    "UnreachableError",
    "bring_to",
    "load_or_make_token",
    "make_app",
    "serve",
]
