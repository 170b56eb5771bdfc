"""The first thing that runs in a sandbox: shut in, then become the candidate or the tests."""

import json
import os
import sys

from .candidate import serve
from .channel import Channel, Closed
from .confine import confine
from .tester import judge


def main(order_json: str) -> None:
    order = json.loads(order_json)
    del sys.argv[1:]
    sys.path.pop()  # the folder of this package
    channel = Channel(order["socket"])
    task = json.load(sys.stdin) if order["role"] == "tests" else None
    confine(**order["confinement"])
    # Errors up to here are for the evaluation to report. From here on stderr is as quiet as stdout, which is /dev/null.
    os.dup2(1, 2)
    if task is not None:
        judge(channel, order["verdict"], task)
    try:
        serve(channel)
    except Closed:
        os._exit(0)
