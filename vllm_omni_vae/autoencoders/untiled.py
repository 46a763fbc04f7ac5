# SPDX-License-Identifier: Apache-2.0
"""Diffusers' other autoencoders: their own un-tiled networks, run as a spatial shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import diffusers
import torch

from ..config import VaeParallelMode
from ..errors import UnsupportedError
from ..geometry import AxisTiling
from .arguments import call_facts
from .mixin import DistributedVaeMixin
from .policy import Decision, Strategy, select_untiled
from .sharded import run_sharded
from .spec import PLAIN, CallOptions, FamilySpec, Operation, Vae
from .state import ParallelState
from .twin import Plan, plan, tensor_in, untiled
from .untiled_classes import CLASSES, UntiledClass


class UntiledSpec(FamilySpec):
    """One of `CLASSES`: no tiles, and everything else from a run of the class without values.

    Args:
        facts: Its line in the table.
    """

    modes = frozenset(VaeParallelMode) - {VaeParallelMode.TILE}

    def __init__(self, facts: UntiledClass):
        self.name = facts.name
        self.facts = facts

    @property
    def base_class(self) -> type:
        base: type = getattr(diffusers, self.name)
        return base

    def tiling(self, vae: Vae, operation: Operation) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
        raise UnsupportedError(f"{self.name} is not shared in tiles")

    def check_tiling(self, vae: Vae) -> None:
        return

    def is_tiled(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        return False

    def check(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> None:
        return

    def reset(self, vae: Vae) -> None:
        if self.facts.reset:
            getattr(vae, self.facts.reset)()

    def channels(self, vae: Vae, operation: Operation) -> int:
        raise UnsupportedError(f"{self.name} is not shared in tiles")

    def encode_tile(self, vae: Vae, x: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        raise UnsupportedError(f"{self.name} is not shared in tiles")

    def decode_tile(self, vae: Vae, z: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        raise UnsupportedError(f"{self.name} is not shared in tiles")


class _Planned(UntiledSpec):
    """One call: what `run_sharded` asks of a family."""

    def __init__(self, facts: UntiledClass, call: Plan, args: tuple[Any, ...]):
        super().__init__(facts)
        self._plan = call
        self._args = args

    def attends(self, vae: Vae) -> bool:
        return self._plan.attends

    def latents(self, vae: Vae, operation: Operation, extents: tuple[int, int]) -> tuple[int, int]:
        return extents if operation is Operation.DECODE else (self._plan.shape[-2], self._plan.shape[-1])

    def ratio(self, vae: Vae, operation: Operation) -> int:
        assert self._plan.ratio is not None
        return self._plan.ratio if operation is Operation.ENCODE else 1

    def whole_shape(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._plan.shape

    def encode_tile(self, vae: Vae, x: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        return self._own(vae, Operation.ENCODE, x, options)

    def decode_tile(self, vae: Vae, z: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        return self._own(vae, Operation.DECODE, z, options)

    def _own(self, vae: Vae, operation: Operation, x: torch.Tensor, options: CallOptions) -> torch.Tensor:
        options.between(0, 1)
        with untiled(vae):
            return tensor_in(getattr(self.base_class, operation.value)(vae, x, *self._args, **options.arguments))


class UntiledVaeMixin(DistributedVaeMixin):
    """Spreads the feature maps of a diffusers autoencoder that is in `CLASSES` over ranks.

    The result is that of the class with ``use_tiling`` off; what it does in time and batch, such as
    ``use_framewise_decoding`` or slicing, stays as it is set. What is returned is of the class's own type: latents or
    their distribution on every rank, a sample on the output rank and zeros with one frame, row and column elsewhere.

    A request that cannot be a shard runs the class's own call on every rank.
    """

    spec: ClassVar[UntiledSpec]

    def encode(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Collective when distributed. As the diffusers class; the result is whole on every rank."""
        return self._call(Operation.ENCODE, x, args, kwargs)

    def decode(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Collective when distributed. As the diffusers class; the sample is on the output rank (see the class)."""
        return self._call(Operation.DECODE, z, args, kwargs)

    def enable_tiling(self, *args: Any, **kwargs: Any) -> None:
        """As diffusers; only for what is not a shard."""
        self.spec.base_class.enable_tiling(self, *args, **kwargs)  # type: ignore[attr-defined]

    def tiled_encode(self, *args: Any, **kwargs: Any) -> Any:
        """As diffusers, on this rank alone."""
        return self.spec.base_class.tiled_encode(self, *args, **kwargs)  # type: ignore[attr-defined]

    def tiled_decode(self, *args: Any, **kwargs: Any) -> Any:
        """As diffusers, on this rank alone."""
        return self.spec.base_class.tiled_decode(self, *args, **kwargs)  # type: ignore[attr-defined]

    def _call(self, operation: Operation, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base, state = self.spec.base_class, self._vae_parallel
        with self._one_call(operation, x, args, kwargs) as decision:
            if state is None or decision is None or not decision.sharded:
                return getattr(base, operation.value)(self, x, *args, **kwargs)
            call = plan(self, base, operation, tuple(x.shape), args, kwargs)
            facts = call_facts(operation.value, self.dtype, args, kwargs, x.device if call.draws else None)
            result = run_sharded(
                state.groups,
                _Planned(self.spec.facts, call, args),
                self,
                operation,
                x,
                decision,
                broadcast=operation is Operation.ENCODE or state.broadcast_decode,
                facts=facts,
                options=CallOptions(between=state.between, arguments=kwargs),
            )
            if result is None:
                result = x.new_zeros((*call.shape[:2], *[1] * (len(call.shape) - 2)))
            return call.wrap(result)

    def _choose(
        self,
        state: ParallelState,
        operation: Operation,
        shape: tuple[int, ...],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Decision:
        further = (*args, *kwargs.values())
        reason = self.spec.facts.refusal(operation)
        if not reason and any(isinstance(value, torch.Tensor) and value.dim() > 2 for value in further):
            reason = "an argument besides the input is a map"
        if not reason:
            try:
                call = plan(self, self.spec.base_class, operation, shape, args, kwargs)
            except UnsupportedError as error:
                reason = str(error)
            else:
                if call.ratio is not None:
                    small = call.shape if operation is Operation.ENCODE else shape
                    return select_untiled(operation, state.mode, state.size, (small[-2], small[-1]))
                reason = f"{shape[-2]}x{shape[-1]} is no whole number of latents"
        forced = state.mode is not VaeParallelMode.AUTO
        return Decision(operation, Strategy.DIRECT, f"{state.mode}: {reason}", fallback=forced)


def untiled_class(vae: object) -> type[UntiledVaeMixin] | None:
    """The distributed class for an instance of one of `CLASSES`, or None. Made on first use; the same every time.

    Raises:
        UnsupportedError: neither operation of ``vae`` can be a shard; says why.
    """
    facts = next((facts for facts in CLASSES if type(vae) is getattr(diffusers, facts.name, None)), None)
    if facts is None:
        return None
    if facts.encode and facts.decode:
        raise UnsupportedError(f"{facts.name} cannot be distributed: encode: {facts.encode}; decode: {facts.decode}")
    if isinstance(vae, torch.nn.Module) and facts.without in {type(part).__name__ for part in vae.modules()}:
        raise UnsupportedError(
            f"{facts.name} with {facts.without} cannot be distributed: a shard does not see its sums"
        )
    return _distributed(facts)


@cache
def _distributed(facts: UntiledClass) -> type[UntiledVaeMixin]:
    spec = UntiledSpec(facts)
    doc = f"`diffusers.{facts.name}` shared among ranks; weights and state-dict keys are the same."
    return type(f"Distributed{facts.name}", (UntiledVaeMixin, spec.base_class), {"spec": spec, "__doc__": doc})
