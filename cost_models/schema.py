"""The keys of a cluster file: which are needed, and the rule of each.

    cluster   name, device or parts, levels; backend, measured
    part      device, ranks
    device    name, memory, bandwidth, peak; kind, launch, efficiency, memory_efficiency, elementwise_efficiency,
              exponentials, units, kernels, compiled, by_hand, narrow, scaling, hides
    level     name, size, bandwidth and latency or link; topology, shared_by, oversubscription, in_network_reduction,
              protocol, efficiency, in_network_efficiency, dims, board, leaf, group_bandwidth, reduces
    reduces   true, or rate, block, memory of its switches

Keys before the semicolon are needed. Mesh axes are called after their level: `node`, `node.1`, `net-node`. The error of
a mistake names its place, the value, the rule and the way out.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, ValidationError
from pydantic import model_validator as validator

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.cost_models.links import PROTOCOLS, expand_link
from autoddl.cost_models.machine import BACKEND_NAMES, ITEMSIZE_OF_PEAK, KERNELS, TOPOLOGIES
from autoddl.cost_models.sold import how_far
from autoddl.cost_models.units import parse_quantity, with_unit

__all__ = ["WrittenCluster", "WrittenDevice", "WrittenLevel", "validate_tree"]

_Model = TypeVar("_Model", bound=BaseModel)
_AXIS = re.compile(r"[A-Za-z_][\w.-]*")
"""A name that `Mesh.parse` reads back, alone, with `.0` behind it and joined to others by `-`."""


def _quantity(dimension: str, figure: str) -> Callable[[Any], float]:
    """A reader of quantities. A number without a unit, as programs write it, is one of base units that is sold."""
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{value!r} is no quantity of {dimension}")
        try:
            found = parse_quantity(value, dimension)
            return with_unit(value, dimension) if how_far(figure, found) else found
        except InputError as error:
            raise ValueError(str(error)) from None  # pydantic adds the place
    return read


def _one_of(names: tuple[str, ...], what: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is no {what}; it is one of {', '.join(names)}")
        return str(value)
    return read


def _axis(value: Any) -> Any:
    """A level's name, checked; pydantic refuses what is no text."""
    if isinstance(value, str) and not _AXIS.fullmatch(value):
        better = re.sub(r"[^\w.-]+", "_", value)
        better = better if _AXIS.fullmatch(better) else f"level_{better}"
        raise ValueError(f"{value!r} is no name of a level: mesh axes are called after it, so it begins with a letter "
                         f"of a-z or _, and letters, digits, _, . and - follow; write {better!r}")
    return value


