# SPDX-License-Identifier: Apache-2.0
"""Watch a pipeline's autoencoders, and what makes its sound, during one job: stages, seconds, progress, decisions, and
chances to stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from ..autoencoders import Decision, Operation, distributed_class, select_strategy
from ..autoencoders.dry_run import NETWORKS
from ..autoencoders.twin import tensor_in
from ..config import VaeParallelMode
from ..distributed import Communicator, agree_on, fingerprint, span
from ..pipelines.request import Stage
from .unshared import run_unshared
from .use import UseMeter

_STAGES = {Operation.ENCODE: Stage.ENCODE, Operation.DECODE: Stage.DECODE}

Report = Callable[[Stage, int, int], None]


class StageClock:
    """Seconds per stage; a moment belongs to the stage entered last."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage: Stage | None = None
        self._since = time.perf_counter()

    def enter(self, stage: Stage | None) -> Stage | None:
        """Begin ``stage`` (None: no stage) and return the one before."""
        now = time.perf_counter()
        if self._stage is not None:
            self.seconds[self._stage.value] = self.seconds.get(self._stage.value, 0.0) + now - self._since
        before, self._stage, self._since = self._stage, stage, now
        return before


class VaeWatch:
    """Hooks for one job. They come off again when `watching` is left.

    Args:
        vaes: The pipeline's autoencoders.
        sound: Components that make its sound; they count as decoding.
        clock: Told when an encode or decode begins and ends.
        report: Told of progress: tiles of this rank where the work is shared, else calls of the network.
        check: Called between tiles of a shared call, where all ranks stop together; it may raise `Cancelled`.
        check_alone: The same between calls of the network that no other rank waits for.
        meter: Measures what each call costs this rank.
        callers: The ranks that run the pipeline, or None for one.
        check_latents: Whether they compare what an encode gave each of them.
    """

    def __init__(
        self,
        vaes: list[Any],
        sound: list[Any],
        clock: StageClock,
        report: Report,
        check: Callable[[], None],
        check_alone: Callable[[], None],
        meter: UseMeter,
        callers: Communicator | None = None,
        check_latents: bool = False,
    ):
        self._alike = callers if check_latents else None
        self._calls = self._total = 0
        self._callers = callers
        self._vaes = vaes
        self._sound = sound
        self._clock = clock
        self._report = report
        self._check = check
        self._check_alone = check_alone
        self._meter = meter
        self.decisions: list[Decision] = []
        self._finite: Any = None

    @property
    def finite(self) -> bool:
        """Whether every decoder output of this rank was finite; a clamp hides infinity afterwards."""
        return self._finite is None or bool(self._finite)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hold the hooks on every autoencoder."""
        with contextlib.ExitStack() as stack:
            for vae in self._vaes:
                family = distributed_class(vae)
                for operation in family.spec.operations if family else Operation:
                    stack.enter_context(self._timed(vae, operation))
                if family:
                    stack.enter_context(self._counted(vae))
            for part in self._sound:
                stack.enter_context(self._heard(part))
            yield

    def _note(self, decision: Decision) -> None:
        self._meter.decided(decision)
        if decision not in self.decisions:
            self.decisions.append(decision)

    @contextlib.contextmanager
    def _timed(self, vae: Any, operation: Operation) -> Iterator[None]:
        """Shadow the method on the instance, so that the time of the call counts as its stage."""
        method = getattr(vae, operation.value)

        def timed(x: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._clock.enter(_STAGES[operation])
            try:
                with span(f"vae {operation}"), self._meter.call(vae, operation, x.device):
                    self._begin(vae, operation, tuple(x.shape))
                    result = self._call(vae, operation, method, x, args, kwargs)
                self._compare(operation, result)
                return result
            finally:
                self._clock.enter(before)

        setattr(vae, operation.value, timed)
        try:
            yield
        finally:
            delattr(vae, operation.value)

    def _call(self, vae: Any, operation: Operation, method: Callable[..., Any], x: Any, args: Any, kwargs: Any) -> Any:
        if getattr(vae, "parallel_state", None) is not None:
            return method(x, *args, **kwargs)

        def call(vae: Any) -> Any:
            return getattr(type(vae), operation.value)(vae, x, *args, **kwargs)

        def again(decision: Decision) -> None:
            self._note(decision)
            tiles = prod(decision.grid)
            self._meter.add_tiles(tiles * _slices(vae, tuple(x.shape)))
            self._calls, self._total = 0, self._total * tiles

        return run_unshared(vae, operation, x, call, self._callers, again)

    def _compare(self, operation: Operation, result: Any) -> None:
        """Collective over the callers, if they compare.

        What ranks share they are given by one of them; what each encodes by itself nobody else has looked at.
        """
        if self._alike is not None and operation is Operation.ENCODE:
            agree_on(self._alike, {"checksum of an encode's result": fingerprint(tensor_in(result))})

    def _begin(self, vae: Any, operation: Operation, shape: tuple[int, ...]) -> None:
        self._stage, self._calls, self._shared = _STAGES[operation], 0, False
        family = distributed_class(vae)
        if family is None:
            self._total = 1
            return
        spec = family.spec
        spec.check(vae, operation, shape)
        seen = spec.seen_extents(vae, operation, shape)
        grid = spec.grid(vae, operation, seen) if spec.is_tiled(vae, operation, shape) else None
        state = getattr(vae, "parallel_state", None)
        self._shared = state is not None and grid is not None
        self._total = spec.network_calls(vae, operation, seen) * (len(grid) if grid else 1)
        if state is None:
            self._note(select_strategy(operation, VaeParallelMode.TILE, grid, 1))
            self._meter.add_tiles(len(grid) * _slices(vae, shape) if grid else 0)
        self._report(self._stage, 0, self._total)

    @contextlib.contextmanager
    def _counted(self, vae: Any) -> Iterator[None]:
        state = getattr(vae, "parallel_state", None)
        networks = [network for name, network in vae.named_children() if name in NETWORKS]
        handles = [network.register_forward_pre_hook(lambda *_: self._before_call()) for network in networks]
        handles.append(vae.decoder.register_forward_hook(lambda _, __, output: self._after_decoder(output)))
        if state is not None:
            state.on_decision = self._note
            state.executor.observer = self._on_tile
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if state is not None:
                state.on_decision = state.executor.observer = None

    @contextlib.contextmanager
    def _heard(self, part: Any) -> Iterator[None]:
        network = part.decoder if hasattr(part, "decoder") else part
        before: list[Stage | None] = []

        def begin(*_: Any) -> None:
            self._check_alone()
            before.append(self._clock.enter(Stage.DECODE))

        def end(_: Any, __: Any, output: Any) -> None:
            self._clock.enter(before.pop())
            self._after_decoder(output)

        handles = [network.register_forward_pre_hook(begin), network.register_forward_hook(end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_call(self) -> None:
        if self._shared:
            return
        self._check_alone()
        self._report(self._stage, self._calls, self._total)
        self._calls += 1

    def _after_decoder(self, output: Any) -> None:
        finite = output.isfinite().flatten().all()  # flat: within a shard, a map has no sums of its own
        self._finite = finite if self._finite is None else self._finite & finite

    def _on_tile(self, done: int, total: int) -> None:
        self._check()
        self._meter.on_progress(done)
        self._report(self._stage, done, max(1, total))


def _slices(vae: Any, shape: tuple[int, ...]) -> int:
    return shape[0] if getattr(vae, "use_slicing", False) else 1
