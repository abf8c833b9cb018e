"""Draws charts as inline SVG: bars over seconds, areas over seconds, points.

Every mark has `data-tip`, which the page shows beside the pointer. Scales have a `tick` class: they are no data.

    tracks   a lane for each row; bars that are too narrow to be told apart are drawn as one, which says how many it is
    areas    stacked kinds; of many moments the one of most bytes in each of `COLUMNS` equal parts of the step is drawn
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10

from autoddl.cli.page.html import Html, element
from autoddl.cost_models.units import show_bytes, show_seconds

__all__ = ["Bar", "Kinds", "areas", "points", "stacks", "tracks"]

WIDTH = 1000.0
LANE = 20.0
NARROW = 1 / 1500
"""Part of the step below which neighbouring bars are joined."""
COLUMNS = 300


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from `start` to `end`, in seconds, with its kind and what it says."""

    start: float
    end: float
    kind: str
    tip: str


class Kinds:
    """The colour class of every kind, in order of first use."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, kind: str) -> str:
        return f"k{self.known.setdefault(kind, len(self.known)) % 10}"

    def legend(self) -> Html:
        """The kinds with their colours."""
        return element("div", *(element("span", element("i", class_=f"key k{n % 10}"), kind)
                                for kind, n in self.known.items()), class_="legend")


def _mark(x: float, y: float, width: float, height: float, kind: str, tip: str) -> Html:
    return element("rect", x=f"{x:.6g}", y=f"{y:.6g}", width=f"{max(width, 0.0):.6g}", height=f"{height:.6g}",
                   class_=kind, data_tip=tip)


def _joined(bars: Iterable[Bar], whole: float) -> list[Bar]:
    """The bars, those of one kind that are too narrow to be told apart as one."""
    found: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda one: one.start):
        last = found[-1] if found else None
        if last and last[0].kind == bar.kind and bar.end - last[0].start < NARROW * whole:
            last.append(bar)
        else:
            found.append([bar])
    return [these[0] if len(these) == 1 else Bar(these[0].start, max(one.end for one in these), these[0].kind,
                                                 f"{these[0].tip} and {len(these) - 1} more") for these in found]


def tracks(rows: Mapping[str, Sequence[Bar]], whole: float, kinds: Kinds, name: str) -> Html:
    """A lane of bars for each row, over `whole` seconds."""
    lanes = [_mark(WIDTH * bar.start / whole, y * LANE + 2, WIDTH * (bar.end - bar.start) / whole, LANE - 4,
                   kinds(bar.kind), bar.tip)
             for y, bars in enumerate(rows.values()) for bar in _joined(bars, whole)]
    height = LANE * len(rows)
    drawn = element("svg", *lanes, viewBox=f"0 0 {WIDTH:g} {height:g}", preserveAspectRatio="none", role="img",
                    aria_label=name, style=f"height:{height:g}px")
    labels = element("div", *(element("div", row) for row in rows), class_="labels", style=f"line-height:{LANE:g}px")
    return _framed(labels, drawn, whole)


def _framed(labels: Html, drawn: Html, whole: float) -> Html:
    """A chart over seconds: labels, the drawing that can be made wider, and a scale below."""
    shown = [at for at in _ticks(whole) if at < 0.95 * whole]
    scale = element("div", *(element("span", show_seconds(at) if at else "0", class_="tick",
                                     style=f"left:{100 * at / whole:.5g}%") for at in shown), class_="scale")
    return element("div", labels, element("div", element("div", drawn, scale, class_="wide"), class_="scroll"),
                   class_="chart")


def _ticks(most: float, about: int = 6) -> list[float]:
    """Round numbers from 0 to `most`."""
    rough = most / about if most > 0 else 1.0
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    return [i * step for i in range(int(most / step) + 1)]


def areas(times: Sequence[float], parts: Sequence[Mapping[str, float]], whole: float, budget: float, kinds: Kinds,
          name: str) -> Html:
    """Bytes by kind over `whole` seconds, stacked, with a line for the budget where it is near."""
    height, shown = 180.0, _sampled(times, parts, whole)
    order = list(dict.fromkeys(kind for part in parts for kind, held in part.items() if held))
    most = max((sum(part.values()) for part in parts), default=1.0)
    top = budget if budget < 2 * most else 1.05 * most
    ends = [at for at, _ in shown[1:]] + [whole]
    marks: list[Html] = []
    for (at, part), end in zip(shown, ends, strict=True):
        y, tip = 0.0, "\n".join([f"{show_seconds(at)}: {show_bytes(sum(part.values()))}",
                                 *(f"{kind} {show_bytes(part[kind])}" for kind in order if part.get(kind))])
        for kind in order:
            tall = height * part.get(kind, 0.0) / top
            y += tall
            if tall > 0:
                marks.append(_mark(WIDTH * at / whole, height - y, WIDTH * (end - at) / whole, tall, kinds(kind), tip))
    if top == budget:
        marks.append(element("line", x1="0", x2=f"{WIDTH:g}", y1="1", y2="1", class_="budget",
                             data_tip=f"budget {show_bytes(budget)}"))
    drawn = element("svg", *marks, viewBox=f"0 0 {WIDTH:g} {height:g}", preserveAspectRatio="none", role="img",
                    aria_label=name, style=f"height:{height:g}px", class_="areas")
    labels = element("div", element("div", show_bytes(top), class_="tick"), element("div", "0", class_="tick"),
                     class_="labels ends")
    return _framed(labels, drawn, whole)


def _sampled(times: Sequence[float], parts: Sequence[Mapping[str, float]], whole: float
             ) -> list[tuple[float, Mapping[str, float]]]:
    """The moments to draw, each from its time on: the one of most bytes in every column."""
    found: dict[int, tuple[float, Mapping[str, float]]] = {}
    for at, part in zip(times, parts, strict=True):
        column = min(COLUMNS - 1, int(COLUMNS * at / whole)) if whole else 0
        if column not in found or sum(part.values()) > sum(found[column][1].values()):
            found[column] = (found[column][0] if column in found else at, part)
    return [found[column] for column in sorted(found)]


def stacks(rows: Mapping[str, Mapping[str, float]], budget: float, kinds: Kinds, name: str) -> Html:
    """A bar of bytes by kind for each row, and a line for the budget where it is near."""
    most = max((sum(parts.values()) for parts in rows.values()), default=1.0)
    top = budget if budget < 2 * most else 1.05 * most
    marks: list[Html] = []
    for y, parts in enumerate(rows.values()):
        at = 0.0
        for kind, held in parts.items():
            marks.append(_mark(WIDTH * at / top, y * LANE + 2, WIDTH * held / top, LANE - 4, kinds(kind),
                               f"{kind} {show_bytes(held)}"))
            at += held
    height = LANE * len(rows)
    if top == budget:
        marks.append(element("line", x1=f"{WIDTH - 1:g}", x2=f"{WIDTH - 1:g}", y1="0", y2=f"{height:g}",
                             class_="budget", data_tip=f"budget {show_bytes(budget)}"))
    drawn = element("svg", *marks, viewBox=f"0 0 {WIDTH:g} {height:g}", preserveAspectRatio="none", role="img",
                    aria_label=name, style=f"height:{height:g}px")
    labels = element("div", *(element("div", row) for row in rows), class_="labels", style=f"line-height:{LANE:g}px")
    scale = element("div", element("span", "0", class_="tick", style="left:0"),
                    element("span", show_bytes(top), class_="tick", style="right:0"), class_="scale")
    return element("div", labels, element("div", drawn, scale, class_="plain"), class_="chart")


def points(xs: Sequence[float], ys: Sequence[float], tips: Sequence[str], own: tuple[float, float], name: str) -> Html:
    """Points of bytes and seconds, joined by steps, with a ring around `own`."""
    width, height, least_x, high = 640.0, 260.0, min([*xs, own[0]]), 1.05 * max([*xs, own[0]])
    low = 0.0 if least_x < 0.3 * high else 0.9 * least_x
    least, most = min([*ys, own[1]]), max([*ys, own[1]])
    room = 0.15 * (most - least) or 0.1 * most

    def at(x: float, y: float) -> tuple[float, float]:
        return (70 + (width - 90) * (x - low) / (high - low),
                height - 40 - (height - 60) * (y - least + room) / (most - least + 2 * room))

    path = "".join(f"{'M' if not i else 'L'}{at(x, ys[max(0, i - 1)])[0]:.1f} {at(x, ys[max(0, i - 1)])[1]:.1f}"
                   f"L{at(x, y)[0]:.1f} {at(x, y)[1]:.1f}" for i, (x, y) in enumerate(zip(xs, ys, strict=True)))
    marks = [element("path", d=path, class_="front")] if path else []
    marks += [element("circle", cx=f"{at(x, y)[0]:.1f}", cy=f"{at(x, y)[1]:.1f}", r="5", class_="k0", data_tip=tip)
              for x, y, tip in zip(xs, ys, tips, strict=True)]
    marks.append(element("circle", cx=f"{at(*own)[0]:.1f}", cy=f"{at(*own)[1]:.1f}", r="9", class_="ring",
                         data_tip="this plan"))
    marks += [element("text", show_bytes(x), x=f"{at(x, least)[0]:.1f}", y=f"{height - 18:g}", text_anchor="middle",
                      class_="tick") for x in _ticks(high, 8) if low <= x <= high]
    marks += [element("text", show_seconds(y), x="62", y=f"{at(low, y)[1] + 4:.1f}", text_anchor="end", class_="tick")
              for y in dict.fromkeys((least, most))]
    return element("svg", *marks, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=name, class_="points")
