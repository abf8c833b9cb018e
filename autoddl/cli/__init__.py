"""Defines the shell: every verb parses its arguments, calls one function, and prints.

Read in this order:

    start                the program: fixed hashes, then `main`
    main                 the table of verbs, and the exit code of every error
    options              `PlanOptions` as shell options
    verbs                plan, show, compare, run, verify; every other verb has a file of its name
    tables               the tables and lines that verbs print
    machine              doctor and init
    page                 what is drawn of a plan: the page of `report`, the pictures and traces of `draw`

To add a verb, write a function in a file of its name, and add a row to `main.VERBS`. May import everything.
"""
