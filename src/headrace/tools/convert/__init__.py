"""Run files of other systems, translated: prime-rl's TOML, and TRL's GRPOConfig as JSON, YAML or a training script."""
