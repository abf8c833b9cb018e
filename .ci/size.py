"""Reports how large the project is and how it reads, room by room, with the change since a commit.

    python .ci/size.py [--since REV] [--list]

    files, lines, longest function      of every room
    names twice                         public names that two modules define; `main` is the entry of every program
    long sentences                      sentences of docstrings above 25 words; tables and code do not count
    odd openings                        docstrings that begin with "Of", "What", "The same", "Those"
    undocumented                        public functions and classes without a docstring
    fields                              fields of dataclasses of more than five that no line of their own explains
    options, dependencies               of the shell, of the package

`--since` compares with a commit: by default the one where the branch left `origin/main`, or `main` where there is no
such. On `main` itself that is the commit before the last. `--list` names every place.
"""

import argparse
import ast
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("autoddl", "search", "cost_models", "examples", "tests")
OPENINGS = re.compile(r"(Of|What|The same|Those)\b")
MOST_WORDS = 25
MOST_FIELDS = 5

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Room:
    """What is counted in one folder; `places` are the lines that --list prints."""

    files: int = 0
    lines: int = 0
    longest: int = 0
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    places: list[str] = field(default_factory=list)

    def note(self, what: str, place: str) -> None:
        self.counts[what] += 1
        self.places.append(f"{place}: {what}")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring's paragraphs; lines that are indented or set in columns are tables or code."""
    kept = "\n".join("" if re.search(r"^    |\S {2,}\S", line) else line for line in text.splitlines())
    for paragraph in re.split(r"\n\s*\n", kept):
        plain = " ".join(re.sub(r"`[^`]*`", "Code", paragraph).split())
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`(])", plain)


def words(sentence: str) -> int:
    """How many words a sentence has; signs alone are none."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def unexplained(node: ast.ClassDef) -> list[str]:
    """Fields of a dataclass of more than five with neither a string below them nor a line of the docstring."""
    doc = ast.get_docstring(node) or ""
    fields = [(i, part.target.id) for i, part in enumerate(node.body)
              if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and
              "ClassVar" not in ast.unparse(part.annotation)]
    if len(fields) <= MOST_FIELDS:
        return []

    def below(i: int) -> bool:
        after = node.body[i + 1] if i + 1 < len(node.body) else None
        return (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str))

    return [name for i, name in fields if not below(i) and not re.search(rf"^\s*`?{name}\b`?[ :,]", doc, re.MULTILINE)]


def read_english(room: Room, path: str, tree: ast.Module) -> None:
    """Docstrings, fields and what has no docstring."""
    public = [node for node in tree.body if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")]
    for node in public:
        if not ast.get_docstring(node):
            room.note("undocumented", f"{path}:{node.lineno} {node.name}")
    for one in ast.walk(tree):
        if not isinstance(one, Function | ast.ClassDef | ast.Module):
            continue
        place = f"{path}:{getattr(one, 'lineno', 1)}"
        doc = ast.get_docstring(one) or ""
        if OPENINGS.match(doc):
            room.note("odd openings", f"{place} {doc.splitlines()[0]!r}")
        for sentence in sentences(doc):
            if words(sentence) > MOST_WORDS:
                room.note("long sentences", f"{place} {words(sentence)} words: {sentence[:60]!r}...")
        if isinstance(one, ast.ClassDef) and is_dataclass(one):
            for name in unexplained(one):
                room.note("fields", f"{place} {one.name}.{name}")


def read(root: Path) -> dict[str, Room]:
    """Every folder with Python files, with what is counted in it."""
    rooms: dict[str, Room] = defaultdict(Room)
    names: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            here = path.relative_to(root)
            if any(part.is_symlink() for part in path.parents):
                continue
            room, text = rooms[str(here.parent)], path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            room.files += 1
            room.lines += len(text.splitlines())
            sizes = [(node.end_lineno or node.lineno) - node.lineno + 1
                     for node in ast.walk(tree) if isinstance(node, Function)]
            room.longest = max([room.longest, *sizes])
            if package not in ("examples", "tests"):
                read_english(room, str(here), tree)
                for node in tree.body:
                    if isinstance(node, Function | ast.ClassDef) and node.name != "main" and node.name[0] != "_":
                        names[node.name].append((str(here.parent), f"{here}:{node.lineno}"))
    for name, found in names.items():
        if len(found) > 1:
            for folder, place in found:
                rooms[folder].note("names twice", f"{place} {name}")
    return rooms


def options(root: Path) -> int:
    """Arguments and options of all verbs: what the functions in the shell's table of verbs take."""
    found = 0
    for path in (root / "autoddl" / "cli").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found += sum(bool(part.annotation) and ast.unparse(part.annotation)[:1].isupper() and
                             any(other.arg == "as_json" for other in node.args.args) for part in node.args.args)
    return found


def at_commit(revision: str, folder: Path) -> Path | None:
    """The tree of a commit, unpacked into `folder`; None where there is no such commit."""
    made = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True)
    if made.returncode:
        return None
    with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def branched_from() -> str:
    """The commit where this branch left `origin/main`, or `main`; `HEAD~1` where it has added nothing to them."""
    def named(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    bases = (named("merge-base", "HEAD", branch) for branch in ("origin/main", "main"))
    return next((base for base in bases if base not in ("", named("rev-parse", "HEAD"))), "HEAD~1")


COLUMNS = ("names twice", "long sentences", "odd openings", "undocumented", "fields")


def cell(now: int, before: int | None) -> str:
    """`12 (+3)`: a number with its change."""
    return f"{now} ({now - before:+})" if before is not None and before != now else str(now)


def table(now: dict[str, Room], before: dict[str, Room] | None) -> list[tuple[str, ...]]:
    """A row per room, and one for the package as a whole."""
    rows: list[tuple[str, ...]] = [("room", "files", "lines", "longest function", *COLUMNS)]
    total, total_before = Room(), Room()
    for name in sorted({*now, *(before or {})}):
        one, other = now.get(name, Room()), None if before is None else before.get(name, Room())
        for whole, part in ((total, one), (total_before, other)):
            if part is not None:
                whole.files, whole.lines = whole.files + part.files, whole.lines + part.lines
                whole.longest = max(whole.longest, part.longest)
                for what, count in part.counts.items():
                    whole.counts[what] += count
        rows.append(row(name, one, other))
    return [*rows, row("all", total, None if before is None else total_before)]


def row(name: str, one: Room, other: Room | None) -> tuple[str, ...]:
    return (name, cell(one.files, other and other.files), cell(one.lines, other and other.lines),
            cell(one.longest, other and other.longest),
            *(cell(one.counts[what], None if other is None else other.counts[what]) for what in COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--since", help="a commit to set the numbers beside; the one where the branch began without it")
    parser.add_argument("--list", action="store_true", help="name every place")
    asked = parser.parse_args()
    now = read(ROOT)
    if asked.list:
        for room in now.values():
            print("\n".join(room.places), end="\n" if room.places else "")
        sys.exit()
    with tempfile.TemporaryDirectory() as name:
        folder = at_commit(asked.since or branched_from(), Path(name))
        before = read(folder) if folder else None
        rows = table(now, before)
    widths = [max(len(one[i]) for one in rows) for i in range(len(rows[0]))]
    for one in rows:
        print("  ".join(f"{part:{width}}" for part, width in zip(one, widths, strict=True)).rstrip())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(f"shell: {options(ROOT)} arguments and options; dependencies: {len(project['dependencies'])}")


if __name__ == "__main__":
    main()
