"""Weight sync: what changed in a model's weights, for receivers that have the old ones."""
