"""Streams: a stream of its own for each logical part of a GPU, so that parts run beside each other.

    caller's stream  ──●                                   ●──►  all parts begin after it, and it goes on
    part #0            └──op──op──●            ┌──op───────┤     after all of them
    part #1            └──────────└──copy──op──┘──op───────┘     a copy waits for the part it reads from

The backward pass needs nothing: autograd runs a node on the stream of its forward op, and waits where a
gradient comes from another. Memory belongs to the stream that took it; whoever reads it from another stream
says so (`record_stream`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from loadmaster.runtime.transport.devices import RunDevice


class PartStreams:
    """Streams of parts that share a GPU; a device without one runs on the caller's."""

    def __init__(self, devices: Sequence[RunDevice]) -> None:
        num = Counter(device.where for device in devices if device.logical and device.where.type == "cuda")
        self._of: dict[int, Any] = {
            at: torch.cuda.Stream(device.where)
            for at, device in enumerate(devices)
            if device.logical and num[device.where] > 1
        }

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._of)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Parts begin after what the caller has issued; the caller goes on after all of them."""
        for stream in self._of.values():
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        try:
            yield
        finally:
            for stream in self._of.values():
                torch.cuda.current_stream(stream.device).wait_stream(stream)

    def on(self, at: int, sources: Iterable[int]) -> Any:
        """A context for one op on a device that reads from others: its stream, after theirs.

        What runs on the host or a whole GPU is a copy, if it reads from a part: it belongs to that part's
        stream, whose copies to elsewhere wait for what stands there.
        """
        others = [self._of[one] for one in sources if one in self._of and one != at]
        own = self._of.get(at, others[0] if others else None)
        if own is None:
            return nullcontext()
        for other in others:
            if other is not own:
                own.wait_stream(other)
        return torch.cuda.stream(own)

    def read(self, given: Any, at: int) -> None:
        """What an op read may be freed by its owner now: not before this stream is done with it."""
        stream = self._of.get(at)
        for tensor in tree_leaves(given) if stream is not None else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)

    def hand_out(self, out: Any) -> None:
        """What the caller gets is read on its own stream."""
        for tensor in tree_leaves(out) if self._of else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
