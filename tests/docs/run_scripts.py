# SPDX-License-Identifier: Apache-2.0
"""Run several scripts one after the other on the ranks that torchrun started, so that torch is imported only once.

The arguments are a free port and a JSON list for each script: its path, then its arguments.
"""

import json
import os
import runpy
import sys

import torch.distributed as dist


def main() -> None:
    # torchrun's own store keeps the addresses of ranks that have met before; a store for each script does not.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    arguments = sys.argv[1:]
    for port, script in zip(arguments[::2], arguments[1::2], strict=True):
        os.environ["MASTER_PORT"] = port
        sys.argv = json.loads(script)
        runpy.run_path(sys.argv[0], run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
