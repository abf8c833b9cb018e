"""A cluster as a value: one device, many times, under a tree of levels.

Level i (innermost first) groups `size` children into one unit, so a unit of level i holds

    U_i = size_1 * size_2 * ... * size_i     devices, U_0 = 1

Ranks are numbered with the innermost level fastest: ranks k*U_i .. (k+1)*U_i - 1 share a unit of level i.
Each child has a port of `bandwidth` bytes per second and direction to its siblings. There is one port per device, or,
with `shared_by: L`, one port per unit of the inner level L. The trunk that joins the ports of one child to the others
carries 1/`oversubscription` of the bytes that the ports together could send. How much of its port a child can use
follows from the topology (`topologies`), and how much of a link from the protocol (`links`).

Where devices differ, `parts` lists them in the order of the ranks, and `device` has the weakest of each of their
figures. A program that splits evenly waits for the slowest device and must fit the smallest.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from math import inf, prod
from typing import Any

import yaml

from autoddl.core.errors import InputError
from autoddl.cost_models.units import format_quantity

__all__ = ["BACKEND_NAMES", "DTYPES", "FLOAT64_SHARE", "ITEMSIZE_OF_PEAK", "KERNELS", "SCALINGS", "TOPOLOGIES",
           "Cluster", "Device", "Host", "Level", "Switch"]

TOPOLOGIES = ("switch", "fat-tree", "ring", "fully-connected", "torus", "dragonfly", "hybrid-cube-mesh", "hammingmesh")
BACKEND_NAMES = ("gloo", "nccl", "hccl", "xla", "nccom")
"""Libraries of collectives: of CPUs, of GPUs (RCCL has NCCL's name in torch), of Gaudi, of TPUs, of Trainium."""

_WHOLE = dict.fromkeys(("bool", "uint8", "int8", "int16", "int32", "int64"), ("float32", "float64"))
DTYPES: dict[str, tuple[str, ...]] = {
    "float64": ("float64",),
    "float32": ("float32", "float64"),
    "tf32": ("tf32", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
    "float8_e4m3fn": ("float8_e4m3fn", "bfloat16", "float16", "float32", "float64"),
    **_WHOLE,  # whole numbers run on the float32 pipes
}
"""dtype -> the dtypes whose peak it runs at, the first that the device lists."""
FLOAT64_SHARE = 0.5
"""float64 peak over float32 peak of a device that lists none: as of A100 and H100 without tensor cores."""

ITEMSIZE_OF_PEAK = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of an element of a dtype with a peak."""
KERNELS = ("attention", "attention backward", "convolution", "batch normalise", "batch normalise bfloat16",
           "float8_e4m3fn", "float16", "float32", "float64")
"""Kinds and dtypes of kernels that may reach another fraction of the peak than `efficiency`.

Batch norms reach a fraction of the bandwidth, where PyTorch takes its own kernel (bfloat16) less than cuDNN's.
"""


SCALINGS = ("delayed", "current")
"""Scales of float8 values: that of earlier steps, or that of the values themselves, which costs a look at them all."""
_PROGRAM = ("compiled", "by_hand", "narrow", "scaling", "hides")
"""Fields of a device that say what its programs do."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds that a collective takes of a rank's CPU, on machines where the CPU sends.

        call       seconds of each collective
        message    seconds of each step with a message
        byte       seconds of each byte that the rank sends
        wait       seconds for which a step waits while nobody computes: a rank that slept is woken
        turn       seconds that a step of gloo's own rings takes at least, with its CPU seconds
        late       s^(1/2): ranks that share cores and compute for t seconds meet late * sqrt(t) after their mean,
                   because disturbances add up as a random walk does
        busy       seconds more for which a step waits for a core while the ranks compute
        drag       seconds per byte sent by which computation meanwhile slows beyond the CPU seconds above:
                   interrupts, and lines that its caches lose
        issue      seconds in which the computing thread itself hands a collective over and takes it back
    """

    call: float
    message: float
    byte: float
    wait: float = 0.0
    turn: float = 0.0
    late: float = 0.0
    busy: float = 0.0
    drag: float = 0.0
    issue: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank: its memory, its rates, and the fractions of them that kernels reach.

        name                       as in the cluster file
        kind                       "gpu" or "cpu"
        memory                     bytes
        bandwidth                  bytes/s of its memory
        peaks                      (dtype, flop/s), each
        launch                     seconds to start a kernel
        efficiency                 fraction of the peak that large kernels reach
        memory_efficiency          fraction of the bandwidth that a copy reaches
        units                      multiprocessors that share the peak, 0 where that is not known
        kernels                    (kind or dtype, efficiency) of kernels that do not reach `efficiency`
        curves                     canonical JSON of the kernels that a calibration timed (`curves`), "" without
        elementwise_efficiency     fraction of the bandwidth that kernels reach which compute on what they read: norms,
                                   softmax, products that wait for memory; None: `memory_efficiency`
        exponentials               part of the seconds of fused attention with heads of `kernel.HEAD` that go by scores,
                                   whatever the width of a head
        host                       CPU seconds of its collectives, where a calibration timed them
        compiled                   whether programs are compiled, so that elementwise ops in a row are one kernel
        by_hand                    whether such kernels are written by hand (`operators.fusion`)
        narrow                     dtype in which programs compute products with weights, whose factors they cast
                                   (`operators.narrow_products`); "" for that of the tensors
        scaling                    one of SCALINGS: whether the scale of a cast is known before its values
        hides                      roles of messages that programs send beside a product (`operators.message_roles`)
    """

    name: str
    kind: str
    memory: float
    bandwidth: float
    peaks: tuple[tuple[str, float], ...]
    launch: float
    efficiency: float = 0.8
    memory_efficiency: float = 0.85
    units: int = 0
    kernels: tuple[tuple[str, float], ...] = ()
    curves: str = ""
    elementwise_efficiency: float | None = None
    exponentials: float = 0.0
    host: Host | None = None
    compiled: bool = False
    by_hand: bool = False
    narrow: str = ""
    scaling: str = "delayed"
    hides: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Peak flop/s for `dtype`: as listed, else of the next wider dtype listed; float64 by FLOAT64_SHARE."""
        name = self.runs_as(dtype)
        return dict(self.peaks)[name] * (FLOAT64_SHARE if dtype == "float64" and name != dtype else 1.0)

    def bandwidth_of(self, kernel: str, dtype: str) -> float:
        """The bytes a second that kernels of a kind reach which compute on every byte."""
        known = dict(self.kernels)
        usual = self.elementwise_efficiency or self.memory_efficiency
        return self.bandwidth * known.get(f"{kernel} {dtype}", known.get(kernel, usual))

    def efficiency_of(self, kernel: str) -> float:
        """The fraction of the peak that the largest kernels of a kind or dtype reach."""
        return dict(self.kernels).get(kernel, self.efficiency)

    def runs_as(self, dtype: str) -> str:
        """The dtype at whose peak `dtype` runs: itself if listed, else the next wider, float32 for float64.

        Raises InputError where the device lists none of these.
        """
        if dtype not in DTYPES:
            raise InputError(f"{dtype!r} is no dtype with a price; the dtypes are {', '.join(DTYPES)}")
        peaks = dict(self.peaks)
        for name in DTYPES[dtype]:
            if name in peaks:
                return name
        if dtype == "float64" and "float32" in peaks:
            return "float32"
        raise InputError(f"device {self.name} lists no peak for {dtype} or a wider dtype, only for {', '.join(peaks)}; "
                         f"add {dtype} to its peak")


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch that reduces: its children push blocks to it, and it sends each child the sum.

        rate      bytes/s that it takes in and adds up, from all its ports together
        block     bytes that are added up and passed on at once
        memory    bytes for the blocks that are under way
    """

    rate: float = inf
    block: float = 2.0**16
    memory: float = inf


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the tree: `size` children under each parent, and the network that joins them.

        name                      as in the cluster file; mesh axes are called after it
        size                      children of a unit
        bandwidth                 bytes/s per port and direction, summed over the links of a port
        latency                   seconds per message
        topology                  one of TOPOLOGIES
        shared_by                 the inner level whose units share one port each; None: every device has its own
        oversubscription          how many times more the ports of a child can send than the trunk behind them carries
        in_network_reduction      whether its switches reduce what the devices read through them, as NVLink's do
        protocol                  one of `links.PROTOCOLS`, None if the level names none
        efficiency                fraction of the bandwidth that a large transfer reaches; None: that of the protocol,
                                  or of the backend
        in_network_efficiency     that fraction where switches reduce
        dims                      sides of a torus, or numbers of boards of a HammingMesh
        board                     a HammingMesh has boards of `board` x `board` devices
        leaf                      children of a fat tree or dragonfly behind each first switch or in each group;
                                  oversubscription begins beyond it
        group_bandwidth           (n, bytes/s) as measured in groups of n children
        reduces                   its switches, where they add up what is pushed to them (`switches`); else None
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    topology: str = "switch"
    shared_by: str | None = None
    oversubscription: float = 1.0
    in_network_reduction: bool = False
    protocol: str | None = None
    efficiency: float | None = None
    in_network_efficiency: float = 0.85
    dims: tuple[int, ...] = ()
    board: int = 1
    leaf: int | None = None
    group_bandwidth: tuple[tuple[int, float], ...] = ()
    reduces: Switch | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster: devices of one kind, or the parts where they differ, under a tree of levels.

        name        as in the cluster file
        device      the device of every rank, or the weakest of each figure where `parts` differ
        levels      innermost first
        backend     one of BACKEND_NAMES
        measured    the text of a calibration, as canonical JSON so that the value stays hashable; "" without
        parts       (device, ranks) where devices differ, else empty
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    backend: str
    measured: str = ""
    parts: tuple[tuple[Device, int], ...] = ()

    @property
    def size(self) -> int:
        """Number of devices: U_L."""
        return prod(level.size for level in self.levels)

    @property
    def is_one_unit(self) -> bool:
        """Whether all devices are in one unit of the innermost level, such as a node."""
        return self.size == self.levels[0].size

    @property
    def units(self) -> tuple[int, ...]:
        """(U_0, U_1, ... U_L)."""
        return tuple(prod(level.size for level in self.levels[:i]) for i in range(len(self.levels) + 1))

    @property
    def measurements(self) -> dict[str, Any]:
        """A fresh copy of what a calibration wrote; empty if nothing was measured."""
        return dict(json.loads(self.measured)) if self.measured else {}

    def device_of(self, rank: int) -> Device:
        """The device of one rank."""
        if not 0 <= rank < self.size:
            raise InputError(f"cluster {self.name} has no rank {rank}; its ranks are 0 to {self.size - 1}")
        for device, ranks in self.parts:
            rank -= ranks
            if rank < 0:
                return device
        return self.device

    def sharers(self, index: int) -> int:
        """Devices behind one port of level `index`: 1, or U of the level that shares it."""
        shared_by = self.levels[index].shared_by
        names = [level.name for level in self.levels]
        return 1 if shared_by is None else self.units[names.index(shared_by) + 1]

    @property
    def fingerprint(self) -> str:
        """First 12 digits of a sha256 of the content: two files that say the same have the same.

        Measurements count once, as `measured`. What the program does belongs to it, not to the machine.
        """
        tree = asdict(self)
        for level in tree["levels"]:
            if level["reduces"] is None:
                level.pop("reduces")
        for device in (tree["device"], *(part for part, _ in tree["parts"])):
            for timed in ("curves", "host", *_PROGRAM, *(("exponentials",) if not device["exponentials"] else ())):
                device.pop(timed)
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        """The text that reads back as this very value."""
        devices: dict[str, Any] = {"device": _device_tree(self.device)}
        if sum(ranks for _, ranks in self.parts) == self.size:
            devices = {"parts": [{"device": _device_tree(device), "ranks": ranks} for device, ranks in self.parts]}
        tree: dict[str, Any] = {"name": self.name, "backend": self.backend, **devices,
                                "levels": [_level_tree(level) for level in self.levels]}
        if self.measured:
            tree["measured"] = self.measurements
        return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def _device_tree(device: Device) -> dict[str, Any]:
    scores = {"exponentials": device.exponentials} if device.exponentials else {}
    return {"name": device.name, "kind": device.kind, "memory": format_quantity(device.memory, "bytes"),
            "bandwidth": format_quantity(device.bandwidth, "bytes/s"),
            "peak": {dtype: format_quantity(peak, "flop/s") for dtype, peak in device.peaks},
            "launch": format_quantity(device.launch, "seconds"), "efficiency": device.efficiency,
            "memory_efficiency": device.memory_efficiency, "elementwise_efficiency": device.elementwise_efficiency,
            "units": device.units, "kernels": dict(device.kernels)} | scores | {
                name: list(value) if isinstance(value, tuple) else value for name in _PROGRAM
                if (value := getattr(device, name)) not in (False, "", SCALINGS[0], ())}


def _level_tree(level: Level) -> dict[str, Any]:
    tree = asdict(level)
    tree |= {"bandwidth": format_quantity(level.bandwidth, "bytes/s"),
             "latency": format_quantity(level.latency, "seconds"), "dims": list(level.dims),
             "group_bandwidth": {n: format_quantity(b, "bytes/s") for n, b in level.group_bandwidth},
             "reduces": _switch_tree(level.reduces) if level.reduces else None}
    always = ("name", "size", "bandwidth", "latency", "topology")
    standard = {field.name: field.default for field in fields(Level)}
    return {key: value for key, value in tree.items()
            if key in always or getattr(level, key) != standard[key]}


def _switch_tree(switch: Switch) -> Any:
    """The keys of a switch that are not as usual; True where all are."""
    usual = Switch()
    texts = {name: format_quantity(value, dimension)
             for name, dimension in (("rate", "bytes/s"), ("block", "bytes"), ("memory", "bytes"))
             if (value := getattr(switch, name)) != getattr(usual, name)}
    return texts or True
