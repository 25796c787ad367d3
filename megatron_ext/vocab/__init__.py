"""Vocabulary parallelism: the embedding and the output layer, shared out to all pipeline ranks."""
