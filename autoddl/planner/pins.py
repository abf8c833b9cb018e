"""Parses pins, and makes of them the region of the space of plans that they leave.

A pin says `PATTERN: AXIS=STATE`. The pattern, as in a shell, matches parameters by name, or ops by module path or name.
They have that state on that axis: a parameter where it is stored, an op where it writes. Instead of a
state, O, OG or OGW asks for a parameter that is split there, with its gradients or its weight (`core.state_layouts`).
A pin `AXIS=SIZE` alone asks for meshes that have such an axis. `AXIS=ROLE` asks that the ranks of the axis do what a
role says: data, zero-1, tensor and the like (`planner.strategies`).

    h.*.attn.*: node=S(0)          wte.weight: net=B          h.*.weight: net=OGW          node=8          net=zero-3
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from autoddl.core.degrees import Degrees
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout import B, Mesh, Split, State, parse_state
from autoddl.core.names import near_names
from autoddl.core.plan import Plan
from autoddl.core.state_layouts import DEPTHS
from autoddl.cost_models import Cluster
from autoddl.planner.degree_meshes import DegreesRegion, degree_mesh
from autoddl.planner.meshes import check_mesh, meshes
from autoddl.planner.options import PlanOptions
from autoddl.planner.strategies import ROLES, check_experts, strategy
from autoddl.pricing.space import Choice, Region, decided, everything

__all__ = ["Pin", "allowed_meshes", "also_pinned", "check_pins", "mesh_allows", "parse_pin", "pin_meaning", "pinned",
           "pins_of_layouts", "pins_of_part", "region_of"]


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin: a state on an axis, or text of `DEPTHS`.

    Without a pattern, `value` is the size of a mesh axis, or the role of its ranks.
    """

    pattern: str
    axis: str
    value: State | int | str

    def __str__(self) -> str:
        return f"{self.pattern}: {self.axis}={self.value}" if self.pattern else f"{self.axis}={self.value}"


def parse_pin(text: str) -> Pin:
    """Parses one pin. Raises InputError for text that is none."""
    pattern, colon, rest = text.rpartition(":")
    axis, equals, value = (part.strip() for part in rest.partition("="))
    if "=" in value:
        each = f"{pattern.strip()}: " if colon else ""
        many = " ".join(f"--pin '{each}{part.strip()}'" for part in re.split("[,;]", rest) if part.strip())
        raise InputError(f"{text!r} says several pins: one says one axis; give each its own, like {many}")
    if not equals or not axis or not value or (colon and not pattern.strip()):
        raise InputError(f"{text!r} is no pin: a pin looks like 'h.*.attn.*: node=S(0)' or 'node=8'")
    if colon and value not in DEPTHS and set(value) <= set("OGW"):
        raise InputError(f"{text!r}: weights are split only where gradients are, and these only where the optimizer's "
                         f"state is; write {', '.join(DEPTHS[:-1])} or {DEPTHS[-1]}")
    if colon:
        return Pin(pattern.strip(), axis, value if value in DEPTHS else parse_state(value))
    if value in ROLES:
        return Pin("", axis, value)
    if not value.isdigit():
        raise InputError(_no_role(text, axis, value))
    return Pin("", axis, int(value))


def _no_role(text: str, axis: str, value: str) -> str:
    """Says why `AXIS=VALUE` is no pin of the mesh: the split of a role without its states, or no role at all."""
    states = [role for role in ROLES if role.startswith(f"{value} ")]
    if states:
        return (f"{text!r}: {value} says what is split, and which states are goes behind it: {' or '.join(states)}, "
                f"as in '{axis}={states[-1]}'")
    plain = [role for role in ROLES if " " not in role]
    splits = dict.fromkeys(role.partition(" ")[0] for role in ROLES if role.partition(" ")[2] == "data")
    near = near_names(value, ROLES, f"roles are {', '.join(plain)}, split tensor and whole tensor, and "
                      f"{', '.join(splits)} before data or a zero, like 'ring zero-3'")
    return (f"{text!r}: a pin of the mesh has a size, like 'node=8', or a role; {near}; a layout needs a pattern "
            "before ':'")


def pin_meaning(pin: Pin, graph: Graph) -> str:
    """Says what a pin fixes of a graph, and what it leaves open."""
    if not pin.pattern and isinstance(pin.value, str):
        return f"fixes what the ranks of axis {pin.axis} split; what the role {pin.value} leaves open is searched"
    if not pin.pattern:
        return f"leaves meshes with an axis {pin.axis} of {pin.value} ranks"
    weights = sum(t.kind is Kind.PARAMETER and _matches(pin, t) for t in graph.tensors)
    if not weights:
        ops = sum(_matches(pin, op) for op in graph.ops)
        return (f"fixes what {ops} operator{'s' * (ops > 1)} write{'s' * (ops == 1)}; what reads it may have it in "
                "another layout")
    many = f"{weights} parameter{'s' * (weights > 1)} {'are' if weights > 1 else 'is'}"
    if isinstance(pin.value, str):
        return f"fixes that {many} stored split, with what of it; along which dim, and how it is used, is free"
    return f"fixes how {many} stored; operators may read another layout, gathered or sliced from it"


