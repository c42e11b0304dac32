"""The smallest run file, for commands that read one."""

RUN_FILE = """
output_dir = "{output}"
max_steps = 3
seq_len = 64
[model]
name = "{model}"
[[orchestrator.train.env]]
id = "reverse-text"
"""
