# SPDX-License-Identifier: Apache-2.0
"""Entry point of a rank process: ``python -m vllm_omni_vae.worker FD``, started by `WorkerGroup` alone."""

from __future__ import annotations

import logging
import sys
from multiprocessing.connection import Connection

from .. import envs
from .lifetime import end_with_parent


def main() -> None:
    """Serve over the inherited pipe. The parent's death ends this process; its terminal does not."""
    end_with_parent()
    logging.basicConfig(level=envs.log_level(), stream=sys.stderr)
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    from .worker import run_rank

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    run_rank(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
