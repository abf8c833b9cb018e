"""Windows of labels under several multipliers, against every choice of small problems."""

import math
from itertools import product

import numpy as np
from random_problems import random_problem

from autoddl.search.exact import build_space
from autoddl.search.limits import Clock
from autoddl.search.relaxations import Space
from autoddl.search.window import priced, search_window

ALL = 1 << 15
"""More labels than these problems have."""

LAMS = ((1.0,), (1.0, 1.1, 0.9, 1.4, 0.7), (0.02, 3.0, 0.5))
"""Multipliers in seconds a byte."""

FEW = 300
"""Choices of a problem that are looked at one by one."""


def check(space: Space, lams: tuple[float, ...], cap: float, best: float) -> int:
    """Windows below and above the fastest choice within the cap; how many of them hold none."""
    tau, empty = space.thresholds[-1], 0
    messages = priced(space, lams, tau, cap)
    least = float(messages.bounds[0])
    assert (messages.bounds <= best + 1e-9).all()
    for window in (0.5 * (best - least), best - least + 1e-9, 2 * (best - least) + 1):
        found = search_window(space, messages, tau, cap, window, ALL, 0.5, Clock(None, math.inf))
        assert found.complete
        if found.choice is None:
            assert least + window < best + 1e-9
            empty += 1
            continue
        point = space.measured(lams[0], least, found.choice)
        assert point.retained <= cap + 1e-9 and point.seconds >= best - 1e-9
        assert point.seconds <= best + 1e-9 or least + window < best
    return empty


def test_a_window_has_the_fastest_choice_that_takes_no_more_than_it_says() -> None:
    """What is found is the fastest, and nothing is found only where nothing is there."""
    done = empty = 0
    for seed in range(45):
        problem = random_problem(seed).within(None)
        if math.prod(problem.sizes) > FEW:
            continue
        totals = [problem.totals(choice) for choice in product(*map(range, problem.sizes))]
        allowed = [nbytes for seconds, nbytes, _ in totals if seconds < math.inf]
        space = build_space(problem)
        if not allowed or not space.program.exact:
            continue
        share = float(np.random.default_rng(seed).random())
        cap = min(allowed) + share * (max(allowed) - min(allowed)) + 1e-9
        best = min(seconds for seconds, nbytes, _ in totals if nbytes <= cap) - problem.fixed_seconds
        empty += sum(check(space, lams, cap, best) for lams in LAMS)
        done += 1
    assert done > 20 and empty > 0
