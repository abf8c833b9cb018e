"""The report: every number on the page is the value that it names, and the page needs nothing from elsewhere."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html.parser import HTMLParser
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from shell import FACTORY, LAPTOP, PAIR, shell

from autoddl.cli.page.document import document
from autoddl.cli.page.facts import facts_of
from autoddl.core.graph import graph_from_text
from autoddl.core.plan import Plan, load_plan
from autoddl.core.record import Event, Record, RecordedStep, header_text, own_seconds, read_record, step_text
from autoddl.cost_models import show_bytes, show_seconds
from autoddl.explain.assumptions import throughput
from autoddl.explain.axis_splits import axis_splits
from autoddl.explain.compare_run import compare_run, foreseen, foreseen_bytes, planned_traffic
from autoddl.explain.explain import explain
from autoddl.explain.pareto import front_of_bytes
from autoddl.explain.run_seconds import step_as_run
from autoddl.explain.staged_run import compare_staged_run, foreseen_stages
from autoddl.explain.utilisation import model_flops_utilisation
from autoddl.explain.what_if import Sensitivity, sensitivities
from autoddl.launch.record_writer import header_of

VOID = {"meta", "rect", "line", "circle", "path"}
UNIT = re.compile(r"\d (ns|us|ms|s|B|kB|MB|GB|TB)\b|\d%")
"""Numbers that a person would take for a figure of the plan."""


@dataclass
class Number:
    value: str
    source: str
    shown: str = ""


@dataclass
class Page(HTMLParser):
    """The numbers of a page, its bars by chart, and its texts outside numbers, scales and the pictures' tips."""

    numbers: list[Number] = field(default_factory=list)
    bars: dict[str, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))
    texts: list[str] = field(default_factory=list)
    stack: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "data":
            self.numbers.append(Number(given["value"], given["data-from"]))
        if tag == "rect":
            chart = next(one["aria-label"] for _, one in reversed(self.stack) if "aria-label" in one)
            self.bars[chart].append(given)
        if tag != "meta":
            self.stack.append((tag, given))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1][0] == "data":
            self.numbers[-1].shown += data
        elif self.stack and not any(tag in ("style", "script") or "tick" in one.get("class", "")
                                    for tag, one in self.stack):
            self.texts.append(data)


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page


