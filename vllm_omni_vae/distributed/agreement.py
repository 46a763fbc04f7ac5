# SPDX-License-Identifier: Apache-2.0
"""Make every rank raise the same error, and find out that ranks are not doing the same thing, before data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import IntEnum

import torch

from ..errors import Cancelled, DisagreementError, PeerLostError, RankError, RankMemoryError
from .communicator import Communicator
from .out_of_memory import is_out_of_memory

_TEXT_BYTES = 1024
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Outcome(IntEnum):
    FINE = 0
    PEER_LOST = 1
    CANCELLED = 2
    OUT_OF_MEMORY = 3
    FAILED = 4


def agree(comm: Communicator, error: BaseException | None = None) -> None:
    """Collective. Return if no rank brings an error; else raise the same one on every rank.

    Costs one `all_gather` of an integer, and a second of text only when there is an error.

    Args:
        comm: The ranks that must leave together.
        error: What went wrong on this rank, if anything.

    Raises:
        RankError: a rank failed; names the lowest such rank and its reason, before ranks that only lost a peer. Its
            cause is the original on that rank. `RankMemoryError` if it is memory that they had not, and nothing else.
        Cancelled: no rank failed and at least one was asked to stop.
    """
    outcomes = comm.all_gather(_integers(comm, [_outcome(error)])).flatten().tolist()
    worst = max(outcomes)
    if worst in (_Outcome.PEER_LOST, _Outcome.OUT_OF_MEMORY, _Outcome.FAILED):
        texts = _all_texts(comm, f"{type(error).__name__}: {error}" if error is not None else "")
        rank = outcomes.index(worst)
        raise (RankMemoryError if worst == _Outcome.OUT_OF_MEMORY else RankError)(rank, texts[rank]) from error
    if worst == _Outcome.CANCELLED:
        raise Cancelled("the job was cancelled") from error


def agree_on(comm: Communicator, facts: Mapping[str, object], error: BaseException | None = None) -> None:
    """Collective. `agree`, and also check that all ranks hold the same ``facts``.

    Args:
        comm: The ranks that are about to take one step together.
        facts: What must be equal; the names are the same on every rank (the caller's code), values are compared by
            their text.
        error: What went wrong on this rank before the step, if anything.

    Raises:
        DisagreementError: ranks differ; names the first such fact and every rank's value.
        RankError, Cancelled: as `agree`.
    """
    digests = [_digest(f"{name}={value}") for name, value in facts.items()]
    table = comm.all_gather(_integers(comm, [_outcome(error), *digests]))
    if table[:, 0].any():
        agree(comm, error)
    different = (table[:, 1:] != table[:1, 1:]).any(dim=0).nonzero().flatten().tolist()
    if different:
        name = list(facts)[different[0]]
        values = _all_texts(comm, str(facts[name]))
        raise DisagreementError(
            f"ranks came with different {name}: "
            + ", ".join(f"rank {r} has {v}" for r, v in enumerate(values))
            + "; every rank must make the same call with the same input"
        )


def fingerprint(x: torch.Tensor) -> tuple[int, int]:
    """Exact sums over the bits of about a million regular samples: two people's pictures do not share them."""
    step = max(1, int((x.numel() / 2**20) ** 0.5))
    sample = x.detach()[..., ::step, ::step].contiguous()
    bits = sample.view(_BITS[sample.element_size()]).to(torch.int64).flatten()
    place = torch.arange(1, bits.numel() + 1, device=x.device)
    return int(bits.sum()), int((bits * place).sum())


def _outcome(error: BaseException | None) -> int:
    if error is None:
        return _Outcome.FINE
    if isinstance(error, Cancelled):
        return _Outcome.CANCELLED
    if isinstance(error, PeerLostError):
        return _Outcome.PEER_LOST
    return _Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else _Outcome.FAILED


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _integers(comm: Communicator, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=comm.control_device)


def _all_texts(comm: Communicator, text: str) -> list[str]:
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    rows = comm.all_gather(torch.tensor(list(data), dtype=torch.uint8, device=comm.control_device))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
