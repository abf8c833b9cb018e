"""Size report: lines per package, longest file and function, options of the shell, dependencies."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("autoddl", "search", "cost_models", "examples", "tests")


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, file:name) of every function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [((node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}")
            for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def options() -> int:
    """Arguments and options of all verbs, counted in the text of the files that have them."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "autoddl").glob("cli*.py")]
    verbs = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
             and any("command" in ast.unparse(decorator) for decorator in node.decorator_list)]
    return sum(len(verb.args.args) for verb in verbs)


def main() -> None:
    everything: list[tuple[int, str]] = []
    for package in PACKAGES:
        files = sorted((ROOT / package).glob("*.py"))
        lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
        longest = max(lines, key=lambda path: lines[path], default=None)
        everything += [row for path in files for row in functions(path)]
        print(f"{package:12} {len(files):3} files {sum(lines.values()):6} lines"
              + (f"   longest {longest.name} {lines[longest]}" if longest else ""))
    size, name = max(everything)
    print(f"longest function  {size} lines, {name}")
    print(f"over 40 lines     {sum(lines > 40 for lines, _ in everything)} of {len(everything)} functions")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(f"shell             {options()} arguments and options")
    print(f"dependencies      {len(project['dependencies'])}")


if __name__ == "__main__":
    main()
