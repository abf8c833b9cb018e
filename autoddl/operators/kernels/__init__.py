"""The code that an operator runs on one rank's shards."""
