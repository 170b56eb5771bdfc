"""The stream for people: stderr. A reader who goes away, as in `lap train ... 2>&1 | head`, does not end the run."""

import os
import sys

from rich.console import Console


class LogConsole(Console):
    def __init__(self) -> None:
        super().__init__(stderr=True, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """rich would end the process, in the middle of a step."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)
