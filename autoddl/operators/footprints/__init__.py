"""Says the memory that each operator needs for a moment and keeps for its backward.

    footprint                       one op on a rank's shards, and its memory
    table                           looks up the footprint of an op
    attention, einsum, elementwise, loss, nn      footprints, one file for each kind of operator
    storages, strides               which tensors share memory
"""
