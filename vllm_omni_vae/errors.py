# SPDX-License-Identifier: Apache-2.0
"""Every exception that this package raises on purpose.

::

    VaeParallelError
    ├── ConfigurationError (ValueError)   start-up: a flag, a combination or a checkpoint that cannot work
    │   ├── GeometryError                 a tile size, a stride or a tensor shape
    │   ├── UnsupportedError              a known mode or feature which this family or pipeline does not have
    │   └── SelfTestError                 a strategy does not give here what it promises
    ├── RequestError (ValueError)         one request that cannot be made; names the parameter
    ├── QueueFullError                    the engine takes no more jobs for now
    ├── Cancelled                         the caller asked for the job to stop
    ├── RankError (RuntimeError)          a rank failed inside a collective step; the same on every rank
    │   └── RankMemoryError               it ran out of memory there, and no rank failed otherwise
    ├── PeerLostError (RuntimeError)      another rank went away in the middle of an exchange
    ├── DisagreementError (RuntimeError)  ranks came to one collective step with different inputs
    ├── DeadlockError (RuntimeError)      threads as ranks: a real process group would wait for ever here
    └── EngineError (RuntimeError)        a worker process died, stalled or could not start

Messages say what was asked, what was found, and what to do about it.
"""


class VaeParallelError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(VaeParallelError, ValueError):
    """Start-up was asked for something that cannot work."""


class GeometryError(ConfigurationError):
    """A tile geometry or a tensor shape cannot be used."""


class UnsupportedError(ConfigurationError):
    """The family or pipeline is known but lacks what was asked for."""


class SelfTestError(ConfigurationError):
    """A strategy was tried on this machine, with these weights, and does not give what it promises."""


class RequestError(VaeParallelError, ValueError):
    """One request cannot be made as asked; the server answers it with a 4xx.

    Args:
        message: What was asked, what is possible, what to do.
        param: Name of the request field at fault, if it is one field.
        code: Short machine-readable reason.
        status: HTTP status that fits: 400 for a combination, 413 too large, 422 out of range.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 422):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class QueueFullError(VaeParallelError):
    """The engine already holds as many waiting jobs as it may."""


class Cancelled(VaeParallelError):
    """The job was stopped because its owner asked for it."""


class RankError(VaeParallelError, RuntimeError):
    """A rank failed in a collective step; every rank of the step raises this with the first reason.

    Args:
        rank: Rank (within the group of the step) that failed first.
        reason: Type and message of its exception.
    """

    def __init__(self, rank: int, reason: str):
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank
        self.reason = reason


class RankMemoryError(RankError):
    """A rank ran out of memory in a collective step; every rank of the step raises this and can take another way."""


class PeerLostError(VaeParallelError, RuntimeError):
    """An exchange ended because another rank went away; that rank knows why."""


class DisagreementError(VaeParallelError, RuntimeError):
    """Ranks entered one collective step with different inputs or settings."""


class DeadlockError(VaeParallelError, RuntimeError):
    """Ranks that are threads wait for each other and nobody can go on."""


class EngineError(VaeParallelError, RuntimeError):
    """A worker process died, stalled or could not be started.

    Args:
        message: What happened to which rank.
        code: Short machine-readable reason.
    """

    def __init__(self, message: str, *, code: str = "worker_failed"):
        super().__init__(message)
        self.code = code
