"""A plan on real tensors: one rank."""
