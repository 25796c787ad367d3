"""WallFacer: context-parallel attention in several concentric rings, which sends less than one ring does."""
