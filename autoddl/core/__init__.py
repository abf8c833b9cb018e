"""The values that every stage hands on, and their text forms."""
