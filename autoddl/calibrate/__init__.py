"""Times this machine into a cluster file."""
