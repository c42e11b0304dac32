"""The hosts of a run behind one interface (`base`): this machine, hosts with a node agent, SLURM, Ray."""
