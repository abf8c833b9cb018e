"""Tries one small instance of every family of public model libraries: python examples/benchmarks/families.py TABLE

    TABLE                 a file of JSON lines, one per family; families in it are not tried again
    --libraries A,B       some of the libraries (`family_models`)
    --every N             every N-th family
    --only A,B            these families
    --wall SECONDS        begin no family after so many seconds; the same command goes on with the rest
    --verify SECONDS      verify plans that took at most so many processor seconds, too: on four ranks of this machine,
                          against one process, in float64
    --stages N            plan N stages with two microbatches in all schedules below, and check the proof
    --print               print the table of a file alone

Each family is planned on 2 x 2 slow devices with quick links, where it is worth splitting parameters. Lines have
processor seconds, the part of the predicted step of operators without a rule, and the cause of a refusal. A family
that is refused runs once in one process; one that does not run there either is none of ours. One process tries one
family after another, until it crashes or is interrupted after LIMIT processor seconds. It is forked from one that has
imported what all need.
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
from multiprocessing import active_children, get_context
from pathlib import Path
from types import FrameType
from typing import Any

from family_models import built, libraries

import autoddl
from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.capture.sample import as_sample, parted
from autoddl.core.plan import Plan
from autoddl.core.processes import die_with_parent
from autoddl.cost_models import parse_cluster
from autoddl.explain.pipeline_proof import check_pipeline
from autoddl.launch.verify import verify

SCHEDULES = ("1f1b", "zb-h1", "interleaved:2")
LIMIT = 60
"""Processor seconds of a family."""
BUILT = 15
"""Processor seconds in which an instance is built, or it is no small one."""
WAIT = 240.0
"""Seconds for its four ranks."""
LARGEST = 2e7
"""Parameters of a family that is verified, which five processes have in float64."""

CLUSTER = """
name: slow-devices
device: {name: slow, memory: 16 GB, bandwidth: 50 GB/s, peak: {float32: 500 GFLOP/s}}
levels:
  - {name: node, size: 2, bandwidth: 50 GB/s, latency: 2 us}
  - {name: net, size: 2, bandwidth: 25 GB/s, latency: 4 us}
"""

Line = dict[str, Any]


class OutOfTime(BaseException):
    """The processor seconds of a family are used up; no `except Exception` of a library stops it."""


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise OutOfTime("its processor seconds are used up")


def tried(library: str, family: str, model: str, quick: float, stages: int) -> Line:
    """The line of one family, verified where its plan took at most `quick` processor seconds."""
    warnings.simplefilter("ignore")
    line: Line = {"library": library, "family": family, "model": model}
    signal.signal(signal.SIGPROF, _interrupted)
    signal.setitimer(signal.ITIMER_PROF, BUILT)
    try:
        module = built(library, model)
    except (Exception, OutOfTime) as error:  # whatever a library raises
        return {**line, "result": "not built", "cause": _one_line(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    start, plan = time.process_time(), None
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        staged: dict[str, Any] = {"stages": (stages,), "microbatches": (2,), "schedule": SCHEDULES,
                                  "recompute": "search"}
        plan = autoddl.plan(module, parse_cluster(CLUSTER, "slow-devices"), workers=1, **(staged if stages else {}))
        line |= _planned(plan)
        if stages:
            check_pipeline(plan)
    except (Exception, OutOfTime) as error:
        line |= {"result": "refused", "cause": _one_line(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    line["seconds"] = round(time.process_time() - start, 1)
    if plan is not None and line["seconds"] <= quick and sum(p.numel() for p in module.parameters()) <= LARGEST:
        line |= _verified(plan, module, library, model)
    if line["result"] == "refused" and not _runs(module):
        line["result"] = "does not run"
    return line


def _planned(plan: Plan) -> Line:
    share = sum(plan.predicted.fallback.values()) / plan.predicted.seconds
    split = sum(any(str(state).startswith("S") for state in one.layout) for one in plan.stored)
    return {"result": "planned", "gap": round(plan.gap, 6), "operators": sorted(plan.predicted.fallback),
            "share": round(share, 4), "split": split}


def _verified(plan: Plan, module: Any, library: str, model: str) -> Line:
    """Whether four ranks agree with one process, and the larger of both errors; or why nobody knows.

    The ranks are forks of this process, so that a family is captured once more, and not by each of them."""
    one = parted(as_sample(module.example_inputs()), plan.microbatches)
    factory = Factory(str(Path(__file__).with_name("family_models.py")), "built", {"library": library, "model": model})
    try:
        found = verify(plan, factory, timeout=WAIT, captured=capture(module, one))
    except Exception as error:
        return {"verified": _one_line(error)}
    return {"verified": found.passed, "error": max(found.loss_error, found.gradient_error),
            "mismatches": found.collective_mismatches}


def _runs(module: Any) -> bool:
    """Whether the model runs in one process, forward and backward."""
    try:
        module(*module.example_inputs()).backward()
    except Exception:
        return False
    return True


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def lines(wanted: list[tuple[str, str, str]], wall: float, quick: float, stages: int) -> Iterator[Line]:
    """The line of every family, from one process that is replaced when it dies."""
    pool = _pool()
    end = time.monotonic() + wall
    try:
        for one in wanted:
            if time.monotonic() > end:
                break
            try:
                yield pool.submit(tried, *one, quick, stages).result()
            except BrokenProcessPool:
                yield dict(zip(("library", "family", "model"), one, strict=True)) | {"result": "crashed"}
                pool = _pool()
    finally:
        for child in active_children():  # one that is interrupted in the middle of a family would go on
            child.kill()
        pool.shutdown(cancel_futures=True)


def _pool() -> ProcessPoolExecutor:
    """A pool of one forked process, which the kernel ends with this one, however this one ends."""
    return ProcessPoolExecutor(1, get_context("fork"), initializer=die_with_parent)


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


def show_verified(checked: list[Line]) -> None:
    """Print how many verified plans agree with one process, and what is wrong with the others."""
    good = [line for line in checked if line["verified"] is True]
    split, worst = sum(line["split"] > 0 for line in good), max((line["error"] for line in good), default=0.0)
    print(f"\n{len(good)} of {len(checked)} verified plans agree with one process, {split} of them with split "
          f"parameters; the largest error is {worst:.1e}")
    for line in checked:
        if line not in good:
            print(f"{line['library']} {line['family']}: {line['verified']} {line.get('error', '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--libraries", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--wall", type=float, default=float("inf"))
    parser.add_argument("--verify", type=float, default=0.0)
    parser.add_argument("--stages", type=int, default=0)
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
            for line in lines(wanted, asked.wall, asked.verify, asked.stages):
                file.write(json.dumps(line) + "\n")
                file.flush()
                known.append(line)
                print(line["library"], line["family"], line["result"], line.get("seconds", ""),
                      line.get("cause", "")[:100], flush=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{used.ru_utime + used.ru_stime:.0f} processor seconds\n")
    show(known)
    show_verified([line for line in known if "verified" in line])


if __name__ == "__main__":
    main()
