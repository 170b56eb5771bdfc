"""Hostile programs, and the canaries that detect any harm.

A program defines `attack()`, which hidden tests call. Its globals give the locations of the canaries:

    SECRET a file that it must not read, empty or replace     FOLDER   its folder, where no new file may appear
    VICTIM   a process that must stay alive and unchanged       PORT a listener's port on the loopback device
    ABSTRACT an abstract Unix socket of the same listener       ENV      a variable of our environment

By default `attack()` returns True, or the secret, if it succeeded, and the tests then report "passed": a pass is an
escape. `control` marks attacks that succeed in the unsafe mode, which shows that they are real.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support import start_process

from lapcli.sandbox import Candidate, Limits

QUICK = Limits(cpu_seconds=1, wall_seconds=1.5)
ESCAPED = "def check(candidate):\n    assert candidate() in (True, {token!r})\n"
FORGED = "def check(candidate):\n    for n in range(3):\n        assert candidate() == {token!r} + str(n)\n"


@dataclass(frozen=True)
class Attack:
    name: str
    program: str
    test: str = ESCAPED
    control: bool = False
    limits: Limits | None = None
    after: float = 0.0  # seconds in which something may still happen
    reason: str | None = None  # what the verdict has to begin with


class Canaries:
    """A file, a process and a listener. `harm` reports their state."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        self.folder = folder
        self.secret = folder / "secret.txt"
        self.secret.write_text(self.token)
        self._permissions = self.secret.stat().st_mode
        self.listeners = []
        self.abstract = f"canary-{secrets.token_hex(8)}"
        for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "\0" + self.abstract)):
            listener = socket.socket(family)
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
            self.listeners.append(listener)
        self.victim = start_process(
            [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(300)"],
            env={"CANARY": self.token},
            stdout=subprocess.PIPE,
        )
        assert self.victim.stdout.readline() == b"up\n"
        self._unchanged = self._state()

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.victim.stdout.close()
        for listener in self.listeners:
            listener.close()

    def _state(self) -> list[str]:
        """Limits, priority, processors and tracer of the victim."""
        status = Path(f"/proc/{self.victim.pid}/status").read_text().splitlines()
        kept = [line for line in status if line.startswith(("TracerPid", "Cpus_allowed:", "SigIgn"))]
        limits = Path(f"/proc/{self.victim.pid}/limits").read_text()
        return [*kept, limits, str(os.getpriority(os.PRIO_PROCESS, self.victim.pid))]

    def harm(self) -> list[str]:
        found = []
        if self.victim.poll() is not None:
            found.append("the victim is dead")
        elif self._state() != self._unchanged:
            found.append("the victim was changed")
        if sorted(os.listdir(self.folder)) != ["secret.txt"]:
            found.append(f"files appeared: {os.listdir(self.folder)}")
        try:
            kept = self.secret.read_text() == self.token and self.secret.stat().st_mode == self._permissions
        except OSError:
            kept = False
        if not kept:
            found.append("the secret file was changed")
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append("somebody called")
        return found

    def candidate(self, attack: Attack) -> Candidate:
        port = self.listeners[0].getsockname()[1]
        known = (
            f"SECRET, FOLDER, VICTIM = {str(self.secret)!r}, {str(self.folder)!r}, {self.victim.pid}\n"
            f"PORT, ABSTRACT, ENV = {port}, {self.abstract!r}, 'LAP_CANARY'\n"
        )
        return Candidate("", known + attack.program, attack.test.format(token=self.token), "attack")


def run_out(attack: Attack) -> None:
    """Time for delayed effects after the verdict."""
    time.sleep(attack.after)


def may_trace() -> bool:
    """Whether the kernel lets a process trace processes other than its children, which Yama can forbid."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not scope.exists() or scope.read_text().strip() == "0"


CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
"""

# Code with which a program finds the socket and sends messages on it like the candidate's process.
WIRE = """
import json, os, stat, struct
def sockets():
    found = []
    for fd in range(3, 4096):  # a long test run has many files open, and the socket keeps its number
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found.append(fd)
        except OSError:
            pass
    return found
def say(body):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    os.write(sockets()[0], struct.pack(">I", len(body)) + body)
"""

ATTACKS = [
    # -- files
    Attack("read a file", "def attack(): return open(SECRET).read()", control=True),
    Attack("write a file", "def attack():\n    open(FOLDER + '/new', 'w').write('x')\n    return True", control=True),
    Attack("delete a file", "import os\ndef attack():\n    os.unlink(SECRET)\n    return True", control=True),
    Attack(
        "write into its own memory by way of /proc",
        "def attack():\n    open('/proc/self/mem', 'r+b')\n    return True",
        control=True,
    ),
    # -- the network
    Attack(
        "TCP",
        "import socket\ndef attack():\n    socket.create_connection(('127.0.0.1', PORT), 2)\n    return True",
        control=True,
    ),
    Attack(
        "an abstract Unix socket",
        "import socket\ndef attack():\n    socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)\n    return True",
        control=True,
    ),
    # -- other processes
    Attack(
        "read another process's environment",
        "def attack():\n"
        "    return dict(v.split('=', 1) for v in open(f'/proc/{VICTIM}/environ').read().split('\\0') if v)['CANARY']",
        control=True,
    ),
    Attack("read our environment", "import os\ndef attack(): return ENV in os.environ"),
    Attack("kill a process", "import os\ndef attack():\n    os.kill(VICTIM, 9)\n    return True", control=True),
    Attack(
        "trace a process",
        CALL + "def attack(): return libc.ptrace(16, VICTIM, None, None) == 0",
        control=may_trace(),
    ),
    Attack(
        "fork",
        "import os\n"
        "def attack():\n"
        "    for n in range(20):\n"
        "        if os.fork() == 0:\n"
        "            os._exit(0)\n"
        "    return True",
        control=True,
    ),
    Attack(
        "outlive the verdict",
        "import os, time\n"
        "def attack():\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(0.2)\n"
        "            open(FOLDER + '/late', 'w')\n"
        "        os._exit(0)\n"
        "    return 1\n",
        control=True,
        after=0.8,
    ),
    # -- the kernel
    Attack(
        "system calls of i386",
        "import ctypes, mmap, struct, os\n"
        "def attack():\n"
        "    if os.uname().machine != 'x86_64':\n"
        "        return False\n"
        "    code = b'\\x53\\xb8' + struct.pack('<I', 37) + b'\\xbb' + struct.pack('<I', VICTIM)\n"
        "    code += b'\\xb9\\x09\\x00\\x00\\x00\\xcd\\x80\\x5b\\xc3'\n"
        "    m = mmap.mmap(-1, 4096, prot=7)\n"
        "    m.write(code)\n"
        "    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))() == 0\n",
        reason="error: the program ended" if os.uname().machine == "x86_64" else None,
    ),
    # -- resources
    Attack("memory", "def attack(): return len(bytearray(2 << 30)) > 0", reason="memory"),
    Attack(
        "no end, deaf to signals",
        "import signal\n"
        "for s in (signal.SIGALRM, signal.SIGTERM, signal.SIGXCPU, signal.SIGINT):\n"
        "    signal.signal(s, signal.SIG_IGN)\n"
        "def attack():\n    while True: pass\n",
        limits=QUICK,
        reason="timeout",
    ),
    Attack("recursion", "def attack(): return attack()", reason="error: RecursionError"),
    Attack(
        "output without end",
        "import os, sys\n"
        "def attack():\n"
        "    for _ in range(300):\n"
        "        sys.stdout.write('x' * 100000)\n"
        "        os.write(2, b'x' * 100000)\n"
        "    return 0\n",
        reason="wrong answer",
    ),
    # -- the verdict
    Attack(
        "equal to everything",
        "class E:\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    __hash__ = None\n"
        "def attack(): return E()",
        FORGED,
        reason="wrong answer",
    ),
    *(
        Attack(
            f"{value} equal to everything",
            "import collections, datetime, decimal, fractions\n"
            f"class E({kind}):\n"
            "    def __eq__(self, other): return True\n"
            "    def __ne__(self, other): return False\n"
            "    def __bool__(self): return True\n"
            "    def __hash__(self): return 0\n"
            "    def __str__(self): return 'x'\n"
            "    def __getattr__(self, name): return self\n"
            f"def attack(): return {value}",
            FORGED,
            reason="wrong answer",
        )
        for kind, value in {
            "decimal.Decimal": "E('1')",
            "collections.defaultdict": "E(lambda: E(), a=1)",
            "collections.namedtuple('point', 'x y')": "E(1, 2)",
            "dict": "E(a=1).keys()",
            "collections.UserString": "E('x')",
        }.items()
    ),
    Attack(
        "look for the answer in frames and memory",
        "import gc, re, sys\n"
        "def attack():\n"
        "    frame, seen = sys._getframe(), []\n"
        "    while frame:\n"
        "        seen += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]\n"
        "        frame = frame.f_back\n"
        "    seen += [repr(o)[:10000] for o in gc.get_objects()[:5000] if isinstance(o, (dict, list))]\n"
        "    return re.findall('[0-9a-f]{32}', ''.join(seen))\n",
        test="def check(candidate):\n    assert {token!r} in candidate()\n",
        reason="wrong answer",
    ),
    Attack(
        "write a verdict everywhere",
        "import os\n"
        "for fd in range(4096):\n"
        "    try:\n"
        '        os.write(fd, b\'{"passed": true, "reason": "passed"}\\n\' * 3)\n'
        "    except OSError:\n"
        "        pass\n"
        "def attack(): return 0\n",
        FORGED,
    ),
    Attack(
        "answer twice",
        WIRE + "n = 0\ndef attack():\n    global n\n    n += 1\n    say({'call': n, 'value': 'x'})\n    return 'x'\n",
        test="def check(candidate):\n    assert candidate() == 'x'\n    assert candidate() == 'x'\n    candidate()\n",
        reason="error: not an answer",
    ),
    Attack(
        "flood the socket",
        WIRE + "def attack():\n    while True: os.write(sockets()[0], b'\\xff' * 65536)\n",
        FORGED,
        reason="error: not an answer to the call (TooLarge)",
    ),
    *(
        Attack(
            f"answer with {name}",
            WIRE + f"def attack():\n    say({body})\n    import time; time.sleep(60)\n",
            test="def check(candidate):\n    try:\n        candidate()\n    except Exception:\n        pass\n",
            reason="error: not an answer",
        )
        for name, body in {
            "deep JSON": "b'{\"call\": 1, \"value\": ' + b'[' * 200000 + b']' * 200000 + b'}'",
            "a deep value": "b'{\"call\": 1, \"value\": ' + b'[\"list\", [' * 900 + b']]' * 900 + b'}'",
            "a number of a million digits": "b'{\"call\": 1, \"value\": ' + b'9' * 1000000 + b'}'",
            "something that is no JSON": "b'\\xff\\xfe\\0\\0'",
            "the wrong call": "{'call': 2, 'value': 1}",
            "too much": "{'call': 1, 'value': 1, 'passed': True}",
            "code for a field": "{'call': 1, 'value': ['namedtuple', ['p', ['x=print()'], [1]]]}",
            "a default of its own": "{'call': 1, 'value': ['defaultdict', ['eval', []]]}",
            "a number that is none": "{'call': 1, 'value': ['Decimal', '__import__(\"os\")']}",
            "an unknown kind": "{'call': 1, 'value': ['eval', '1']}",
        }.items()
    ),
    Attack(
        "patch what answers",
        "import sys\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if name.startswith('inside'):\n"
        "        for key in list(vars(module)):\n"
        "            if callable(vars(module)[key]):\n"
        "                setattr(module, key, lambda *a, **k: True)\n"
        "def attack(): return 1\n",
        FORGED,
    ),
]
