"""PaRO: sharding groups for parameters, gradients and optimizer states, and collectives over their grid."""
