"""Tables and lines of text that the shell prints; no verb is here, and nothing is computed but their form.

    table_style                            columns and legends
    plan_tables, assumption_rows           a plan, with what it assumes
    pipeline_tables, pipeline_text         a plan with stages, and a drawn schedule
    pipeline_outcomes                      what became of every pipeline that was weighed
    answer_tables                          answers about a plan
    own_rules_text                         rules of the user's own
    network_prices                         what networks cost
    validation_tables                      published runs

May import what the shell may, but for its verbs.
"""
