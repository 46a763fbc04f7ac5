# SPDX-License-Identifier: Apache-2.0
"""What every model refuses in a request: values of the wrong kind, out of range, or that it cannot make exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import RequestError
from .request import OPTIONAL, RANGES, GenerationRequest, Medium, ModelCard, Range

_ROUTES = {Medium.VIDEO: "/v1/videos", Medium.IMAGE: "/v1/images/generations or /v1/images/edits"}
_REFERENCE = {Medium.VIDEO: "input_reference", Medium.IMAGE: "image"}
_OF_THE_OTHER = {Medium.VIDEO: ("num_images",), Medium.IMAGE: ("num_frames", "fps")}


def check_task(request: GenerationRequest, card: ModelCard) -> None:
    """Refuse what the model does not do, and more reference images than it looks at.

    Raises:
        RequestError: 400 for another medium or task; 422 for too many images.
    """
    if request.medium is not card.medium:
        raise RequestError(
            f"{card.pipeline_class} makes {card.medium}s, no {request.medium}s; ask for one at {_ROUTES[card.medium]}",
            code="unsupported_task",
            status=400,
        )
    param = _REFERENCE[card.medium]
    if request.task not in card.tasks:
        wanted = "takes no reference image" if request.images else "needs a reference image"
        raise RequestError(
            f"{card.pipeline_class} does {', '.join(sorted(card.tasks))}; it {wanted}",
            param=param,
            code="unsupported_task",
            status=400,
        )
    if len(request.images) > card.max_references:
        most = "one" if card.max_references == 1 else f"{card.max_references} at most"
        raise RequestError(
            f"{len(request.images)} reference images were given; this model looks at {most}",
            param=param,
            code="too_many_images",
        )


def check_taken(request: GenerationRequest, card: ModelCard) -> None:
    """Refuse a field that this model has no use for.

    Raises:
        RequestError: 400, with the models that the field belongs to.
    """
    for name, whose in OPTIONAL.items():
        if name not in card.takes and getattr(request, name) is not None:
            raise _foreign(name, whose)
    for name in _OF_THE_OTHER[card.medium]:
        if getattr(request, name) is not None:
            raise _foreign(name, f"models that do not make {card.medium}s")


def _foreign(name: str, whose: str) -> RequestError:
    return RequestError(
        f"{name} means nothing to this model, it belongs to {whose}; leave it out",
        param=name,
        code="unsupported_parameter",
        status=400,
    )


def check_numbers(request: GenerationRequest, card: ModelCard) -> None:
    """Refuse numbers of the wrong kind, out of range, or that the model cannot make exactly.

    Raises:
        RequestError: 422, with the nearest that it can make.
    """
    for name in RANGES:
        _check_kind(name, getattr(request, name))
    for name in ("width", "height"):
        _check_multiple(name, getattr(request, name), card.spatial_multiple, card.spatial_minimum)
    if card.medium is Medium.VIDEO:
        _check_frames(request.num_frames, card.temporal_ratio)
    for name in RANGES:
        _check_range(name, getattr(request, name))


def check_steps(request: GenerationRequest, card: ModelCard, least: int) -> None:
    """Refuse steps that the model's schedule does not have: others than its own, or fewer than ``least``.

    Raises:
        RequestError: 422.
    """
    steps = request.num_inference_steps
    if card.fixed_steps and steps != card.fixed_steps:
        why = f"this model is distilled to a schedule of {card.fixed_steps} steps; leave it out"
    elif steps is not None and steps < least:
        why = f"this model's schedule runs from the first step to the last and needs {least}"
    else:
        return
    raise RequestError(f"num_inference_steps is {steps}; {why}", param="num_inference_steps")


def check_extra(extra: Mapping[str, Any], numbers: Mapping[str, Range], switches: Collection[str]) -> None:
    """Refuse further parameters that are not the numbers, or the true or false, that they should be.

    Raises:
        RequestError: 422, with what to give.
    """
    for name, allowed in numbers.items():
        if name in extra and not (_is_number(extra[name], allowed) and allowed.low <= extra[name] <= allowed.high):
            raise refused(name, extra[name], _wanted(allowed))
    for name in switches:
        if not isinstance(extra.get(name, False), bool):
            raise refused(name, extra[name], "true or false")


def refused(name: str, value: Any, wanted: str) -> RequestError:
    """Say that a further parameter has a wrong value."""
    return RequestError(f"extra_params {name} is {value!r}; give {wanted}", param="extra_params")


def _is_number(value: Any, allowed: Range) -> bool:
    return isinstance(value, int if allowed.whole else (int, float)) and not isinstance(value, bool)


def _wanted(allowed: Range) -> str:
    kind = "a whole number" if allowed.whole else "a number"
    return f"{kind} from {allowed.low:g} to {allowed.high:g}"


def _check_kind(name: str, value: Any) -> None:
    if value is not None and not _is_number(value, RANGES[name]):
        raise _out_of_range(name, value)


def _check_range(name: str, value: Any) -> None:
    if value is not None and not RANGES[name].low <= value <= RANGES[name].high:
        raise _out_of_range(name, value)


def _out_of_range(name: str, value: Any) -> RequestError:
    return RequestError(f"{name} is {value!r}; give {_wanted(RANGES[name])}", param=name)


def _check_multiple(name: str, value: int | None, multiple: int, minimum: int) -> None:
    assert value is not None
    least = max(multiple, -(-minimum // multiple) * multiple)
    if value < least or value % multiple:
        near = sorted({max(least, value // multiple * multiple), max(least, -(-value // multiple) * multiple)})
        from_on = f" from {least} on" if least > multiple else ""
        raise RequestError(
            f"{name} {value} cannot be made exactly: this model makes multiples of {multiple} pixels{from_on}; "
            f"nearest: {' or '.join(map(str, near))}",
            param=name,
            code="unsupported_size",
        )


def _check_frames(frames: int | None, ratio: int) -> None:
    assert frames is not None
    if frames < 1 or (frames - 1) % ratio:
        below = max(0, frames - 1) // ratio * ratio + 1
        near = sorted({below, below + ratio})
        raise RequestError(
            f"num_frames {frames} cannot be made exactly: this model makes 1 + {ratio}k frames; "
            f"nearest: {' or '.join(map(str, near))}",
            param="num_frames",
            code="unsupported_frames",
        )
