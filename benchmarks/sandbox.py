"""Runs Python that a model wrote, in a process of its own: limited time, memory and output, no network, no children.

A guard against accidents, not against attackers: code that sets out to break a Python process open should run in a
container. Knows nothing of benchmarks.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal

SECONDS = 5.0
MEMORY = 512 * 2**20

# Runs in the child before the code does. Limits hold for the process; where the system allows it, the process also
# gets a network of its own that leads nowhere. The audit hook cannot be taken off again.
_GUARD = """
import os, sys
seconds, memory, folder = int(sys.argv[1]), int(sys.argv[2]), os.path.realpath(".")
try:
    import resource
    for name, limit in (("CPU", seconds), ("AS", memory), ("DATA", memory), ("FSIZE", 1 << 20), ("CORE", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET
except (ImportError, AttributeError, OSError, ValueError):
    pass
refused = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
           "os.chmod", "os.chown", "os.putenv", "ctypes.", "shutil.", "signal.pthread_kill", "pty.", "webbrowser.")
changing = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
inside = folder + os.sep
def guard(event, args, realpath=os.path.realpath, fspath=os.fspath, writing=os.O_WRONLY | os.O_RDWR | os.O_CREAT):
    if event.startswith(refused):
        raise PermissionError(event + " is not allowed here")
    if event in changing or event == "open" and isinstance(args[0], (str, bytes)) and (args[2] or 0) & writing:
        for path in args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]:
            path = fspath(path)
            path = path.decode() if isinstance(path, bytes) else path
            if not realpath(path).startswith(inside):
                raise PermissionError("writing outside of the working folder is not allowed here")
program, mark = sys.stdin.read().split("\\0")
sys.stdin = open(os.devnull)
code = compile(program, "answer.py", "exec")
sys.argv, shown, flush = ["answer.py"], sys.stdout.write, sys.stdout.flush
sys.addaudithook(guard)
exec(code, {"__name__": "__main__"})
shown(mark)
flush()
"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended: it ran to its end ("passed"), raised something or left early ("failed"), was stopped when
    its time was up ("timed out"), or the process died ("crashed"). `detail` is the last line that it complained with.
    """

    verdict: Literal["passed", "failed", "timed out", "crashed"]
    detail: str = ""


def run(program: str, seconds: float = SECONDS, memory: int = MEMORY) -> Outcome:
    """Runs a program to its end, or stops it.

    Args:
        seconds: of the clock, and (rounded up) of the processor.
        memory: bytes of address space.
    """
    mark = secrets.token_hex(16)  # only a program that runs to its end gets it written
    with tempfile.TemporaryDirectory(prefix="moa-sandbox-") as folder, tempfile.TemporaryFile() as told:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(int(seconds) + 1), str(memory)],
            stdin=subprocess.PIPE,
            stdout=told,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(f"{program}\0{mark}".encode(errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome("timed out", f"stopped after {seconds:g} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        told.seek(max(0, told.seek(0, os.SEEK_END) - 4096))
        text = told.read().decode(errors="replace")
    if process.returncode == 0 and text.endswith(mark):
        return Outcome("passed")
    if process.returncode == -signal.SIGXCPU:
        return Outcome("timed out", "used up its processor time")
    if process.returncode < 0:
        return Outcome("crashed", f"ended by {signal.Signals(-process.returncode).name}")
    lines = text.strip().splitlines()
    return Outcome("failed", lines[-1][:200] if lines else "left early")
