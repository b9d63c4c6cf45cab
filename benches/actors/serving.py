"""The process of one peer: does what the bench asks for, one request at a time.

    python -m benches.actors.serving PEER DESCRIPTOR SECONDS

A request is a line of JSON on the socket with that descriptor: the figure and its options. The answer to it is
``ready`` once all is prepared; after the next line the timed part runs, and its sample is the second answer. So the
bench can look at the processor time of the tree just before and just after, from outside.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback

from benches.actors.loops import Loops
from benches.actors.peers import make


def main() -> int:
    """Serve until the bench closes its end; returns 1 where the peer is missing."""
    name, descriptor, seconds = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)  # else the peer's own processes would hold it open
    with channel, channel.makefile("rw") as lines:

        def answer(**fields: object) -> None:
            print(json.dumps(fields), file=lines, flush=True)

        try:
            peer = make(name)
        except ImportError as error:
            answer(missing=str(error))
            return 1
        peer.start()
        answer(version=peer.version())
        loops = Loops(peer, float(seconds))
        while line := lines.readline():
            try:
                timed = loops.prepare(**json.loads(line))
                answer(ready=True)
                lines.readline()
                answer(**timed())
                lines.readline()
                loops.settle()
            except Exception as error:  # noqa: BLE001 - it is the bench that gives up
                traceback.print_exc()
                answer(error=f"{type(error).__name__}: {error}")
                break
        peer.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Some runtimes wait for threads of theirs for ever; whatever is left, the keeper ends.
    os._exit(code)
