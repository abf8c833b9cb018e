"""Fits the constants of a machine to measured runs, and says which runs to measure next.

    ran_plans        plans that ran, with their records
    prices           the seconds of a run as a plan, and what each constant of a profile does to them
    least_squares    the constants that explain measured seconds best, how sure they are, and what is left out
    experiments      the runs that would most narrow the choice between two plans
    parts            the plans to choose between, and the parts of the cluster to run on
    calibrate        a table of runs -> a profile, with its errors before and after
"""
