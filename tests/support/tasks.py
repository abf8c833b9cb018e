"""Small models as planning tasks."""

from dataclasses import replace
from functools import lru_cache
from time import perf_counter

import tiny
import zoo
from torch import nn

from autoddl.capture.capture import capture
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.cost_models import Cluster
from autoddl.planner.options import PlanOptions
from autoddl.planner.task import PlanTask


@lru_cache
def graph_of(name: str) -> Graph:
    models: dict[str, tuple[nn.Module, object]] = {
        "bare": (tiny.tiny(0), None), "tiny": (tiny.tiny(1), None), "deep": (tiny.tiny(3), None),
        "gpt": zoo.gpt(1), "llama": zoo.llama(1), "vgg": zoo.vgg_bn(), "resnet": zoo.resnet()}
    return capture(*models[name]).graph


def task_of(name: str, place: Cluster, budget: float = 1e12, **options: object) -> PlanTask:
    graph, chosen = graph_of(name), PlanOptions(**options)  # type: ignore[arg-type]
    return PlanTask(add_hubs(graph), graph, {}, place, budget, chosen, {}, 0.0, perf_counter())


def with_options(task: PlanTask, **options: object) -> PlanTask:
    return replace(task, options=replace(task.options, **options))  # type: ignore[arg-type]
