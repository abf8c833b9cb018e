"""Puts the sections together: one document with its style and its script, and nothing from elsewhere."""

from autoddl.cli.page.decisions import front, layouts, other_choices, worth
from autoddl.cli.page.facts import Facts
from autoddl.cli.page.html import Html, element
from autoddl.cli.page.measured import measured
from autoddl.cli.page.opening import at_a_glance, splits
from autoddl.cli.page.step import by_kind, memory, time_line
from autoddl.core.pipeline_schedules import schedule_title

__all__ = ["document"]

_LIGHT = ("#3b6fb6", "#d9822b", "#3f9a5f", "#b84a4a", "#7d5ba6", "#8c6d53", "#c76b9b", "#6b7280", "#a3a02f", "#2f9ba3")
_DARK = ("#6f9fe0", "#e8a35c", "#6cc48c", "#e07a7a", "#a98bd0", "#b59a80", "#e29bc0", "#9aa3b2", "#cfcb5f", "#5cc7cf")

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2430; --soft: #5d6878; --line: #dde2e9; --card: #f5f7fa;
LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #14181f; --ink: #e6eaf0; --soft: #9aa5b4; --line: #313a47;
  --card: #1d232d; DARK } }
@media print { :root { --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --card: #fff; LIGHT }
  .buttons, #tip { display: none } section { break-inside: avoid-page } .scroll { overflow: visible }
  rect, .key, .meter i { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
body { margin: 0 auto; padding: 24px; max-width: 1120px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif }
h1 { font-size: 24px; margin: 0 0 2px } h2 { font-size: 18px; margin: 32px 0 2px }
h3 { font-size: 14px; margin: 14px 0 2px }
.note, .more { color: var(--soft); margin: 0 0 8px } .more { font-size: 12px; margin: 0 }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(126px, 1fr)); gap: 10px; margin: 10px 0 }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px }
.figure { font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums }
table { border-collapse: collapse; margin: 8px 0; font-size: 13px }
th, td { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 500 } td.number { font-variant-numeric: tabular-nums; white-space: nowrap }
.scroll { overflow-x: auto } .pictures { display: flex; flex-wrap: wrap; gap: 24px; margin: 10px 0 }
figure { margin: 0 } figcaption { font-size: 12px; color: var(--soft) }
.chart { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 10px; margin: 8px 0 }
.labels { font-size: 12px; white-space: nowrap; text-align: right; color: var(--soft) }
.ends { display: flex; flex-direction: column; justify-content: space-between; height: 180px }
.wide { width: calc(100% * var(--wider, 1)) } .chart svg { display: block; width: 100%; background: var(--card) }
.scale { position: relative; height: 18px; overflow: hidden; font-size: 11px; color: var(--soft) }
.scale span { position: absolute; white-space: nowrap } .points { width: 100%; max-width: 640px; font-size: 11px }
.points text { fill: var(--soft) } .front { fill: none; stroke: var(--k0); stroke-width: 1.5 }
.ring { fill: none; stroke: var(--ink); stroke-width: 2 } .budget { stroke: var(--ink); stroke-width: 2;
  stroke-dasharray: 8 5; vector-effect: non-scaling-stroke }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 12px; color: var(--soft) }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px }
.buttons button { margin: 0 6px 4px 0; font: inherit; font-size: 12px; color: var(--ink); background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: 2px 10px; cursor: pointer }
.meter { width: 120px; height: 9px; margin-top: 5px; background: var(--line) } .meter i { display: block; height: 100%;
  background: var(--k0) } [data-tip]:hover { opacity: 0.7 }
summary { cursor: pointer; margin: 6px 0 }
#tip { position: fixed; pointer-events: none; white-space: pre-line; max-width: 420px; padding: 5px 9px;
  font-size: 12px; color: var(--page); background: var(--ink); border-radius: 6px; visibility: hidden }
"""

_SCRIPT = """
const tip = document.getElementById('tip');
document.addEventListener('pointermove', event => {
  const over = event.target.closest ? event.target.closest('[data-tip]') : null;
  tip.style.visibility = over ? 'visible' : 'hidden';
  if (!over) return;
  tip.textContent = over.dataset.tip;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + 'px';
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + 'px';
});
document.addEventListener('click', event => {
  const action = event.target.dataset ? event.target.dataset.action : undefined;
  if (!action) return;
  const chart = event.target.closest('section'), now = Number(chart.style.getPropertyValue('--wider') || 1);
  chart.style.setProperty('--wider', Math.max(1, Math.min(64, action === 'wider' ? now * 2 : now / 2)));
});
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(one => { one.open = true; }));
"""


def document(facts: Facts) -> str:
    """The text of the page."""
    plan = facts.plan
    title = f"{plan.model} on {plan.cluster}"
    head = element("head", Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width">'),
                   element("title", title), element("style", Html(_style())))
    sections = [at_a_glance(facts), measured(facts), splits(facts), time_line(facts), memory(facts), by_kind(facts),
                worth(facts), front(facts), other_choices(facts), layouts(facts)]
    stages = "" if plan.pipeline is None else \
        f", {len(plan.pipeline.stages)} stages, schedule {schedule_title(plan.pipeline.name)}"
    body = element("body", element("h1", title), element("p", f"Mesh {plan.mesh}{stages}, over {plan.backend}.",
                                                         class_="note"),
                   *sections, element("div", id="tip"), element("script", Html(_SCRIPT)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _style() -> str:
    """The style sheet, with the colours of the kinds by day and by night."""
    colours = {word: " ".join(f"--k{n}: {colour};" for n, colour in enumerate(many))
               for word, many in (("LIGHT", _LIGHT), ("DARK", _DARK))}
    rules = "".join(f".k{n} {{ fill: var(--k{n}); background: var(--k{n}) }}\n" for n in range(len(_LIGHT)))
    text = _STYLE
    for word, said in colours.items():
        text = text.replace(word, said)
    return text + rules
