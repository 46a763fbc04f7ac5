# SPDX-License-Identifier: Apache-2.0
"""Run a command, and fail if processes that it started are still there when it has ended.

    python tools/no_leftovers.py COMMAND [ARGUMENT ...]

Every process inherits a token through its environment, so one is found even if it detached itself and its parents are
gone. Those found are named and ended. The exit code is the command's, or 1 if only processes were left. Where the
system has no /proc the command is run without the check.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

GRACE_SECONDS = 5.0
VARIABLE = "VLLM_OMNI_VAE_RUN"


def holders(token: bytes) -> dict[int, str]:
    """Return the live processes that were started with ``token`` in their environment, with their command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if token in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(process.name)] = command.decode(errors="replace").strip()
        except OSError:  # it ended meanwhile, or belongs to someone else
            continue
    return found


def main(command: list[str]) -> int:
    token = uuid.uuid4().hex
    # Ctrl-C reaches the command as well, which decides what becomes of it; this process waits for it either way.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.run(command, env=os.environ | {VARIABLE: token}).returncode
    deadline = time.monotonic() + GRACE_SECONDS
    wanted = f"{VARIABLE}={token}".encode()
    while (left := holders(wanted)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid, line in left.items():
        print(f"left running by `{' '.join(command)}`: process {pid}: {line}", file=sys.stderr)
        os.kill(pid, signal.SIGKILL)
    return code or int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
