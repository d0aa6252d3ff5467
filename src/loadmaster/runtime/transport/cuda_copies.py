"""Cuda: copies from and to GPUs on streams of their own, so that they run beside the ops.

    source's stream  ──op──●                       ● event: the lane waits until the value is there
    lane (src, dst)        └──copy──●              ● event: the reader's stream waits until the copy is
    reader's stream                 └──op──

Nothing waits for a whole device. The host waits only for a copy whose reader runs on the host. A copy that
comes to a GPU is made in the memory pool of its lane, so that the lane need not wait for what the reader's
stream still has to do; `record_stream` keeps that memory until the reader is done, and a source until its
copy is. Host memory goes through pinned memory of the copy's own: the host may write its tensor at once.
"""

from collections.abc import Callable

import torch

Room = Callable[[torch.Tensor, torch.device, bool], torch.Tensor]  # empty memory, pinned or not


class CopyStreams:
    """One stream for each pair of devices, made when it is first used."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device], torch.cuda.Stream] = {}

    def make_copy(self, tensor: torch.Tensor, where: torch.device, room: Room) -> torch.Tensor:
        """The tensor's values in new memory; at least one side is a GPU."""
        if tensor.device == where:
            made = room(tensor, where, False)
            made.copy_(tensor)
            return made
        if tensor.is_cuda and where.type == "cuda":
            return self._between(tensor, where, room)
        return (
            self._copy_to_host(tensor, room) if tensor.is_cuda else self._copy_to_device(tensor, where, room)
        )

    def _stream_between(self, source: torch.device, target: torch.device) -> torch.cuda.Stream:
        key = (source, target)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(source if source.type == "cuda" else target)
        return self._streams[key]

    def _between(self, tensor: torch.Tensor, where: torch.device, room: Room) -> torch.Tensor:
        lane, reader = self._stream_between(tensor.device, where), torch.cuda.current_stream(where)
        made = room(tensor, where, False)
        lane.wait_stream(torch.cuda.current_stream(tensor.device))
        lane.wait_stream(reader)  # whoever had this memory before is done with it
        with torch.cuda.stream(lane):
            made.copy_(tensor, non_blocking=True)
        tensor.record_stream(lane)
        made.record_stream(lane)
        reader.wait_stream(lane)
        return made

    def _copy_to_device(self, tensor: torch.Tensor, where: torch.device, room: Room) -> torch.Tensor:
        lane, reader = self._stream_between(tensor.device, where), torch.cuda.current_stream(where)
        staged = room(tensor, tensor.device, True)  # torch keeps pinned memory until its copy is done
        staged.copy_(tensor)
        with torch.cuda.stream(lane):
            made = room(tensor, where, False)
            made.copy_(staged, non_blocking=True)
        made.record_stream(reader)
        reader.wait_stream(lane)
        return made

    def _copy_to_host(self, tensor: torch.Tensor, room: Room) -> torch.Tensor:
        """The reader runs on the host: it waits for this copy, and for nothing else."""
        host = torch.device("cpu")
        lane = self._stream_between(tensor.device, host)
        made = room(tensor, host, True)
        lane.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(lane):
            made.copy_(_match_strides(tensor, made), non_blocking=True)
            done = torch.cuda.Event()
            done.record(lane)
        tensor.record_stream(lane)
        done.synchronize()
        return made


def _match_strides(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """With the strides of another, so that a copy into that one is a single piece."""
    if tensor.stride() == other.stride():
        return tensor
    made = torch.empty_strided(tuple(tensor.shape), other.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
