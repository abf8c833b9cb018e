"""The layouts that each operator may have: dimension strings, and the table that turns them into options."""
