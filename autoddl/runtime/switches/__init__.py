"""Adds up tensors in the network: what a switch that reduces does, and how a rank asks it to.

Reading order:

    frames        what is said on a connection, as bytes
    sums          adds up blocks, in the order of the children
    round         one sum of one group in one switch: blocks that arrive, and sums that leave
    sparse        the same for sparse vectors: indices and values, of which the union leaves
    aggregator    a switch as a process: serves all groups, and asks the switch above
    offered       the switches that a launcher offers to its ranks, and the way of a group through them
    client        a rank's connection to its switch

No plan, no mesh and no torch: `collectives.transport` sends by `client`, `launch.switches` starts an `aggregator`.
"""
