"""Tries layouts of an operator: pieces of one process against the whole call, forward and backward.

    cases     a call as a graph of one op, with its tensors
    pieces    tensors cut into the pieces of all ranks, and pieces compared with the whole
    trial     runs a call on the pieces of an option, and says what differs
    probe     finds the dims that split of an operator without a rule, by trying them
"""
