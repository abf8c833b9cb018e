"""Prices every choice of layouts: a graph on a mesh of a cluster becomes a cost network.

Reading order:

    space, choices          the variables (an op or a parameter each) and the layouts that each may take
    price, optimizers       seconds of one step of a conversion, of an optimizer's update, and how often each counts
    kernel_prices, floors   seconds of an op's kernels; what no plan is below
    routes, shortest_paths  the cheapest steps between any two layouts of a tensor; `sparse_routes` those of a gradient
                            that end with a sparse sum
    edge_tables             seconds of every pair of choices that meet; `choice_classes` groups equal ones
    edges, entries          the edges between variables; seconds of every variable and every edge over all choices
    lifetimes               from which moment to which memory is in use: the rows by which a budget's bound is proved
    step_lifetimes          the terms of a step (`step_terms`): of `parameter_terms`, `storage_terms` and
                            `gradient_terms`
    byte_rows               the bytes of those rows, for every choice
    build_problem           all of it as tables: `network_of`, `CostNetwork.problem`
    kept_tensors            the same, where hubs say whether their tensor is kept: rows closer to the memory line

Others use `build_problem`, `price.Pricing` and `space.variables`. May import `operators`, `cost_models` and `core`; no
torch.
"""
