# SPDX-License-Identifier: Apache-2.0
"""All ranks leave a step with the same answer."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from vllm_omni_vae.distributed import Communicator, LocalCommunicator, LocalWorld, VaeGroups, agree, agree_on
from vllm_omni_vae.errors import Cancelled, ConfigurationError, DisagreementError, RankError

SIZES = pytest.mark.parametrize("size", [2, 3, 4])


def heard_by(size: int, step: Callable[[Communicator], None]) -> list[tuple[type | None, str, Any, int]]:
    """Per rank: type and message of what ``step`` raised, its cause, and the collectives that it took."""

    def body(comm: LocalCommunicator) -> tuple[type | None, str, Any, int]:
        kind, message, cause = None, "", None
        try:
            step(comm)
        except Exception as error:
            kind, message, cause = type(error), str(error), error.__cause__
        return kind, message, cause, sum(comm.traffic.collectives.values())

    return LocalWorld(size).run(body)


@SIZES
def test_nothing_happens_when_all_is_well(size: int) -> None:
    assert heard_by(size, agree) == [(None, "", None, 1)] * size
    facts = {"shape": (1, 2), "dtype": "float32"}
    assert heard_by(size, lambda comm: agree_on(comm, facts)) == [(None, "", None, 1)] * size


@SIZES
@pytest.mark.parametrize("step", [agree, lambda comm, error: agree_on(comm, {"shape": comm.rank}, error)])
def test_the_lowest_failed_rank_is_named_everywhere(
    size: int, step: Callable[[Communicator, Exception | None], None]
) -> None:
    errors = {rank: ValueError(f"odd {rank}") for rank in range(1, size)}
    for rank, (kind, message, cause, _) in enumerate(heard_by(size, lambda comm: step(comm, errors.get(comm.rank)))):
        assert kind is RankError
        assert message == "rank 1 failed: ValueError: odd 1"
        assert cause is errors.get(rank), "the original stays with the rank that failed"


@SIZES
def test_a_rank_error_carries_rank_and_reason(size: int) -> None:
    def body(comm: LocalCommunicator) -> tuple[int, str]:
        with pytest.raises(RankError) as caught:
            agree(comm, KeyError("k") if comm.rank == size - 1 else None)
        return caught.value.rank, caught.value.reason

    assert LocalWorld(size).run(body) == [(size - 1, "KeyError: 'k'")] * size


@SIZES
def test_cancelled_is_heard_everywhere_and_a_failure_comes_first(size: int) -> None:
    def cancel(comm: Communicator) -> None:
        agree(comm, Cancelled("stop") if comm.rank == 1 else None)

    assert {heard[0] for heard in heard_by(size, cancel)} == {Cancelled}

    def cancel_and_fail(comm: Communicator) -> None:
        agree(comm, Cancelled("stop") if comm.rank == 0 else ValueError("odd") if comm.rank == 1 else None)

    for kind, message, _, _ in heard_by(size, cancel_and_fail):
        assert (kind, message) == (RankError, "rank 1 failed: ValueError: odd")


@pytest.mark.parametrize("text", ["x" * 5000, "ä" * 1000, "two\nlines", "", "\0"])
def test_any_text_of_an_error_arrives(text: str) -> None:
    for kind, message, _, _ in heard_by(2, lambda comm: agree(comm, ValueError(text) if comm.rank else None)):
        assert kind is RankError
        start = f"rank 1 failed: ValueError: {text}".rstrip("\0")
        assert message[:500] == start[:500]


@SIZES
@pytest.mark.parametrize(
    ("of", "named"),
    [
        (lambda rank, last: {"shape": (rank == last, 2), "dtype": rank}, "shape: rank 0 has (False, 2), "),
        (lambda rank, last: {"shape": 1, "dtype": "f16" if rank == last else "f32"}, "dtype: rank 0 has f32, "),
        (lambda rank, last: {"a": "x", "b": "y", "c": rank == last}, "c: rank 0 has False, "),
    ],
)
def test_the_first_different_fact_is_named_with_every_value(
    size: int, of: Callable[[int, int], Mapping[str, object]], named: str
) -> None:
    last = size - 1
    for kind, message, _, _ in heard_by(size, lambda comm: agree_on(comm, of(comm.rank, last))):
        assert kind is DisagreementError
        assert message.startswith(f"ranks came with different {named}")
        assert all(f"rank {rank} has " in message for rank in range(size))
        assert message.endswith("every rank must make the same call with the same input")


def test_values_are_compared_by_their_text() -> None:
    for kind, _, _, _ in heard_by(2, lambda comm: agree_on(comm, {"size": "1" if comm.rank else 1})):
        assert kind is None


def test_groups_need_torch_distributed() -> None:
    with pytest.raises(ConfigurationError, match=r"2 VAE ranks were asked for but torch.distributed is not init"):
        VaeGroups.create(2)
