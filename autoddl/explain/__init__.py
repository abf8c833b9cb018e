"""Questions about a plan, a model or a run, answered as values."""
