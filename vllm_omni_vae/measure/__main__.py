# SPDX-License-Identifier: Apache-2.0
"""Entry point of a rank process: ``python -m vllm_omni_vae.measure FD``, started by `Ranks` alone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from multiprocessing.connection import Connection

from .. import envs
from ..errors import PeerLostError
from ..worker.lifetime import end_with_parent
from .messages import Failed, Setup


def main() -> None:
    """Measure what comes over the inherited pipe, one job after the other, and tell it. Ends with its parent."""
    end_with_parent()
    logging.basicConfig(level=envs.log_level(), stream=sys.stderr)
    pipe = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):  # the command is gone
        while True:
            setup: Setup = pipe.recv()
            if os.getppid() != setup.command:  # it was gone before this process asked to end with it
                raise EOFError
            try:
                from .rank import measure

                pipe.send(measure(setup, pipe.send))
            except Exception as error:
                traceback.print_exc()
                pipe.send(Failed(f"{type(error).__name__}: {error}", isinstance(error, PeerLostError)))
                pipe.poll(None)  # others may still say more; the command ends this process
                break
    pipe.close()
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
