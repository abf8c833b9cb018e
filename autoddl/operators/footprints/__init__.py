"""The memory that each operator needs for a moment and keeps for its backward."""
