"""Ranks on this machine, on shaped links: run, verify, rehearse."""
