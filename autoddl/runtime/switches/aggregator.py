"""A switch that reduces, as a process of one thread: takes blocks from its children and sends them the sum.

It listens on the address of its switch alone, and serves all groups that meet there. What a child sends is checked:
the token, the place, that all ask for the same, and that the blocks find room. Where a child, or the switch above, is
gone or wrong, all children of that group are told so, or cut off in the middle. No child gets a sum that is not whole.
"""

import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from autoddl.core.errors import InputError
from autoddl.runtime.switches.frames import HEAD, HOP, REPLY, REQUEST, Hello, Hop, SumRequest, error_reply
from autoddl.runtime.switches.round import Round
from autoddl.runtime.switches.sparse import SparseRound, block_bytes

__all__ = ["Address", "Aggregator"]

Address = tuple[str, int]
FINE = REPLY.pack(0, 0)


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection: `inbox` are bytes of a frame that is not whole, `outbox` those that could not leave yet."""

    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    group: "_Group | None" = None
    asked: bool = False
    answered: bool = False
    mask: int = 0

    @property
    def place(self) -> int:
        assert self.hello is not None
        return self.hello.hops[0].place


@dataclass(slots=True, eq=False)
class _Group:
    """The children of one group by place, the connection to the switch above, and the sum that is under way."""

    name: bytes
    hops: tuple[Hop, ...]
    children: dict[int, _Peer] = field(default_factory=dict)
    above: _Peer | None = None
    round: Round | SparseRound | None = None


class Aggregator:
    """A switch at `host`, with room for `memory` bytes of blocks of one group; `above` is the next switch's address.

    Raises OSError where the address is not this machine's.
    """

    def __init__(self, host: str, token: bytes, memory: float = inf, above: Address | None = None) -> None:
        self._token, self._memory, self._above = token, memory, above
        self._groups: dict[bytes, _Group] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> Address:
        """Host and port where it listens."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def serve(self, stop: int) -> None:
        """Serves until there is something to read from the file descriptor `stop`, or its other end is closed.

        Then all connections are closed."""
        self._selector.register(stop, selectors.EVENT_READ)
        with np.errstate(all="ignore"):
            while True:
                for key, mask in self._selector.select():
                    if key.fd == stop:
                        self._close()
                        return
                    key.data(mask)

    def _close(self) -> None:
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        for group in self._groups.values():
            for peer in (*group.children.values(), *((group.above,) if group.above else ())):
                peer.socket.close()
        self._selector.close()

    def _accept(self, mask: int) -> None:
        with suppress(OSError):
            made, _ = self._listener.accept()
            self._listen_to(_Peer(made))

    def _listen_to(self, peer: _Peer) -> None:
        peer.socket.setblocking(False)
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch(peer, selectors.EVENT_READ)

    def _watch(self, peer: _Peer, mask: int) -> None:
        """Waits for these events of a peer alone."""
        if mask == peer.mask:
            return
        if not mask:
            self._selector.unregister(peer.socket)
        elif peer.mask:
            self._selector.modify(peer.socket, mask, partial(self._ready, peer))
        else:
            self._selector.register(peer.socket, mask, partial(self._ready, peer))
        peer.mask = mask

    def _ready(self, peer: _Peer, mask: int) -> None:
        """Reads and writes what can be; a peer that is gone or wrong takes its group with it."""
        if not peer.mask:
            return  # its group failed meanwhile
        try:
            if mask & selectors.EVENT_READ:
                self._read(peer)
            if peer.group is not None:
                self._go_on(peer.group)
        except BlockingIOError:
            pass
        except (OSError, InputError) as error:
            self._fail(peer, str(error) or "another rank, or a switch, is gone")

    def _read(self, peer: _Peer) -> None:
        group = peer.group
        if group is None:
            self._greet(peer)
        elif peer is group.above:
            self._read_above(peer, group)
        elif not peer.asked:
            self._take_request(peer, group)
        elif group.round is not None and (room := group.round.room(peer.place)):
            group.round.arrived(peer.place, _received(peer.socket, room))
        elif group.round is not None and group.round.only_waits(peer.place):
            _received(peer.socket, memoryview(bytearray(1)))
            raise InputError("a rank sent more than it asked for")

    def _frame(self, peer: _Peer, size: int) -> bytes | None:
        """The next frame of `size` bytes; None where it is not whole yet."""
        if len(peer.inbox) < size:
            part = bytearray(size - len(peer.inbox))
            peer.inbox += part[:_received(peer.socket, memoryview(part))]
        if len(peer.inbox) < size:
            return None
        found = bytes(peer.inbox)
        return found

    def _greet(self, peer: _Peer) -> None:
        """Reads the hello, and joins the group."""
        known = len(peer.inbox) >= HEAD.size
        whole = self._frame(peer, HEAD.size + (peer.inbox[HEAD.size - 1] * HOP.size if known else 0))
        hello = Hello.parse(whole) if whole is not None else None
        if hello is None:
            return
        if hello.token != self._token:
            raise InputError("the token is not the launcher's")
        peer.inbox.clear()
        own, rest = hello.hops[0], hello.hops[1:]
        if rest and self._above is None:
            raise InputError(f"a group of {len(hello.hops)} hops ends at this switch, which is the outermost")
        group = self._groups.setdefault(hello.group, _Group(hello.group, hello.hops))
        if own.place in group.children or (own.children, own.blocks, rest) != (
                group.hops[0].children, group.hops[0].blocks, group.hops[1:]):
            raise InputError("two children of a group say different things of it")
        peer.hello, peer.group = hello, group
        group.children[own.place] = peer

    def _take_request(self, peer: _Peer, group: _Group) -> None:
        """Reads a request, which begins a sum, or joins the one that its siblings asked for."""
        whole = self._frame(peer, REQUEST.size)
        if whole is None:
            return
        peer.inbox.clear()
        request, own = SumRequest.parse(whole), group.hops[0]
        if group.round is None:
            kind, block = (SparseRound, block_bytes(request)) if request.how == "sparse sum" else (Round, request.block)
            if own.children * own.blocks * block > self._memory:
                raise InputError(f"{own.blocks} blocks of {block} bytes from {own.children} children do not fit into "
                                 f"{self._memory:.0f} bytes")
            group.round = kind(request, own.children, own.blocks, above=len(group.hops) > 1)
            self._ask_above(group, request)
        elif group.round.request != request:
            raise InputError(f"the ranks of a group ask for different sums: {group.round.request} and {request}")
        peer.asked = True

    def _ask_above(self, group: _Group, request: SumRequest) -> None:
        """Asks the switch above for the whole sum; connects to it first."""
        if len(group.hops) == 1:
            return
        if group.above is None:
            made = socket.socket()
            made.setblocking(False)
            assert self._above is not None
            made.connect_ex(self._above)
            group.above = _Peer(made, group=group)
            group.above.outbox += Hello(self._token, group.name, group.hops[1:]).to_bytes()
            self._listen_to(group.above)
        group.above.outbox += request.to_bytes()
        group.above.answered = False

    def _read_above(self, peer: _Peer, group: _Group) -> None:
        """Reads what the switch above says, then the bytes of the whole sum."""
        if not peer.answered:
            head = self._frame(peer, REPLY.size)
            if head is None:
                return
            peer.inbox.clear()
            if head != FINE:
                raise InputError("the switch above has no sum")
            peer.answered = True
        room = group.round.falling() if group.round is not None else memoryview(b"")
        if not room:
            _received(peer.socket, memoryview(bytearray(1)))
            raise InputError("the switch above sent more than the sum")
        assert group.round is not None
        group.round.fell(_received(peer.socket, room))

    def _go_on(self, group: _Group) -> None:
        """Sends what may leave, ends a sum that all have, and waits for what can happen next."""
        now = group.round
        if now is not None:
            for place, peer in group.children.items():
                self._send(peer, now, place)
            if group.above is not None:
                self._send_above(group.above, now)
            if now.is_over:
                now = group.round = None
                for peer in group.children.values():
                    peer.asked = peer.answered = False
        for place, peer in group.children.items():
            reads = now is None or not peer.asked or bool(now.room(place)) or now.only_waits(place)
            self._watch(peer, _events(reads, now is not None and bool(now.leaving(place))))
        if group.above is not None:
            rises = now is not None and bool(now.rising())
            self._watch(group.above, _events(True, rises or bool(group.above.outbox)))

    def _send(self, peer: _Peer, now: Round | SparseRound, place: int) -> None:
        """Sends a child what it may have of the sum, as far as its connection takes it."""
        with suppress(BlockingIOError):
            while part := now.leaving(place):
                if peer.answered:
                    now.left(place, peer.socket.send(part))
                    continue
                gone = peer.socket.sendmsg([FINE, part])
                if gone < len(FINE):
                    raise ConnectionError("a connection takes no bytes")
                peer.answered = True
                now.left(place, gone - len(FINE))

    def _send_above(self, peer: _Peer, now: Round | SparseRound) -> None:
        """Sends the switch above the frames first, then what may rise."""
        with suppress(BlockingIOError):
            while peer.outbox:
                del peer.outbox[:peer.socket.send(peer.outbox)]
            while part := now.rising():
                now.rose(peer.socket.send(part))

    def _fail(self, peer: _Peer, text: str) -> None:
        """Tells the children of a peer's group why there is no sum, where they have none of it, and lets them go."""
        group = peer.group
        peers = [peer] if group is None else [*group.children.values(), *((group.above,) if group.above else ())]
        if peer not in peers:
            peers.append(peer)
        if group is not None:
            self._groups.pop(group.name, None)
        for one in peers:
            self._watch(one, 0)
            with suppress(OSError):
                if not one.answered and (group is None or one is not group.above):
                    one.socket.send(error_reply(text))
            one.socket.close()


def _events(reads: bool, writes: bool) -> int:
    return selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes


def _received(connection: socket.socket, room: memoryview) -> int:
    """Bytes that were put into `room`. Raises ConnectionError where the peer closed."""
    found = connection.recv_into(room)
    if not found:
        raise ConnectionError("another rank, or a switch, is gone")
    return found
