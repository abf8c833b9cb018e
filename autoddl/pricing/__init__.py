"""Prices every choice of layouts: a graph on a mesh of a cluster becomes a problem."""
