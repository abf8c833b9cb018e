"""Which layouts an operator may have."""
