"""Does training survive a full disk and a cut link? python examples/benchmarks/outages.py [disks] [links] [folder]

It needs root, and Linux. The plan and the losses of a run that nothing happened to stay in the folder. A fourth
argument is the number of ranks, 2 by default.

The model of kills.py. Every case ends with a last start that finishes it, whose losses are equal to the bit to those
of a run that nothing happened to.

    disk    checkpoints are kept on a file system in memory that is full after a random number of bytes. The run ends
            with one line that names the disk, the last checkpoint is whole, and a larger disk is gone on with
    link    2 nodes, network namespaces with half of the ranks each, joined by a veth pair. At a random moment after the
            first checkpoint the link is cut. All ranks end within 3 timeouts of 5 s, each with one line that names the
            rank or the peer, and go on from the last checkpoint when the link is back
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kills import Process, ending, faults, losses, planned, started, uninterrupted, words

from autoddl.runtime.checkpoints.checkpoint_series import kept_steps

TIMEOUT = 5.0
NODES = (f"outage-{os.getpid()}-a", f"outage-{os.getpid()}-b")


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)


@contextmanager
def disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of so many bytes, in memory."""
    folder.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)), check=True)
    try:
        yield folder
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


@contextmanager
def nodes() -> Iterator[None]:
    """Two network namespaces, joined by a link."""
    try:
        for name in NODES:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", NODES[0], "type", "veth", "peer", "name", "eth0", "netns", NODES[1])
        for number, name in enumerate(NODES):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NODES:
            subprocess.run(("ip", "netns", "del", name), stderr=subprocess.DEVNULL)


def full_disk(folder: Path, size: int, draw: random.Random) -> list[str]:
    """What is wrong after a run on a disk that became full."""
    whole, _ = uninterrupted(folder, size)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        kept = Path(name, "kept")
        with disk(Path(name, "disk"), draw.randint(60_000, 250_000)) as small:
            process, began = started(words(planned(folder, size), small / "kept")), time.monotonic()
            said, _ = ending(process, began)
            wrong = faults(0.0, said, [], (), small / "kept")
            wrong += [] if process.returncode == 4 and "No space left" in said else [f"{process.returncode}: {said}"]
            left = kept_steps(small / "kept")
            print(f"disk: kept {left}, said {said.strip()[:160]}", flush=True)
            shutil.copytree(small / "kept", kept)
        same = losses(words(planned(folder, size), kept)) == whole
    return wrong + ([] if same else ["other losses"])


def ranks(folder: Path, size: int, kept: Path, port: int) -> list[Process]:
    """So many ranks, half of them in each node."""
    command = words(planned(folder, size), kept, "--timeout", str(TIMEOUT))
    each = size // len(NODES)
    return [started(("ip", "netns", "exec", NODES[rank // each], *command), RANK=str(rank), WORLD_SIZE=str(size),
                    LOCAL_RANK=str(rank % each), LOCAL_WORLD_SIZE=str(each), MASTER_ADDR="10.77.0.1",
                    MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="eth0",
                    TORCH_CPP_LOG_LEVEL="ERROR")  # torch warns of addresses without names
            for rank in range(size)]


def cut_link(folder: Path, size: int, draw: random.Random) -> list[str]:
    """What is wrong after a run whose link was cut."""
    whole, _ = uninterrupted(folder, size)
    with tempfile.TemporaryDirectory(dir=folder) as name, nodes():
        kept, wrong = Path(name, "kept"), list[str]()
        processes, until = ranks(folder, size, kept, 29600), time.monotonic() + 200
        while not kept_steps(kept) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        before, cut = kept_steps(kept), time.monotonic()
        ip("-n", NODES[1], "link", "set", "eth0", "down")
        for rank, process in enumerate(processes):
            said, ended = ending(process, cut)
            print(f"link: rank {rank} ended {ended:.1f} s after the cut, code {process.returncode}, kept "
                  f"{kept_steps(kept)}, said {said.strip()[:200]}", flush=True)
            wrong += faults(ended, said, [], before, kept, 3 * TIMEOUT)
            wrong += [] if process.returncode and said.strip() else [f"code {process.returncode}, without a word"]
        ip("-n", NODES[1], "link", "set", "eth0", "up")
        first, *others = ranks(folder, size, kept, 29601)
        out, said = first.communicate(timeout=600)
        same = first.returncode == 0 and json.loads(out.splitlines()[-1])["losses"] == whole
        wrong += [] if same else [f"the run failed ({first.returncode}): {said}"]
        for one in others:
            one.communicate()
    return wrong + ([] if same else ["other losses"])


def main() -> None:
    disks, links = [*map(int, sys.argv[1:3]), *(2, 2)[len(sys.argv[1:3]):]]
    draw, wrong = random.Random(0), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(sys.argv[3] if len(sys.argv) > 3 else name), int(sys.argv[4]) if len(sys.argv) > 4 else 2
        for case, count in ((full_disk, disks), (cut_link, links)):
            for _ in range(count):
                found = case(folder, size, draw)
                print(f"{case.__name__}: {'; '.join(found) or 'losses equal to the bit'}", flush=True)
                wrong += found
    print(f"{disks} full disks, {links} cut links, {size} ranks: {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
