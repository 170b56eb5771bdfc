"""Generated code, run where it can hurt nobody.

`choose_mode` finds the sandbox that this machine offers, `run_candidate` and `run_all` give the verdicts. Standard
library only. The package `inside` is what runs in the sandbox.
"""

from lapcli.sandbox.modes import Mode, choose_mode
from lapcli.sandbox.run import run_all, run_candidate
from lapcli.sandbox.sample import Candidate, Limits, Verdict

__all__ = ["Candidate", "Limits", "Mode", "Verdict", "choose_mode", "run_all", "run_candidate"]
