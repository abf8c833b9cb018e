"""Makes the rows of bytes of a bound under a budget again, from the layouts of a plan alone.

Reading order:

    memory_rows        a row, checked against these bytes and against the memory line
    row_bytes          the bytes of a rank at every moment
    rank_spans         spans of moments with their bytes, by storage: of `parameter_spans`, `storage_spans` and
                       `gradient_spans`

May import `schedule`, `operators`, `cost_models` and `core`; of `pricing` the optimizers alone, so that nothing is
checked against itself.
"""
