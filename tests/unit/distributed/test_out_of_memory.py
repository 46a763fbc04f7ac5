# SPDX-License-Identifier: Apache-2.0
"""An error that means "no memory" is known whoever raises it, and stays one on its way to the other ranks."""

from collections.abc import Mapping

import pytest
import torch

from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld, agree, asked_for, give_back, is_out_of_memory
from vllm_omni_vae.errors import Cancelled, PeerLostError, RankError, RankMemoryError

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB")
LOST = PeerLostError("an exchange broke off")


def test_the_cpu_s_allocator() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert asked_for(str(caught.value)) == f"{2**60} bytes"


def test_python_s_allocator() -> None:
    with pytest.raises(MemoryError) as caught:
        bytearray(2**60)
    assert is_out_of_memory(caught.value)
    assert asked_for(str(caught.value)) == ""


def test_what_others_say() -> None:
    assert is_out_of_memory(NO_MEMORY)
    assert asked_for(str(NO_MEMORY)) == "2.00 GiB"
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a convolution"))


@pytest.mark.parametrize("error", [None, ValueError("out of memory"), RuntimeError("odd"), Cancelled("stop"), LOST])
def test_other_errors(error: Exception | None) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("errors", "kind", "rank"),
    [
        ({1: NO_MEMORY}, RankMemoryError, 1),
        ({2: NO_MEMORY, 0: LOST}, RankMemoryError, 2),
        ({1: NO_MEMORY, 2: Cancelled("stop")}, RankMemoryError, 1),
        ({0: NO_MEMORY, 1: ValueError("odd")}, RankError, 1),
        ({0: LOST, 1: Cancelled("stop")}, Cancelled, None),
    ],
)
def test_every_rank_raises_the_same_kind(
    errors: Mapping[int, Exception], kind: type[Exception], rank: int | None
) -> None:
    def body(comm: LocalCommunicator) -> tuple[type, int | None]:
        with pytest.raises((RankError, Cancelled)) as caught:
            agree(comm, errors.get(comm.rank))
        return caught.type, getattr(caught.value, "rank", None)

    assert LocalWorld(3).run(body) == [(kind, rank)] * 3


def test_what_an_error_held_is_given_back() -> None:
    class Feature:
        alive = 0

        def __init__(self) -> None:
            Feature.alive += 1

        def __del__(self) -> None:
            Feature.alive -= 1

    def network() -> None:
        feature = Feature()
        try:
            raise MemoryError
        except MemoryError as error:
            kept = error  # as a step does that tells other ranks of it
        raise RankMemoryError(0, str(feature)) from kept

    with pytest.raises(RankMemoryError):
        network()
    give_back(torch.device("cpu"))
    assert Feature.alive == 0
