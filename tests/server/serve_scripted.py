# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.server.serve_scripted JSON``: `vllm_omni_vae.server.app.run` with a `ScriptedEngine`, as a process.

JSON has fields of `ServerConfig`, and ``hold`` (jobs wait for SIGUSR1), ``grace`` (seconds after SIGTERM), ``images``
(the model makes images) and ``fault`` (the engine does not start, for that reason). On SIGUSR2 the engine gives up.
What happens to it is told on stdout.
"""

import json
import signal
import sys

from vllm_omni_vae.cli.exit import exit_on_error
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig, ServerConfig
from vllm_omni_vae.engine.api import JobEvent, JobHandle, Listener, Started
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.pipelines.request import GenerationRequest
from vllm_omni_vae.server import app

from .scripted_engine import CARD, IMAGES, ScriptedEngine


def main(settings: dict) -> None:
    hold, fault = settings.pop("hold", False), settings.pop("fault", None)
    card = IMAGES if settings.pop("images", False) else CARD
    app.SHUTDOWN_GRACE_S = settings.pop("grace", 10.0)

    class Told(ScriptedEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config, card=card)
            if hold:
                self.may_finish.clear()
            self.start_fault = EngineError(fault) if fault else None
            signal.signal(signal.SIGUSR1, lambda signum, frame: self.may_finish.set())
            signal.signal(signal.SIGUSR2, lambda signum, frame: self.give_up(EngineError("rank 1 died again")))

        def start(self) -> None:
            print("engine starts", flush=True)
            super().start()

        def submit(self, request: GenerationRequest, *, job_id: str, listener: Listener | None = None) -> JobHandle:
            def told(event: JobEvent) -> None:
                if listener is not None:
                    listener(event)
                if isinstance(event, Started):
                    print("a job runs", flush=True)

            handle = super().submit(request, job_id=job_id, listener=told)
            print(f"{len(self.requests)} jobs came", flush=True)
            return handle

        def close(self) -> None:
            if not self.closed:
                print("engine closes", flush=True)
            super().close()

    app.Engine = Told  # type: ignore[assignment, misc]
    with exit_on_error():
        parallel = DiffusionParallelConfig(vae_patch_parallel_size=2)
        app.run(EngineConfig(model="scripted", parallel=parallel), ServerConfig(**settings))
    print("left", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
