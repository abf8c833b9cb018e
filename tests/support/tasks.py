"""Small models as planning tasks."""

from dataclasses import replace
from functools import lru_cache
from time import perf_counter

import tiny
import zoo
from torch import nn

from autoddl.capture.capture import capture
from autoddl.core.graph import Graph
from autoddl.core.hubs import planned
from autoddl.cost_models import Cluster
from autoddl.planner.task import Task


@lru_cache
def graph_of(name: str) -> Graph:
    models: dict[str, tuple[nn.Module, object]] = {
        "tiny": (tiny.tiny(1), None), "deep": (tiny.tiny(3), None), "gpt": zoo.gpt(1), "llama": zoo.llama(1),
        "vgg": zoo.vgg_bn(), "resnet": zoo.resnet()}
    return capture(*models[name]).graph


def task_of(name: str, place: Cluster, budget: float = 1e12, **more: object) -> Task:
    graph = graph_of(name)
    task = Task(planned(graph), graph, {}, place, budget, "adamw", "exact", 1e-3, None, {}, 0.0, perf_counter())
    return replace(task, **more)  # type: ignore[arg-type]
