"""Reviewed upstream contracts, one TOML file per exact megatron-core version (package data)."""
