"""The shell: every verb parses its arguments, calls one function, and prints.

Reading order: `main` (the table of verbs, errors to exit codes), `options` (`PlanOptions` as shell options), `verbs`
(plan, show, compare, run, verify), a file for each further verb, and `*_tables` and `picture` (what is printed or
drawn).

To add a verb: a function in a file of its name, and a row of `main.VERBS`. May import everything.
"""
