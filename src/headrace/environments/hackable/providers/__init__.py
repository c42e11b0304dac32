"""Data providers that ship: one file per provider or family, discovered by the registry."""
