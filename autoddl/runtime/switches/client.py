"""A rank's connection to its switch: sends a buffer, and receives the sum into the same buffer meanwhile.

A byte of a sum arrives when all ranks have sent its block. So what arrives never overtakes what this rank still has to
send.
"""

import select
import socket
from dataclasses import dataclass

from autoddl.runtime.switches.aggregator import Address
from autoddl.runtime.switches.frames import REPLY, Hello, Request

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

    def reduce(self, buffer: memoryview, request: Request, seconds: float) -> None:
        """Replaces the bytes of `buffer` by the sum of those of all children.

        Raises RuntimeError where the switch, or another rank, is gone, or nothing moves for so many seconds. The buffer
        is then worth nothing.
        """
        try:
            self._exchange(buffer, request, seconds)
        except OSError as error:
            self.close()
            raise RuntimeError(f"{self.what} gave no sum: {error}") from None
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection, which tells the switch that this rank is gone."""
        self.socket.close()

    def _exchange(self, buffer: memoryview, request: Request, seconds: float) -> None:
        poll, both = select.poll(), select.POLLIN | select.POLLOUT
        poll.register(self.socket, both)
        ahead, head, sent, got = request.to_bytes(), bytearray(), 0, 0
        while got < len(buffer):
            ready = poll.poll(1000 * seconds)
            if not ready:
                raise RuntimeError(f"timed out: {self.what} neither took nor sent a byte for {seconds:g} s")
            if ready[0][1] & select.POLLOUT and sent < len(buffer):
                gone = self.socket.sendmsg([ahead, buffer[sent:sent + CHUNK]])
                sent += max(0, gone - len(ahead))
                ahead = ahead[gone:]
                if sent == len(buffer):
                    poll.modify(self.socket, select.POLLIN)
            if ready[0][1] & ~select.POLLOUT:
                if len(head) < REPLY.size:
                    head += self._received(REPLY.size - len(head))
                    self._check(head)
                elif sent > got:
                    got += self._into(buffer[got:sent])

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
