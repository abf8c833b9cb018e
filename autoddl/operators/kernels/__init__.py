"""What an operator runs on the pieces of one rank."""
