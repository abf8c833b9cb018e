"""Draws a record beside the prediction."""

from autoddl.cli.page.facts import Facts
from autoddl.cli.page.html import Html, datum, element, nbytes, seconds, section, table
from autoddl.explain.compare_run import Compared
from autoddl.explain.record_statistics import Pair
from autoddl.explain.staged_run import ComparedStages

__all__ = ["measured"]

Cells = tuple[str, ...]


def measured(facts: Facts) -> Html:
    """The comparison with a record; empty without one."""
    found = facts.compared
    if found is None:
        return Html("")
    wrong = len(found.mismatches)
    sent = (element("span", datum(wrong, str(wrong), "compared/mismatches"), " collectives differ from the plan.")
            if wrong else element("span", "Every collective and every byte ran as planned."))
    said = element("p", "Recorded: ", datum(found.steps, str(found.steps), "compared/steps"), " steps of ",
                   datum(found.ranks, str(found.ranks), "compared/ranks"), " ranks. ", sent, f" {found.note}".rstrip())
    tables = _plain(found) if isinstance(found, Compared) else _staged(found)
    return section("Prediction and record", "Seconds as predicted and as recorded; errors are relative to the record.",
                   said, *tables)


def _pair(pair: Pair, at: str) -> Cells:
    error = datum(pair.error, f"{pair.error:+.0%}", f"{at}/error") if pair.recorded else ""
    return seconds(pair.predicted, f"{at}/predicted"), seconds(pair.recorded, f"{at}/recorded"), error


def _plain(found: Compared) -> list[Html]:
    figures = [(name, *_pair(getattr(found, name), f"compared/{name}"))
               for name in ("step", "compute", "exposed", "hidden", "update")]
    rows = [(row.kind, row.axes, nbytes(row.nbytes[1], f"compared/rows/{i}/nbytes/1"),
             *_pair(row.seconds, f"compared/rows/{i}/seconds")) for i, row in enumerate(found.rows)]
    return [table(("", "predicted", "recorded", "error"), figures),
            table(("collective", "axes", "bytes", "predicted", "recorded", "error"), rows)]


def _staged(found: ComparedStages) -> list[Html]:
    figures: list[Cells] = [("all ranks", "step", *_pair(found.step, "compared/step"))]
    for i, one in enumerate(found.parts):
        figures += [(one.ranks, name, *_pair(getattr(one, name), f"compared/parts/{i}/{name}"))
                    for name in ("compute", "waiting", "update")]
    rows = [(row.ranks, row.kind, row.axes, nbytes(row.nbytes[1], f"compared/rows/{i}/nbytes/1"),
             seconds(row.waited, f"compared/rows/{i}/waited")) for i, row in enumerate(found.rows)]
    return [table(("ranks", "", "predicted", "recorded", "error"), figures),
            table(("ranks", "sent", "axes", "bytes", "waited for"), rows)]