def allowed_meshes(cluster: Cluster, options: PlanOptions) -> tuple[Mesh, ...]:
    """The meshes to search: the one that the options name, those of degrees that they give, or all that pins allow.

    Raises InputError for a mesh that does not fit the cluster or the pins, and for pins that no mesh fits.
    """
    pins = tuple(map(parse_pin, options.pins))
    if options.mine is not None:
        mine = degree_mesh(cluster, Degrees.parse(options.mine))
        if not mesh_allows(pins, mine):
            raise InputError(f"the pins {', '.join(options.pins)} name axes or sizes that '{options.mine}' does not "
                             "have; its axes are copies, dp, ep, cp and tp")
        return (mine,)
    if options.mesh is not None:
        mesh = check_mesh(Mesh.parse(options.mesh), cluster)
        if not mesh_allows(pins, mesh):
            raise InputError(f"the pins {', '.join(options.pins)} name axes or sizes that mesh '{mesh}' does not have")
        return (mesh,)
    every = meshes(cluster, options.max_axes)
    allowed = tuple(mesh for mesh in every if mesh_allows(pins, mesh))
    if not allowed:
        raise InputError(f"no mesh of cluster {cluster.name} fits the pins {', '.join(options.pins)}; "
                         f"{_axes_meant(pins, every)}")
    return allowed


def _axes_meant(pins: Sequence[Pin], every: Sequence[Mesh]) -> str:
    """Says which axes may have been meant by pins that no mesh fits, and what meshes there are."""
    there = f"it has {'; '.join(map(str, every[:6]))}"
    names = dict.fromkeys(name for mesh in every for name in mesh.names)
    unknown = next((pin.axis for pin in pins if pin.axis not in names), None)
    return there if unknown is None else f"no mesh has an axis {unknown!r}: {near_names(unknown, names, there)}"


def region_of(options: PlanOptions) -> Callable[[Graph, Mesh], Region]:
    """A function that gives the region that the pins and degrees of the options leave on a graph and a mesh."""
    pins = partial(pinned, tuple(map(parse_pin, options.pins)))
    if options.mine is None:
        return pins
    degrees = DegreesRegion(Degrees.parse(options.mine))
    return partial(_both, pins, degrees) if options.pins else degrees


def also_pinned(within: Callable[[Graph, Mesh], Region], pins: tuple[str, ...]) -> Callable[[Graph, Mesh], Region]:
    """A function that gives the part of a region that more pins leave."""
    return partial(_both, partial(pinned, tuple(map(parse_pin, pins))), within)


def _both(one: Callable[[Graph, Mesh], Region], other: Callable[[Graph, Mesh], Region], graph: Graph, mesh: Mesh
          ) -> Region:
    """The part of the space that two regions share."""
    first, second = one(graph, mesh), other(graph, mesh)

    def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
        return first(graph, item, choice) and second(graph, item, choice)

    return allowed


def check_pins(pins: tuple[str, ...], graph: Graph) -> None:
    """Raises InputError for a pin that matches nothing of the graph, and for two that contradict each other.

    It also does for a role that takes experts apart, on a graph that has none.
    """
    parsed = tuple(map(parse_pin, pins))
    if any(role.startswith("expert ") for role in _roles(parsed).values()):
        check_experts(graph)
    pinned(tuple(pin for pin in parsed if pin.pattern), graph, Mesh.parse("one=1"))


def pins_of_part(pins: tuple[str, ...], part: Graph, whole: Graph) -> tuple[str, ...]:
    """The pins that match something that a stage decides, and those of the mesh.

    A pin that matches parameters of the whole graph matches parameters alone in each of its parts.
    """
    if not pins:
        return ()
    items, found = tuple(decided(part)), []
    for text in pins:
        pin = parse_pin(text)
        weights = any(_matches(pin, t) for t in whole.tensors if t.kind is Kind.PARAMETER)
        if not pin.pattern or any(weights == isinstance(item, Tensor) and _matches(pin, item) for item in items):
            found.append(text)
    return tuple(found)


