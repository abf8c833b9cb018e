"""Published runs against predictions."""
