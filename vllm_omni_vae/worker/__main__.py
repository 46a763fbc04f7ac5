# SPDX-License-Identifier: Apache-2.0
"""Entry point of a rank process: ``python -m vllm_omni_vae.worker FD``, started by `MultiprocGroup` alone."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from .. import envs
from .lifetime import end_with_parent
from .log import begin_log


def main() -> None:
    """Serve over the inherited pipe. The parent's death ends this process; its terminal does not."""
    end_with_parent()
    begin_log(envs.log_level())
    from .worker import run_rank

    run_rank(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
