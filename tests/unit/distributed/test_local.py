# SPDX-License-Identifier: Apache-2.0
"""Threads as ranks: what the verbs deliver, what they count, and what raises where processes would wait for ever."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_vae.distributed import Communicator, LocalCommunicator, LocalWorld, NullCommunicator
from vllm_omni_vae.errors import DeadlockError, DisagreementError

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def of(rank: int, *shape: int) -> torch.Tensor:
    return torch.full(shape or (2,), float(rank))


@SIZES
def test_ranks_are_numbered_and_results_come_in_their_order(size: int) -> None:
    def who(comm: LocalCommunicator) -> tuple[int, int, str]:
        return comm.rank, comm.size, str(comm.control_device)

    assert LocalWorld(size).run(who) == [(rank, size, "cpu") for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_neighbours_exchange_around_a_ring(size: int) -> None:
    def ring(comm: LocalCommunicator) -> tuple[list[float], list[float]]:
        after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
        above, below = torch.empty(3), torch.empty(2)
        comm.exchange([(after, of(comm.rank, 3)), (before, of(-comm.rank, 2))], [(before, above), (after, below)])
        return above.tolist(), below.tolist()

    for rank, (above, below) in enumerate(LocalWorld(size).run(ring)):
        assert above == [float((rank - 1) % size)] * 3
        assert below == [-float((rank + 1) % size)] * 2


def test_messages_between_two_ranks_keep_their_order() -> None:
    def two(comm: LocalCommunicator) -> list[float]:
        if comm.rank == 0:
            comm.exchange([(1, of(1)), (1, of(2))], [])
            comm.exchange([(1, of(3))], [])
            return []
        buffers = [torch.empty(2) for _ in range(3)]
        comm.exchange([], [(0, buffer) for buffer in buffers])
        return [float(buffer[0]) for buffer in buffers]

    assert LocalWorld(2).run(two)[1] == [1.0, 2.0, 3.0]


def test_a_view_with_gaps_is_sent_as_its_values() -> None:
    def cropped(comm: LocalCommunicator) -> list[list[float]]:
        whole = torch.arange(12.0).view(3, 4)
        buffer = torch.empty(3, 2)
        if comm.rank == 0:
            comm.exchange([(1, whole[:, 1:3])], [])
            return []
        comm.exchange([], [(0, buffer)])
        return buffer.tolist()

    assert LocalWorld(2).run(cropped)[1] == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]


def test_what_is_sent_may_be_overwritten_at_once() -> None:
    def overwrite(comm: LocalCommunicator) -> float:
        tensor = of(comm.rank + 1)
        buffer = torch.empty(2)
        comm.exchange([(1 - comm.rank, tensor)], [])
        tensor.zero_()
        comm.exchange([], [(1 - comm.rank, buffer)])
        return float(buffer[0])

    assert LocalWorld(2).run(overwrite) == [2.0, 1.0]


def test_a_buffer_with_gaps_is_refused_before_anything_is_sent() -> None:
    def gaps(comm: LocalCommunicator) -> int:
        with pytest.raises(DisagreementError, match="the buffer for rank 0 is a view with gaps"):
            comm.exchange([(0, of(1))], [(0, torch.empty(3, 4)[:, :2])])
        return comm.traffic.messages

    assert LocalWorld(2).run(gaps) == [0, 0]


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_collectives(size: int, dtype: torch.dtype) -> None:
    def all_of_them(comm: LocalCommunicator) -> dict[str, Any]:
        mine = torch.tensor([[comm.rank, 1], [2, comm.rank]], dtype=dtype)
        gathered = comm.all_gather(mine.t())
        total, most, told = mine.clone(), mine.clone(), mine.clone()
        comm.all_reduce(total)
        comm.all_reduce(most, "max")
        comm.broadcast(told, size - 1)
        return {"gathered": gathered, "total": total, "most": most, "told": told, "mine": mine}

    ranks = LocalWorld(size).run(all_of_them)
    pieces = torch.stack([r["mine"] for r in ranks])
    for r in ranks:
        assert r["gathered"].dtype == r["total"].dtype == dtype
        assert torch.equal(r["gathered"], pieces.transpose(1, 2))
        assert torch.equal(r["total"], pieces.sum(0).to(dtype))
        assert torch.equal(r["most"], pieces.amax(0))
        assert torch.equal(r["told"], pieces[size - 1])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=25)
def test_gather_brings_exact_sizes_to_one_rank(sizes: list[int], data: st.DataObject) -> None:
    dst = data.draw(st.integers(0, len(sizes) - 1))

    def gather(comm: LocalCommunicator) -> tuple[list[list[float]] | None, int, int]:
        pieces = comm.gather(of(comm.rank, sizes[comm.rank]), sizes, dst)
        return pieces and [p.tolist() for p in pieces], comm.traffic.messages, comm.traffic.bytes

    for rank, (pieces, messages, sent) in enumerate(LocalWorld(len(sizes)).run(gather)):
        assert pieces == ([[float(r)] * n for r, n in enumerate(sizes)] if rank == dst else None)
        assert messages == int(rank != dst and sizes[rank] > 0)
        assert sent == 4 * sizes[rank] * messages


def test_the_destination_keeps_its_own_piece_itself() -> None:
    def own(comm: LocalCommunicator) -> bool:
        piece = of(comm.rank)
        pieces = comm.gather(piece, [2, 2], 1)
        return pieces is not None and pieces[1] is piece

    assert LocalWorld(2).run(own) == [False, True]


def test_traffic_counts_what_a_rank_sends() -> None:
    def traffic(comm: LocalCommunicator) -> Any:
        other = 1 - comm.rank
        comm.exchange([(other, of(0, 3)), (other, of(0, 2).to(torch.bfloat16))], [])
        comm.exchange([], [(other, torch.empty(3)), (other, torch.empty(2, dtype=torch.bfloat16))])
        comm.exchange([], [])
        comm.all_gather(of(0))
        comm.all_gather(of(0))
        comm.all_reduce(of(0))
        comm.broadcast(of(0, 5), 1)
        t = comm.traffic
        return t.messages, t.bytes, t.broadcast_bytes, t.collectives

    collectives = {"all_gather": 2, "all_reduce": 1, "broadcast": 1}
    assert LocalWorld(2).run(traffic) == [(2, 16, 0, collectives), (2, 16, 20, collectives)]


def receive_from_nobody(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.exchange([], [(1, torch.empty(2))])


def everyone_receives(comm: Communicator) -> None:
    comm.exchange([], [((comm.rank + 1) % comm.size, torch.empty(2))])


def one_stays_away(comm: Communicator) -> None:
    if comm.rank:
        comm.all_gather(of(0))


def one_returns_early_and_one_receives(comm: Communicator) -> None:
    if comm.rank == 0:
        return
    if comm.rank == 1:
        comm.exchange([], [(0, torch.empty(2))])
    else:
        comm.all_reduce(of(0))


@pytest.mark.parametrize(
    ("function", "size", "reason"),
    [
        (receive_from_nobody, 2, r"rank 0 waits for a message from rank 1; returned: \[1\]"),
        (everyone_receives, 3, "rank 0 waits for a message from rank 1; rank 1 waits for a message from rank 2"),
        (one_stays_away, 3, r"rank 1 waits for the others in all_gather; .*returned: \[0\]"),
        (one_returns_early_and_one_receives, 3, "rank 1 waits for a message from rank 0; rank 2 .* all_reduce sum"),
    ],
)
def test_what_would_wait_for_ever_raises(function: Callable[[Communicator], None], size: int, reason: str) -> None:
    with pytest.raises(DeadlockError, match=f"no rank can go on: {reason}"):
        LocalWorld(size).run(function)


def test_every_waiting_rank_hears_of_a_deadlock() -> None:
    heard: dict[int, str] = {}

    def listen(comm: LocalCommunicator) -> None:
        try:
            everyone_receives(comm)
        except DeadlockError as error:
            heard[comm.rank] = str(error)

    LocalWorld(3).run(listen)
    assert sorted(heard) == [0, 1, 2]
    assert len(set(heard.values())) == 1


def test_a_rank_that_computes_is_no_deadlock() -> None:
    computing = threading.Event()

    def slow(comm: LocalCommunicator) -> float:
        if comm.rank == 0:
            assert computing.wait(10)
            return float(comm.all_gather(of(0)).sum())
        computing.set()
        return float(comm.all_gather(of(1)).sum())

    assert LocalWorld(2).run(slow) == [2.0, 2.0]


def test_a_message_that_nobody_took_is_found() -> None:
    def send(comm: LocalCommunicator) -> None:
        if comm.rank == 0:
            comm.exchange([(1, of(0))], [])

    with pytest.raises(DeadlockError, match=r"messages that nobody received, by \(from, to\): \{\(0, 1\): 1\}"):
        LocalWorld(2).run(send)


def test_the_error_of_a_rank_comes_before_the_deadlocks_that_it_causes() -> None:
    def fail(comm: LocalCommunicator) -> None:
        if comm.rank == 2:
            raise ValueError("odd")
        comm.all_gather(of(0))

    with pytest.raises(ValueError, match="odd"):
        LocalWorld(3).run(fail)

    def fail_twice(comm: LocalCommunicator) -> None:
        raise ValueError(f"rank {comm.rank}")

    with pytest.raises(ValueError, match="rank 0"):
        LocalWorld(3).run(fail_twice)


def different_collectives(comm: Communicator) -> None:
    if comm.rank:
        comm.all_gather(of(0))
    else:
        comm.all_reduce(of(0))


def different_shapes(comm: Communicator) -> None:
    comm.all_gather(of(0, 2 + comm.rank))


def different_types(comm: Communicator) -> None:
    comm.all_reduce(of(0).to(torch.float64 if comm.rank else torch.float32))


def different_reductions(comm: Communicator) -> None:
    comm.all_reduce(of(0), "max" if comm.rank else "sum")


def different_sources(comm: Communicator) -> None:
    comm.broadcast(of(0), comm.rank)


@pytest.mark.parametrize(
    "function", [different_collectives, different_shapes, different_types, different_reductions, different_sources]
)
def test_collectives_that_do_not_match_raise_on_every_rank(function: Callable[[Communicator], None]) -> None:
    def both(comm: LocalCommunicator) -> None:
        with pytest.raises(DisagreementError, match="ranks met in different collectives"):
            function(comm)

    assert LocalWorld(2).run(both) == [None, None]


@pytest.mark.parametrize("sent", [of(0, 3), of(0, 2).double()])
def test_messages_that_do_not_match_their_buffer_raise(sent: torch.Tensor) -> None:
    def mismatch(comm: LocalCommunicator) -> None:
        comm.exchange([(1, sent)] if comm.rank == 0 else [], [(0, torch.empty(2))] if comm.rank else [])

    with pytest.raises(DisagreementError, match=r"rank 0 sent .*, rank 1 expected 2 x torch.float32"):
        LocalWorld(2).run(mismatch)


def test_a_world_can_be_used_again() -> None:
    world = LocalWorld(2)
    for number in range(3):

        def gather(comm: LocalCommunicator, number: int = number) -> list[float]:
            buffer = torch.empty(2)
            comm.exchange([(1 - comm.rank, of(number))], [(1 - comm.rank, buffer)])
            return [*comm.all_gather(of(10 * number + comm.rank, 1)).flatten().tolist(), float(buffer[0])]

        assert world.run(gather) == [[10.0 * number, 10.0 * number + 1, float(number)]] * 2


def test_the_null_communicator_moves_nothing_but_counts() -> None:
    comm = NullCommunicator(1, 3)
    buffer, tensor = of(7), of(1)
    comm.exchange([(0, tensor)], [(2, buffer)])
    assert buffer.tolist() == [7.0, 7.0]
    assert comm.all_gather(tensor).tolist() == [[1.0, 1.0]] * 3
    comm.all_reduce(tensor)
    comm.broadcast(tensor, 0)
    assert tensor.tolist() == [1.0, 1.0]
    assert comm.gather(tensor, [2, 2, 2], 0) is None
    pieces = comm.gather(tensor, [4, 2, 0], 1)
    assert pieces is not None
    assert [piece.numel() for piece in pieces] == [4, 2, 0]
    assert (comm.traffic.messages, comm.traffic.bytes) == (2, 16)
    assert comm.traffic.collectives == {"all_gather": 1, "all_reduce": 1, "broadcast": 1, "gather": 2}
