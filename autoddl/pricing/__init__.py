"""Prices every choice of layouts: a graph on a mesh of a cluster becomes a cost network.

Reading order:

    space, choices          the variables (an op or a parameter each) and the layouts that each may take
    price                   seconds of kernels, of one step of a conversion, of an optimizer's state
    routes, shortest_paths  the cheapest steps between any two layouts of a tensor
    edge_tables             seconds of every pair of choices that meet
    lifetimes               what lives at every moment of a step: the rows that a budget is proved by
    byte_rows               bytes of what lives, for every choice
    build_problem           all of it as tables: `network_of`, `CostNetwork.problem`

Others use `build_problem`, `price.Pricing` and `space.variables`. May import `operators`, `cost_models` and `core`; no
torch.
"""