def recorded(plan: Plan, path: Path) -> Record:
    """A record of two steps of every rank that sent what was planned, in made-up seconds."""
    steps = []
    for rank in range(plan.mesh.size):
        graph = graph_from_text(plan.source["graph"])
        whole = plan.pipeline is None
        sent: Sequence[Any] = foreseen(plan).step.events if whole else planned_traffic(plan, graph, rank)
        for step in range(3):
            events = tuple(Event(step, rank, one.direction, one.kind, one.axes, "", one.nbytes, 0.01 * k,
                                 0.01 * k + 0.004 + 0.001 * rank, 0.001, one.origin) for k, one in enumerate(sent))
            passes = (("forward", 0.0), ("backward", 0.1), ("update", 0.9))
            steps.append(RecordedStep(step, rank, 2.0 * step, 1.0 + 0.1 * step, passes, events))
    header = header_of(plan)
    path.write_text(header_text(header) + "".join(map(step_text, steps)))
    return read_record(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, its record and its page."""
    made = tmp_path_factory.mktemp("report")
    assert shell("plan", FACTORY, LAPTOP, "--set", "layers=1", "--set", "width=8", "--set", "dropout=0.0",
                 "--mesh", "machine=2,pair=2", "--pin", "blocks.*.up.weight: pair=S(0)",
                 "--pin", "head.weight: machine=S(1)", "-o", str(made / "plan.json")).code == 0
    recorded(load_plan(made / "plan.json"), made / "record.jsonl")
    said = shell("report", str(made / "plan.json"), "--record", str(made / "record.jsonl"), "--limit", "1000")
    assert said.code == 0 and said.out == f"written: {made / 'plan.html'}\n"
    return made


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("staged")
    (made / "pair.yaml").write_text(PAIR)
    assert shell("plan", FACTORY, str(made / "pair.yaml"), "--set", "dropout=0.0", "--stages", "2", "--microbatches",
                 "2", "-o", str(made / "plan.json")).code == 0
    recorded(load_plan(made / "plan.json"), made / "record.jsonl")
    assert shell("report", str(made / "plan.json"), "--record", str(made / "record.jsonl")).code == 0
    return made


def plain_values(folder: Path) -> dict[str, Any]:
    """By name, the plan's JSON and the values of the functions that a page shows."""
    plan, data = load_plan(folder / "plan.json"), json.loads((folder / "plan.json").read_text())
    line = foreseen(plan)
    step, kinds = line.step, defaultdict[str, Any](lambda: {"count": 0, "nbytes": 0, "seconds": 0.0, "waited": 0.0})
    for event, own in zip(step.events, own_seconds(step.events), strict=True):
        one = kinds[f"{event.kind} {event.axes}"]
        kinds[f"{event.kind} {event.axes}"] = {"count": one["count"] + 1, "nbytes": one["nbytes"] + event.nbytes,
                                               "seconds": one["seconds"] + own, "waited": one["waited"] + event.wait}
    named = ("tokens.weight", "head.weight", "blocks.0.up.weight", "blocks.0.down.weight")
    memory = foreseen_bytes(plan, line)
    compared = asdict(compare_run(plan, read_record(folder / "record.jsonl")))
    return {"plan": data, "throughput": throughput(plan), "devices": 4, "gap": plan.gap,
            "device_seconds": 4 * plan.predicted.seconds, "peak_bytes": plan.predicted.peak_bytes,
            "utilisation": model_flops_utilisation(plan), "splits": [asdict(one) for one in axis_splits(plan)],
            "step": {"seconds": step.seconds, "exposed": step.exposed, "hidden": step.hidden,
                     "compute": line.compute_seconds},
            "memory": {"peak": memory.peak, "budget": memory.budget}, "kinds": kinds,
            "explained": asdict(explain(plan, named, 2)), "front": [asdict(one) for one in front_of_bytes(plan, 4)],
            "worth": [asdict(one) for one in sensitivities(plan)], "compared": compared}


def staged_values(folder: Path) -> dict[str, Any]:
    plan, data = load_plan(folder / "plan.json"), json.loads((folder / "plan.json").read_text())
    assert plan.pipeline is not None
    line, kinds = foreseen_stages(plan).timeline, defaultdict[str, Any](lambda: {"seconds": 0.0})
    for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True):
        for rank in task.ranks:
            kinds[f"{rank} {task.kind}"] = {"seconds": kinds[f"{rank} {task.kind}"]["seconds"] + (end - start)}
    stages = [{"peak_bytes": stage.plan.predicted.peak_bytes, "decisions": len(stage.plan.decisions)}
              for stage in plan.pipeline.stages]
    return {"plan": data, "throughput": throughput(plan), "devices": 2, "gap": plan.gap,
            "device_seconds": 2 * plan.predicted.seconds, "peak_bytes": plan.predicted.peak_bytes, "stages": stages,
            "utilisation": model_flops_utilisation(plan), "kinds": kinds,
            "worth": [asdict(one) for one in sensitivities(plan, searching=False)],
            "staged": {"makespan": line.makespan, "bubble": line.bubble},
            "compared": asdict(compare_staged_run(plan, read_record(folder / "record.jsonl")))}


def value_of(source: str, values: dict[str, Any]) -> float:
    """The value at a path like `plan/predicted/seconds`; `part/` is it over the step, `more/` that less 1."""
    first, _, rest = source.partition("/")
    if first in ("part", "more"):
        whole = float(values["plan"]["predicted"]["seconds"])
        return value_of(rest, values) / whole - (first == "more")
    found: Any = values
    at = source.split("/")
    if at[-1] == "error":
        predicted, actual = (value_of("/".join([*at[:-1], name]), values) for name in ("predicted", "recorded"))
        return (predicted - actual) / actual
    for step in at:
        found = found[int(step) if isinstance(found, list | tuple) else step]
    return float(len(found)) if isinstance(found, list | tuple) else float(found)


def check_numbers(page: Page, values: dict[str, Any]) -> None:
    for number in page.numbers:
        assert float(number.value) == value_of(number.source, values), number
        if UNIT.search(number.shown) and not number.shown.endswith("%"):
            assert number.shown in (show_seconds(float(number.value)), show_bytes(float(number.value))), number
        elif number.shown.endswith("%"):
            assert abs(float(number.shown[:-1]) / 100 - float(number.value)) <= 0.00501, number


def unnamed(page: Page, worth: Sequence[Sensitivity]) -> list[str]:
    """Texts with a figure that is no value of the plan, but for what there is of the cluster's resources."""
    return [text for text in page.texts if UNIT.search(text) and text not in {row.value for row in worth}]


