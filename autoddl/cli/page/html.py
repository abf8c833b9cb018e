"""Writes elements of HTML and SVG as text: attributes and text are escaped, what is an element already is not."""

from collections.abc import Callable, Iterable
from html import escape

from autoddl.cost_models.units import show_bytes, show_seconds

__all__ = ["Html", "button", "datum", "element", "nbytes", "part", "seconds", "section", "table"]


class Html(str):
    """A text that is HTML."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: object) -> Html:
    """An element. A `_` in the name of an attribute is a `-`, one at its end is left out; None leaves it out."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
                      for key, value in attributes.items() if value is not None)
    inner = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{name}{written}>{inner}</{name}>")


def datum(value: float, shown: str, source: str) -> Html:
    """A number: what is shown, the value that it stands for, and the path of that value, like `plan/budget`."""
    return element("data", shown, value=repr(value), data_from=source)


def seconds(value: float, source: str) -> Html:
    """A number of seconds."""
    return datum(value, show_seconds(value), source)


def nbytes(value: float, source: str) -> Html:
    """A number of bytes."""
    return datum(value, show_bytes(value), source)


def part(value: float, source: str) -> Html:
    """A fraction, in per cent."""
    return datum(value, f"{value:.2%}" if value >= 1e-3 or not value else f"{value:.4%}", source)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], show: Callable[[str], Html] | None = None) -> Html:
    """A table; cells are texts or elements. Columns behind the first are aligned to the right where they are numbers.
    """
    def cell(text: str) -> Html:
        return element("td", text, class_="number" if isinstance(text, Html) and text.startswith("<data") else None)

    head = element("tr", *(element("th", name) for name in heads))
    body = [element("tr", *map(cell, row)) for row in rows]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="scroll")


def section(title: str, note: str, *children: str) -> Html:
    """A section with a title and a sentence on what it shows."""
    return element("section", element("h2", title), element("p", note, class_="note"), *children)


def button(text: str, action: str) -> Html:
    """A button of the page's script."""
    return element("button", text, type="button", data_action=action)
