"""Proves bounds without the solver."""
