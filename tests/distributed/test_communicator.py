# SPDX-License-Identifier: Apache-2.0
"""The verbs over a real process group deliver and count what they do on threads."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld, VaeGroups, agree, agree_on
from vllm_omni_vae.distributed.communicator import Communicator
from vllm_omni_vae.errors import Cancelled, DisagreementError, RankError

pytestmark = pytest.mark.distributed


def verbs(comm: Communicator) -> dict[str, Any]:
    """What every verb delivers on this rank; the same on any transport."""
    rank, size = comm.rank, comm.size
    after, before = (rank + 1) % size, (rank - 1) % size
    found: dict[str, Any] = {"who": [rank, size]}

    whole = torch.arange(24.0).view(4, 6) + 100 * rank
    cropped, turned = torch.empty(4, 2), torch.empty(6, 4)
    comm.exchange([(after, whole[:, 2:4]), (after, whole.t())], [(before, cropped), (before, turned)])
    found["views"] = [cropped.tolist(), turned.tolist()]

    bits = torch.empty(3, dtype=torch.bfloat16)
    comm.exchange([(before, torch.full((3,), 0.1 + rank).to(torch.bfloat16))], [(after, bits)])
    found["bfloat16"] = bits.float().tolist()
    comm.exchange([], [])

    sizes = [0 if r == 1 else r + 2 for r in range(size)]
    pieces = comm.gather(torch.full((sizes[rank],), float(rank)), sizes, size - 1)
    found["gather"] = pieces and [piece.tolist() for piece in pieces]

    found["all_gather"] = comm.all_gather(torch.tensor([[rank, 1], [2, 3]]).t()).tolist()
    total, most, told = (torch.tensor([rank, -rank], dtype=torch.int64) for _ in range(3))
    comm.all_reduce(total)
    comm.all_reduce(most, "max")
    comm.broadcast(told, size - 1)
    found["reduced"] = [total.tolist(), most.tolist(), told.tolist()]

    try:
        comm.exchange([], [(before, torch.empty(3, 4)[:, :2])])
    except DisagreementError as error:
        found["gaps"] = str(error)
    for name, step in (
        ("facts", lambda: agree_on(comm, {"same": 1, "different": rank})),
        ("failed", lambda: agree(comm, ValueError("odd") if rank == size - 1 else None)),
        ("cancelled", lambda: agree(comm, Cancelled("stop") if rank == 0 else None)),
        ("fine", lambda: agree_on(comm, {"same": 1})),
    ):
        try:
            step()
            found[name] = ""
        except (DisagreementError, RankError, Cancelled) as error:
            found[name] = f"{type(error).__name__}: {error}"
    traffic = comm.traffic
    found["traffic"] = [traffic.messages, traffic.bytes, traffic.broadcast_bytes, traffic.collectives]
    return found


def over_gloo(rank: int, size: int, *, workers: list[int]) -> Any:
    """Case: every verb among some of the ranks."""
    groups = VaeGroups.create(len(workers), workers)
    return verbs(groups.work) if groups.work is not None else None


@pytest.mark.parametrize(("size", "workers"), [(2, [0, 1]), (3, [0, 1, 2]), (4, [1, 3]), (4, [1, 2, 3])])
def test_the_same_as_on_threads(size: int, workers: list[int], worlds: Worlds) -> None:
    def on_threads(comm: LocalCommunicator) -> dict[str, Any]:
        return verbs(comm)

    answers = worlds[size].run(over_gloo, workers=workers)
    assert [answers[rank] for rank in workers] == LocalWorld(len(workers)).run(on_threads)
    assert [answers[rank] for rank in range(size) if rank not in workers] == [None] * (size - len(workers))
    first = answers[workers[0]]
    assert first["facts"].startswith("DisagreementError: ranks came with different different: rank 0 has 0, ")
    assert first["failed"] == f"RankError: rank {len(workers) - 1} failed: ValueError: odd"
    assert first["cancelled"] == "Cancelled: the job was cancelled"
    assert first["fine"] == ""
    assert "is a view with gaps" in first["gaps"]