def test_every_number_is_the_value_that_it_names(plain: Path) -> None:
    page = read(plain / "plan.html")
    check_numbers(page, plain_values(plain))
    sources = {number.source.split("/")[0] for number in page.numbers}
    assert sources == {"plan", "throughput", "devices", "gap", "device_seconds", "peak_bytes", "utilisation", "splits",
                       "step", "memory", "kinds", "explained", "front", "worth", "compared", "part", "more"}
    assert not unnamed(page, sensitivities(load_plan(plain / "plan.json")))


def test_every_number_of_stages_is_the_value_that_it_names(staged: Path) -> None:
    page = read(staged / "plan.html")
    check_numbers(page, staged_values(staged))
    assert {number.source.split("/")[0] for number in page.numbers} >= {"plan", "staged", "stages", "kinds", "compared"}
    assert not unnamed(page, sensitivities(load_plan(staged / "plan.json"), searching=False))


def test_a_page_of_a_program_has_the_step_as_run_and_its_interval(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert shell("plan", FACTORY, LAPTOP, "--set", "layers=1", "--set", "width=8", "--mine", "dp=4", "--software",
                 "eager", "-o", str(path)).code == 0
    assert shell("report", str(path), "--quick").code == 0
    plan, page = load_plan(path), read(path.with_suffix(".html"))
    ran = step_as_run(plan)
    assert ran is not None
    (low, high), shown = ran.between, {number.source: float(number.value) for number in page.numbers}
    assert (shown["ran/seconds"], shown["ran/low"], shown["ran/high"]) == (ran.seconds, low, high)
    assert shown["plan/predicted/seconds"] == plan.predicted.seconds != ran.seconds
    assert shown["throughput/samples"] == throughput(plan, ran.seconds)["samples"]
    assert shown["utilisation"] == model_flops_utilisation(plan, ran.seconds)
    assert shown["device_seconds"] == 4 * ran.seconds
    assert shown["part_as_run/worth/0/seconds"] == shown["worth/0/seconds"] / ran.seconds
    assert "as run by eager" in page.texts and "by published runs of this kind" in page.texts


def test_bars_are_the_time_line_and_the_memory(plain: Path) -> None:
    page, plan = read(plain / "plan.html"), load_plan(plain / "plan.json")
    line = foreseen(plan)
    scale, lanes = line.step.seconds / 1000, defaultdict[float, list[dict[str, str]]](list)
    for bar in page.bars["time line of rank 0"]:
        lanes[float(bar["y"])].append(bar)
    compute = [(float(bar["x"]) * scale, (float(bar["x"]) + float(bar["width"])) * scale) for bar in lanes[2.0]]
    assert min(compute)[0] == pytest.approx(line.computes[0].start, abs=1e-4 * line.step.seconds)
    assert sum(b - a for a, b in compute) == pytest.approx(line.compute_seconds, rel=0.02)
    assert len(lanes) >= 2 + len({event.axes for event in line.step.events}) - (not line.step.exposed)
    memory, budget = page.bars["memory of rank 0"], foreseen_bytes(plan, line)
    tall = defaultdict[str, float](float)
    for bar in memory:
        tall[bar["x"]] += float(bar["height"])
    assert max(tall.values()) == pytest.approx(180 / 1.05, rel=1e-4), "the peak is a 1.05th of the picture"
    assert any(bar["data-tip"].partition(": ")[2].startswith(show_bytes(budget.peak)) for bar in memory)
    assert len(page.bars["ranks along pair"]) == plan.mesh.size


def test_the_page_needs_nothing_from_elsewhere(plain: Path, staged: Path) -> None:
    for folder in (plain, staged):
        text = (folder / "plan.html").read_text()
        assert not re.search(r"https?:|src=|href=|@import|url\(", text)
        assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_quick_leaves_out_what_is_searched_for(plain: Path) -> None:
    out = plain / "quick.html"
    assert shell("report", str(plain / "plan.json"), "--quick", "-o", str(out)).code == 0
    sources = {number.source.split("/")[0] for number in read(out).numbers}
    assert "front" not in sources and "more" not in sources and {"step", "worth", "splits"} <= sources


def test_searches_that_are_ended_leave_points_and_exact_prices_out_and_say_so(plain: Path) -> None:
    facts, whole = (facts_of(load_plan(plain / "plan.json"), limit=limit) for limit in (1e-9, 1e9))
    assert facts.front and len(facts.front) <= len(whole.front)
    assert all(any(a.nbytes >= b.nbytes and a.seconds >= b.seconds for b in whole.front) for a in facts.front)
    assert facts.explained is not None and whole.explained is not None
    for one, other in zip(facts.explained.named, whole.explained.named, strict=True):
        exact = {row.layouts: row for row in other.others}
        assert all(row.bound <= exact[row.layouts].bound * (1 + 1e-12) for row in one.others)
        assert {row.layouts for row in one.others if row.seconds is not None and isfinite(row.bound)} == {one.chosen}
    assert document(facts).count("Searches were ended after") == 2 and "were ended" not in document(whole)


def test_a_stage_has_a_page_of_its_own(staged: Path) -> None:
    out = staged / "stage.html"
    assert shell("report", str(staged / "plan.json"), "--stage", "1", "--quick", "-o", str(out)).code == 0
    assert "step" in {number.source.split("/")[0] for number in read(out).numbers}


def test_bad_input_gets_one_line(plain: Path, staged: Path) -> None:
    for args, says in (((plain / "plan.json", "--record", staged / "record.jsonl"), "the record is of another plan"),
                       ((plain / "plan.json", "--record", plain / "none"), "cannot read the record"),
                       ((plain / "plan.json", "-o", plain / "no" / "x.html"), "no"),
                       ((plain / "plan.json", "--quick", "--limit", "9"), "--limit 9 is about: drop one"),
                       ((plain / "plan.json", "--stage", "0"), "has no stages")):
        said = shell("report", *map(str, args))
        assert said.code == 2 and len(said.err.splitlines()) == 1 and says in said.err and not said.out


BROWSER = """
import sys
from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

app = QApplication(["report", "--disable-gpu", "--no-sandbox"])

class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, text, line, source):
        print("console:", text, line)

view = QWebEngineView()
page = Page(view)
view.setPage(page)
view.resize(1200, 900)
asks = ("document.querySelector('[data-action=wider]').click();"
        "const bar = document.querySelector('rect[data-tip]'), box = bar.getBoundingClientRect();"
        "bar.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.x, clientY: box.y}));"
        "[document.querySelectorAll('section').length, document.getElementById('tip').textContent.length,"
        " performance.timing.loadEventEnd - performance.timing.navigationStart,"
        " document.documentElement.scrollWidth <= innerWidth].join(' ')")

def loaded(ok):
    page.runJavaScript(asks, lambda found: (print("found:", ok, found), app.quit()))

page.loadFinished.connect(lambda ok: QTimer.singleShot(200, lambda: loaded(ok)))
view.load(QUrl.fromLocalFile(sys.argv[1]))
view.show()
QTimer.singleShot(60000, app.quit)
app.exec()
"""


@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("PyQt6") is None, reason="no browser: pip install PyQt6-WebEngine has one")
def test_a_browser_shows_the_page_without_errors_within_a_second(plain: Path, staged: Path) -> None:
    for folder, sections in ((plain, 10), (staged, 10)):
        said = subprocess.run([sys.executable, "-c", BROWSER, str(folder / "plan.html")], timeout=120,
                              env={**os.environ, "QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"},
                              capture_output=True, text=True)
        assert "console:" not in said.stdout, said.stdout
        ok, count, tip, took, fits = said.stdout.split("found:")[1].split()
        assert (ok, int(count), fits) == ("True", sections, "true") and int(tip) > 3 and float(took) < 1000


@pytest.mark.parametrize("kind", ["plain", "staged"])
def test_messages_are_counted_as_planned_and_as_recorded(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    plan, record = str(folder / "plan.json"), str(folder / "record.jsonl")
    planned = json.loads(shell("show", plan, "--messages", "--json").out)
    both = json.loads(shell("compare-run", plan, record, "--messages", "--json").out)
    assert {row["level"] for row in planned["messages"]} <= {"machine", "pair", "net"}
    for alone, row in zip(planned["messages"], both["messages"], strict=True):
        assert alone["count"] == [row["count"][0], None] and row["count"][0] == row["count"][1]
        assert row["nbytes"][0] == row["nbytes"][1] and row["moved"][0] == row["moved"][1]
        assert sum(row["classes"]) == row["count"][0]
    assert {one["rank"] for one in both["levels"]} == ({0} if kind == "plain" else {0, 1})
    assert all(one["moved"][0] == one["moved"][1] for one in both["levels"])
