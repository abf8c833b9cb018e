"""Draws a plan as one page of HTML that needs no network: values that exist, and nothing computed twice.

Reading order:

    facts          everything that the page shows, as one value
    html           elements; `datum` writes a number with the value that it stands for and where that comes from
    charts         bars over seconds, areas over seconds, points
    opening        who pays: step, speed, devices, bound; what each axis splits on a picture of the ranks
    step           time line, memory, seconds by level and kind
    decisions      layouts, alternatives, the front, what one per cent is worth
    measured       the record beside the prediction
    document       the whole page, with its style and script

May import what the shell may.
"""
