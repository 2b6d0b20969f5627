"""Many servers in one process: `python -m stage06_serving.tests.house`, for the fixture `house`.

A server takes seconds to start, nearly all of them to load PyTorch. So tests that neither stop
their server nor look at its process get one with an application, an engine, two threads and a port
of its own in a shared process.

Each line of standard input starts one more server: a command line and variables, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from functools import partial

from shared import cli
from stage06_serving import __main__ as program
from stage06_serving.tests import faulty_server


def main() -> None:
    usual = dict(os.environ)
    program.make_engine = faulty_server.make_engine
    for line in sys.stdin:  # the next line follows when this server answers
        arguments, variables = json.loads(line)
        os.environ.clear()
        os.environ.update(usual | variables)
        threading.Thread(target=partial(cli.run, program.main, arguments), daemon=True).start()


if __name__ == "__main__":
    main()
