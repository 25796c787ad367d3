"""3-D linear partitioning: tensor parallelism on a grid of three axes."""
