"""Tries one small instance of every family of public model libraries: python examples/benchmarks/families.py TABLE

    TABLE                 a file of JSON lines, one per family; families in it are not tried again
    --libraries A,B       some of the libraries (`family_models`)
    --every N             every N-th family
    --only A,B            these families
    --print               print the table of a file alone

Each family is planned on 2 x 2 slow devices with quick links, where it is worth splitting parameters. Lines have
processor seconds, the part of the predicted step of operators without a rule, and the cause of a refusal. A family
that is refused runs once in one process; one that does not run there either is none of ours. One process tries one
family after another, until it crashes or is interrupted after LIMIT processor seconds.
"""

import argparse
import json
import resource
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

from family_models import built, libraries

LIMIT = 60
"""Processor seconds of a family."""

CLUSTER = """
name: slow-devices
device: {name: slow, memory: 16 GB, bandwidth: 50 GB/s, peak: {float32: 500 GFLOP/s}}
levels:
  - {name: node, size: 2, bandwidth: 50 GB/s, latency: 2 us}
  - {name: net, size: 2, bandwidth: 25 GB/s, latency: 4 us}
"""

Line = dict[str, Any]


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"more than {LIMIT} processor seconds")


def tried(library: str, family: str, model: str) -> Line:
    """The line of one family."""
    warnings.simplefilter("ignore")
    line: Line = {"library": library, "family": family, "model": model}
    signal.signal(signal.SIGPROF, _interrupted)
    try:
        module = built(library, model)
    except Exception as error:  # whatever a library raises
        return {**line, "result": "not built", "cause": _one_line(error)}
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        line |= _planned(module)
    except Exception as error:
        line |= {"result": "refused", "cause": _one_line(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    line["seconds"] = round(time.process_time() - start, 1)
    if line["result"] == "refused" and not _runs(module):
        line["result"] = "does not run"
    return line


def _planned(module: Any) -> Line:
    import autoddl
    from autoddl.cost_models import parse_cluster
    plan = autoddl.plan(module, parse_cluster(CLUSTER, "slow-devices"))
    share = sum(plan.predicted.fallback.values()) / plan.predicted.seconds
    return {"result": "planned", "gap": round(plan.gap, 6), "operators": sorted(plan.predicted.fallback),
            "share": round(share, 4)}


def _runs(module: Any) -> bool:
    """Whether the model runs in one process, forward and backward."""
    try:
        module(*module.example_inputs()).backward()
    except Exception:
        return False
    return True


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def lines(wanted: list[tuple[str, str, str]]) -> Iterator[Line]:
    """The line of every family, from one process that is replaced when it dies."""
    pool = ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=40)
    for one in wanted:
        try:
            yield pool.submit(tried, *one).result()
        except BrokenProcessPool:
            yield dict(zip(("library", "family", "model"), one, strict=True)) | {"result": "crashed"}
            pool = ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=40)
    pool.shutdown()


def show(found: list[Line]) -> None:
    """Print what became of the families of each library, and every cause."""
    print("| library | families | run | planned | without a rule, share of step: median, most | CPU s: median, most |")
    print("|---|---|---|---|---|---|")
    for library in dict.fromkeys(line["library"] for line in found):
        here = [line for line in found if line["library"] == library]
        plans = [line for line in here if line["result"] == "planned"]
        ran = len(plans) + sum(line["result"] in ("refused", "crashed") for line in here)
        shares, seconds = [line["share"] for line in plans] or [0], [line["seconds"] for line in plans] or [0]
        with_operators = sum(bool(line["operators"]) for line in plans)
        print(f"| {library} | {len(here)} | {ran} | {len(plans)} | {with_operators} of {len(plans)}: "
              f"{statistics.median(shares):.1%}, {max(shares):.1%} | {statistics.median(seconds):.1f}, "
              f"{max(seconds):.1f} |")
    for line in found:
        if line["result"] != "planned":
            print(f"\n{line['library']} {line['family']} ({line['model']}): {line['result']}. {line.get('cause', '')}")
    without = Counter(op for line in found for op in line.get("operators", []))
    print("\nOperators without a rule:", without.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--libraries", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--print", action="store_true")
    asked = parser.parse_args()
    known = [json.loads(text) for text in asked.table.read_text().splitlines()] if asked.table.exists() else []
    if not asked.print:
        done = {(line["library"], line["family"]) for line in known}
        every = [(library, family, model) for library, models in libraries(filter(None, asked.libraries.split(",")))
                 .items() for family, model in models.items()][::asked.every]
        only = set(filter(None, asked.only.split(",")))
        wanted = [one for one in every if one[:2] not in done and (not only or one[1] in only)]
        with open(asked.table, "a") as file:
            for line in lines(wanted):
                file.write(json.dumps(line) + "\n")
                file.flush()
                known.append(line)
                print(line["library"], line["family"], line["result"], line.get("seconds", ""),
                      line.get("cause", "")[:100], flush=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{used.ru_utime + used.ru_stime:.0f} processor seconds\n")
    show(known)


if __name__ == "__main__":
    main()
