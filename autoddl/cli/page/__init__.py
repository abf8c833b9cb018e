"""Draws a plan: as one page of HTML that needs no network, as pictures, and as a trace. All show values that exist.

Reading order:

    facts          everything that the page shows, as one value
    html           elements; `datum` writes a number with the value that it stands for and where that comes from
    charts         bars over seconds, areas over seconds, points
    opening        who pays: step, speed, devices, bound; what each axis splits on a picture of the ranks
    step           time line, memory, seconds by level and kind
    decisions      layouts, alternatives, the front, what one per cent is worth
    measured       the record beside the prediction
    document       the whole page, with its style and script

    picture, pipeline_picture    by matplotlib, with stages or without
    perfetto                     for https://ui.perfetto.dev

May import what the shell may, but for its verbs.
"""