def pins_of_layouts(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """The stored layout in `plan` of each parameter that `graph` has, as pins."""
    stored = plan.index().stored
    names = [t.fqn for t in graph.tensors if t.kind is Kind.PARAMETER and t.fqn in stored]
    return tuple(f"{name.replace('[', '[[]')}: {axis}={state}" for name in names
                 for axis, state in zip(plan.mesh.names, stored[name].layout, strict=True))


def mesh_allows(pins: tuple[Pin, ...], mesh: Mesh) -> bool:
    """Whether the mesh has every pinned axis size, and all axes that pins of layouts name."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    return all(sizes.get(p.axis) == p.value if isinstance(p.value, int) else p.axis in sizes for p in pins)


def _roles(pins: tuple[Pin, ...]) -> dict[str, str]:
    """The role of every axis that has one. Raises InputError where pins give an axis two."""
    found: dict[str, str] = {}
    for pin in pins:
        if not pin.pattern and isinstance(pin.value, str) and found.setdefault(pin.axis, pin.value) != pin.value:
            raise InputError(f"pins '{pin.axis}={found[pin.axis]}' and '{pin}' give axis {pin.axis} two roles; drop "
                             "one of them")
    return found


def _names(item: Op | Tensor) -> tuple[str, ...]:
    return (item.fqn, *item.aliases) if isinstance(item, Tensor) else (item.module, item.name)


def _matches(pin: Pin, item: Op | Tensor) -> bool:
    hub = isinstance(item, Op) and item.target == HUB
    return not hub and any(fnmatchcase(name, pin.pattern) for name in _names(item) if name)


def pinned(pins: tuple[Pin, ...], graph: Graph, mesh: Mesh) -> Region:
    """The region that `pins` leave. A pattern that matches a parameter pins parameters only, never ops.

    Raises InputError for a pin that matches nothing that a plan decides, and for two pins that contradict each other.
    """
    layouts, roles = tuple(pin for pin in pins if pin.pattern), _roles(pins)
    within = strategy(graph, mesh, roles) if roles else everything
    if not layouts:
        return within
    parameters = tuple(t for t in graph.tensors if t.kind is Kind.PARAMETER)
    of_parameters = {pin: any(_matches(pin, t) for t in parameters) for pin in layouts}
    for pin in layouts:
        if not of_parameters[pin] and not any(_matches(pin, op) for op in graph.ops):
            known: tuple[Op | Tensor, ...] = (*parameters, *graph.ops)
            near = near_names(pin.pattern, (name for item in known for name in _names(item)),
                              f"parameters are {', '.join(t.fqn for t in parameters[:4])}, ...")
            raise InputError(f"pin '{pin}' matches no parameter and no module; {near}")

    def pins_of(item: Op | Tensor) -> list[Pin]:
        return [pin for pin in layouts if of_parameters[pin] == isinstance(item, Tensor) and _matches(pin, item)]

    items: tuple[Op | Tensor, ...] = (*parameters, *graph.ops)
    for item in items:
        _agree(item, pins_of(item))
    held = {pin for item in decided(graph) for pin in pins_of(item)}
    for pin in layouts:
        if pin not in held and pin.value != B:
            raise InputError(f"pin '{pin}' matches only what every rank computes or holds alike: no parameter that is "
                             "read, and no op that depends on one; drop the pin, or match one of those")

    def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
        return within(graph, item, choice) and all(_allows(pin, mesh.index(pin.axis), choice) for pin in pins_of(item))

    return allowed


def _allows(pin: Pin, axis: int, choice: Choice) -> bool:
    """Whether a choice has what a pin says of an axis."""
    state = choice.outputs[0][axis]
    if isinstance(pin.value, str):
        return state != B and bool(choice.depths) and DEPTHS[choice.depths[axis]] == pin.value
    return state == pin.value


def _agree(item: Op | Tensor, pins: list[Pin]) -> None:
    """Raises InputError where two pins give one axis two states, or a parameter a state that none is stored in."""
    first: dict[tuple[str, bool], Pin] = {}
    for pin in pins:
        said = isinstance(pin.value, str)
        other, name = first.setdefault((pin.axis, said), pin), _names(item)[0] or item.name
        if said and not isinstance(item, Tensor):
            raise InputError(f"pin '{pin}': O, OG and OGW say what of a parameter is split, and {name} is none; pin a "
                             "layout, like S(0)")
        unsplit, split = (first.get((pin.axis, which)) for which in (False, True))
        if unsplit is not None and split is not None and unsplit.value == B:
            raise InputError(f"pins '{unsplit}' and '{split}' contradict each other: nothing is split on axis "
                             f"{pin.axis} of what is whole there; drop one of them")
        if other.value != pin.value:
            raise InputError(f"pins '{other}' and '{pin}' give {name} two states on axis {pin.axis}; drop one of them")
        if isinstance(item, Tensor) and not said and not (pin.value == B or (
                isinstance(pin.value, Split) and pin.value.dim < len(item.shape))):
            raise InputError(f"pin '{pin}': a parameter is stored as B or as S of one of its dims, and {name} is "
                             f"{list(item.shape)}")
