"""A rank's connection to its switch: sends a buffer, and receives the sum into the same buffer meanwhile.

A byte of a sum arrives when all ranks have sent its block. So what arrives never overtakes what this rank still has to
send.
"""

import select
import socket
from dataclasses import dataclass

import numpy as np

from autoddl.runtime.switches.aggregator import Address
from autoddl.runtime.switches.frames import REPLY, Hello, SumRequest
from autoddl.runtime.switches.sparse import FrameReader, Indices, Numbers, to_frames
from autoddl.runtime.switches.sums import Bytes, adder_of

__all__ = ["SwitchLink", "connect"]

CHUNK = 2**18
"""Bytes that are handed to the connection at once."""


def connect(address: Address, hello: Hello, seconds: float, name: str = "") -> "SwitchLink":
    """Connects to a switch and says who this is. Raises RuntimeError where it cannot be reached in that time."""
    what = f"the switch{' of ' * bool(name)}{name} at {address[0]}:{address[1]}"
    try:
        made = socket.create_connection(address, timeout=seconds)
        made.sendall(hello.to_bytes())
    except OSError as error:
        raise RuntimeError(f"{what} cannot be reached: {error}") from None
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setblocking(False)
    return SwitchLink(made, what)


@dataclass(frozen=True, slots=True)
class SwitchLink:
    """A connection to a switch, which is `what` in errors. It serves one all-reduce after the other."""

    socket: socket.socket
    what: str

    def reduce(self, buffer: memoryview, request: SumRequest, seconds: float) -> None:
        """Replaces the bytes of `buffer` by the reduction of those of all children.

        Raises RuntimeError where the switch, or another rank, is gone, or nothing moves for so many seconds. The buffer
        is then worth nothing.
        """
        self._ask(buffer, _Dense(buffer), request, seconds)

    def reduce_sparse(self, indices: Indices, values: Numbers, request: SumRequest, seconds: float
                      ) -> tuple[Indices, Bytes]:
        """The union of the children's rising `indices`, and the bytes of the sums of their `values` there.

        Raises RuntimeError as `reduce` does.
        """
        found = _Sparse(FrameReader(request, adder_of(request.dtype, "sum").itemsize))
        self._ask(memoryview(to_frames(indices, values, request)), found, request, seconds)
        return np.concatenate(found.indices), np.concatenate(found.values)

    def _ask(self, data: memoryview, into: "_Dense | _Sparse", request: SumRequest, seconds: float) -> None:
        """Sends a request with its data, and receives the answer meanwhile."""
        try:
            self._exchange(data, into, request, seconds)
        except OSError as error:
            self.close()
            raise RuntimeError(f"{self.what} gave no sum: {error}") from None
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection, which tells the switch that this rank is gone."""
        self.socket.close()

    def _exchange(self, data: memoryview, into: "_Dense | _Sparse", request: SumRequest, seconds: float) -> None:
        poll, both = select.poll(), select.POLLIN | select.POLLOUT
        poll.register(self.socket, both)
        ahead, head, sent = request.to_bytes(), bytearray(), 0
        while not into.is_over:
            ready = poll.poll(1000 * seconds)
            if not ready:
                raise RuntimeError(f"timed out: {self.what} neither took nor sent a byte for {seconds:g} s")
            if ready[0][1] & select.POLLOUT and sent < len(data):
                gone = self.socket.sendmsg([ahead, data[sent:sent + CHUNK]])
                sent += max(0, gone - len(ahead))
                ahead = ahead[gone:]
                if sent == len(data):
                    poll.modify(self.socket, select.POLLIN)
            if ready[0][1] & ~select.POLLOUT:
                if len(head) < REPLY.size:
                    head += self._received(REPLY.size - len(head))
                    self._check(head)
                elif room := into.room(sent):
                    into.arrived(self._into(room))

    def _check(self, head: bytearray) -> None:
        """Raises RuntimeError where the reply says that there is no sum."""
        if len(head) == REPLY.size and head[0]:
            size = REPLY.unpack(head)[1]
            self.socket.setblocking(True)
            self.socket.settimeout(1.0)
            said = self._received(size).decode(errors="replace")
            raise RuntimeError(f"{self.what} gave no sum: {said}")

    def _received(self, size: int) -> bytes:
        found = self.socket.recv(size)
        if not found:
            raise RuntimeError(f"{self.what} closed the connection: it, or another rank, is gone")
        return found

    def _into(self, room: memoryview) -> int:
        found = self.socket.recv_into(room)
        if not found:
            raise RuntimeError(f"{self.what} closed the connection: it, or another rank, is gone")
        return found


class _Dense:
    """Receives a sum into the buffer that is sent: no further than it was."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer, self._got = buffer, 0

    @property
    def is_over(self) -> bool:
        return self._got == len(self._buffer)

    def room(self, sent: int) -> memoryview:
        return self._buffer[self._got:sent]

    def arrived(self, nbytes: int) -> None:
        self._got += nbytes


class _Sparse:
    """Receives the frames of a sparse sum."""

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader
        self.indices, self.values = list[Indices](), list[Bytes]()

    @property
    def is_over(self) -> bool:
        return self._reader.is_over

    def room(self, sent: int) -> memoryview:
        return self._reader.room()

    def arrived(self, nbytes: int) -> None:
        frame = self._reader.arrived(nbytes)
        if frame is not None:
            self.indices.append(frame[0])
            self.values.append(np.frombuffer(frame[1], np.uint8))
