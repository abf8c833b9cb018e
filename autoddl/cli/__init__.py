"""Defines the shell: every verb parses its arguments, calls one function, and prints.

Read in this order:

    main                 the table of verbs, and the exit code of every error
    options              `PlanOptions` as shell options
    verbs                plan, show, compare, run, verify; every other verb has a file of its name
    *_tables, picture    the tables and pictures that verbs print or draw
    machine              doctor and init
    page                 the page of `report`

To add a verb, write a function in a file of its name, and add a row to `main.VERBS`. May import everything.
"""
