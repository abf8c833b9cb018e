"""One step of a plan as values: what is sent, when, and what is held."""
