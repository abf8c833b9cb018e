"""From a question to the best plan, and from a plan back to its question."""
