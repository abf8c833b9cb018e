"""Writes the plan of a finished search: of the model itself, or of a question that a plan keeps."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from autoddl.core.plan import BUCKET_BYTES, VERSION, Plan
from autoddl.cost_models import Cluster
from autoddl.planner.assemble import assemble, assemble_choice, plan_of
from autoddl.planner.batch_scaling import scaled_sample
from autoddl.planner.bucket_size import fitting_buckets
from autoddl.planner.candidates import Solved, Space
from autoddl.planner.mesh_search import Found, Progress, cut_short, search
from autoddl.planner.microbatch_variants import Variant
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines.pipeline_search import WithoutStages, staged_plan
from autoddl.planner.question import Question, candidates_of, source_of, task_of_question
from autoddl.planner.regular import regular
from autoddl.planner.task import PlanTask

__all__ = ["answer_plan", "finished_plan", "on_cluster"]


def finished_plan(task: PlanTask, found: Found, count: int, options: PlanOptions, one: Variant) -> Plan:
    """The plan of the best of `count` candidates, of few kinds of blocks; `one` is the model with one microbatch."""
    task = replace(task, graph=one.graph, original=one.original, spec=one.spec)
    prints = {"model": task.original.fingerprint(), "cluster": task.cluster.fingerprint, "autoddl": str(VERSION)}

    def draft(solved: Solved) -> Plan:
        if found.interrupted:
            solved = replace(solved, solution=replace(solved.solution, proof=cut_short(solved.solution.proof)))
        made = assemble_choice(solved.pricing, solved.solution.choice, solved.variables)
        return replace(plan_of(made, solved.pricing, solved.solution, dict(task.about) | {
            "bound": min(found.bound, made.predicted.seconds), "budget": task.budget, "candidates": count,
            "sample": dict(task.spec), "fingerprints": prints, "precision": options.precision}), bucket_bytes=1)

    best = found.best if found.interrupted or options.overlap else regular(task, found, draft)
    assemble(best.pricing, best.solution, best.variables)  # whose parts must add up to what the solution claims
    timings = {"capture": task.capture_seconds, "solve": found.seconds, "total": perf_counter() - task.began}
    plan = replace(draft(best), bucket_bytes=BUCKET_BYTES, timings=timings, source=source_of(task, best, options))
    return fitting_buckets(plan, task.graph, options.optimizer, task.cluster)


def answer_plan(question: Question, plan: Plan, progress: Progress | None = None) -> Plan:
    """The plan that answers `question`, which is that of `plan` with something changed.

    The model's name and factory are those of `plan`. Raises Infeasible where no plan fits.
    """
    about = {"model": plan.model, "factory": dict(plan.factory)}
    task, stages = replace(task_of_question(question), about=about), question.options.stages

    def plain(task: PlanTask, progress: Progress | None) -> WithoutStages:
        candidates = candidates_of(question.asking(stages=(1,), cut=()))
        found = search(task, candidates, progress)
        one, count = task.variant(found.best.pricing.microbatches), len(candidates)
        return WithoutStages.of(found, count, lambda: finished_plan(task, found, count, task.options, one))

    best = plain(task, progress).draw() if stages == (1,) else \
        staged_plan(task, plain if 1 in stages else None, progress)
    return replace(best, sample=scaled_sample(plan.sample, plan.microbatches, best.microbatches))


def on_cluster(plan: Plan, space: Space, choice: Sequence[int], cluster: Cluster) -> Plan:
    """The plan of a choice in a space, of which `plan` was made, priced on another cluster of the same levels."""
    made = assemble_choice(replace(space.pricing, cluster=cluster), choice, space.variables)
    return replace(plan, decisions=made.decisions, conversions=made.conversions, stored=made.stored,
                   inputs=made.inputs, predicted=replace(made.predicted, nbytes=plan.predicted.nbytes))