Bytes = Annotated[float, BeforeValidator(_quantity("bytes", "memory")), Field(gt=0)]
Rate = Annotated[float, BeforeValidator(_quantity("bytes/s", "bandwidth")), Field(gt=0)]
Flops = Annotated[float, BeforeValidator(_quantity("flop/s", "peak")), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(_quantity("seconds", "latency")), Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
PeakName = Annotated[str, BeforeValidator(_one_of(tuple(ITEMSIZE_OF_PEAK), "dtype with a peak"))]
LevelName = Annotated[str, BeforeValidator(_axis)]
Backend = Annotated[str, BeforeValidator(_one_of(BACKEND_NAMES, "backend"))]
KernelName = Annotated[str, BeforeValidator(_one_of(KERNELS, "kind or dtype of kernels with their own efficiency"))]


class Written(BaseModel):
    """A part of a file that a person writes; the error of an unknown key names the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        keys = list(cls.model_fields)
        for key in data if isinstance(data, dict) else ():
            if key not in keys:
                near = near_names(str(key), keys, f"the keys are {', '.join(keys)}", most=1)
                raise ValueError(f"unknown key {key!r}; {near}")
        return data


def _switch(value: Any) -> Any:
    """`reduces: true` is a switch as usual, `false` is none; pydantic reads its keys."""
    if isinstance(value, dict):
        return value
    if value is None or value is False:
        return None
    if value is not True:
        raise ValueError(f"{value!r} does not say how the switches reduce: write true, or {{rate: 25 GB/s, "
                         "block: 64 KiB, memory: 16 MB}, of which any may be left out")
    return {}


def _by_dtype(value: object) -> object:
    """Refuses a peak that is of no dtype, with the way to write it."""
    if isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is of no dtype: write peak: {{float32: {value}}}, and other dtypes behind it")
    return value


class WrittenDevice(Written):
    """A device, with the fields of `machine.Device`."""

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory: Bytes
    bandwidth: Rate
    peak: Annotated[dict[PeakName, Flops], BeforeValidator(_by_dtype)] = Field(min_length=1)
    launch: Seconds | None = None
    efficiency: Fraction = 0.8
    memory_efficiency: Fraction = 0.85
    elementwise_efficiency: Fraction | None = None
    exponentials: float = Field(default=0.0, ge=0, le=1)
    units: StrictInt = Field(default=0, ge=0)
    kernels: dict[KernelName, Fraction] = Field(default_factory=dict)
    compiled: StrictBool = False
    by_hand: StrictBool = False
    narrow: PeakName | None = None
    scaling: Literal["delayed", "current"] = "delayed"
    hides: list[Literal["tp", "cp", "ep"]] = Field(default_factory=list)
    backend: Backend | None = None


class WrittenSwitch(Written):
    """The switches of a level that reduce, with the fields of `machine.Switch`; those left out are as usual."""

    rate: Rate | None = None
    block: Bytes | None = None
    memory: Bytes | None = None


class WrittenLevel(Written):
    """A level, with the fields of `machine.Level`; those of a `link` may be left out."""

    name: LevelName
    size: StrictInt = Field(ge=1)
    bandwidth: Rate
    latency: Seconds
    topology: Annotated[str, BeforeValidator(_one_of(TOPOLOGIES, "topology"))] = "switch"
    shared_by: str | None = None
    oversubscription: float = Field(default=1.0, ge=1)
    in_network_reduction: StrictBool = False
    link: str | None = None
    protocol: Annotated[str, BeforeValidator(_one_of(tuple(PROTOCOLS), "protocol"))] | None = None
    efficiency: Fraction | None = None
    in_network_efficiency: Fraction = 0.85
    dims: tuple[StrictInt, ...] = ()
    board: StrictInt = Field(default=1, ge=1)
    leaf: StrictInt | None = Field(default=None, ge=1)
    group_bandwidth: dict[int, Rate] = Field(default_factory=dict)
    reduces: Annotated[WrittenSwitch | None, BeforeValidator(_switch)] = None

    @validator(mode="before")
    @classmethod
    def _of_link(cls, data: Any) -> Any:
        try:
            return expand_link(data) if isinstance(data, dict) and data.get("link") is not None else data
        except InputError as error:
            raise ValueError(str(error)) from None


class WrittenPart(Written):
    """Ranks of one device, by name or as written here."""

    device: str | dict[str, Any]
    ranks: StrictInt = Field(ge=1)


class WrittenCluster(Written):
    """A cluster file: `device`, or `parts` where devices differ."""

    name: str
    device: str | dict[str, Any] | None = None
    levels: tuple[WrittenLevel, ...]
    parts: tuple[WrittenPart, ...] = ()
    measured: dict[str, Any] | None = None
    backend: Backend | None = None

    @validator(mode="after")
    def _one_of_both(self) -> "WrittenCluster":
        if (self.device is None) == (not self.parts):
            raise ValueError("write device, or where devices differ parts: [{device, ranks}, ...], and not both")
        return self


_LIKE = {"latency": ", like latency: 5 us", "bandwidth": ", like bandwidth: 25 GB/s", "memory": ", like memory: 80 GB",
         "size": ", like size: 8, the children of the level", "name": ", like name: node",
         "peak": ", like peak: {bfloat16: 312 TFLOP/s}"}
"""Ends of the rule for a missing key, with an example."""


def validate_tree(model: type[_Model], tree: Any, source: str) -> _Model:
    """`tree` as a model. Raises InputError for the first mistake, with its place, like `levels.1.bandwidth`."""
    if not isinstance(tree, dict):
        raise InputError(f"{source}: expected keys with values, found {tree!r}; "
                         f"the keys are {', '.join(model.model_fields)}")
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        rule = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            rule = f"this key is missing; write it{_LIKE.get(str(first['loc'][-1]), '')}"
        found = "" if first["type"] in ("missing", "value_error") else f", not {first['input']!r}"
        raise InputError(f"{source}: {place}{': ' if place else ''}{rule}{found}") from None
