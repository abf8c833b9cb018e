"""What programs call a message goes by what makes or reads the tensor, whatever the axes of the mesh are named."""

import zoo

from autoddl.capture.capture import capture
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.operators.message_roles import message_roles
from autoddl.validation.layers import Shape
from autoddl.validation.templates import model_graph


def graph_of(name: str) -> Graph:
    return add_hubs(capture(*getattr(zoo, name)()).graph)


def roles_of(graph: Graph, target: str, k: int = 0) -> set[str]:
    """The roles of what ops of a target read in input k; "" for an edge without one."""
    roles, tensors = message_roles(graph), graph.tensors
    every = (roles.get((tensors[t].name, op.name)) for op in graph.ops if target in op.target
             for t in op.inputs[k:k + 1])
    return {role.name if role else "" for role in every}


def test_products_attention_and_embeddings_are_told_apart_behind_views_and_hubs() -> None:
    graph = graph_of("llama")
    assert roles_of(graph, "scaled_dot_product", 1) == roles_of(graph, "scaled_dot_product", 2) == {"cp"}
    assert "cp" not in roles_of(graph, "scaled_dot_product") | roles_of(graph, "linear"), "queries and outputs stay"
    assert roles_of(graph, "embedding") == {""} and "tp" in roles_of(graph, "linear")
    assert "tp" in roles_of(graph, "autoddl.hub"), "a hub in front of queries, keys and values"


def test_rows_go_to_experts() -> None:
    shape = Shape(64, 4, 4, 128, 256, 4, 32, gated=True, bias=False, experts=4, top_k=2)
    graph = add_hubs(model_graph(shape, 1, "bf16"))
    assert {role.name for role in message_roles(graph).values()} == {"tp", "cp", "ep"}
