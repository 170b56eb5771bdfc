"""Runs generated code in a sandbox.

`choose_mode` finds the sandbox that this machine offers, `run_candidate` and `run_all` give the verdicts. Standard
library only. The package `inside` is what runs in the sandbox.
"""

from lapcli.sandbox.run import Candidate, Limits, Mode, ProgramVerdict, choose_mode, run_all, run_candidate

__all__ = ["Candidate", "Limits", "Mode", "ProgramVerdict", "choose_mode", "run_all", "run_candidate"]
