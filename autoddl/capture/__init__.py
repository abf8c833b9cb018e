"""Turns a module and an example batch into a graph."""
