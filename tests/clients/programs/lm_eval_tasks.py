"""lm-evaluation-harness: multiple choice by echoed logprobs, and generation, with tasks of local files."""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url, name = sys.argv[1:]
ROWS = [{"question": f"What is {number}?", "choices": ["a number", "a tree"], "answer": 0} for number in range(4)]
TASK = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}} It is"
output_type: {kind}
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n'
GENERATION = (
    'doc_to_target: "{{choices[answer]}}"\nmetric_list: [{metric: exact_match}]\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}\n'
)
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "rows.jsonl")
    data.write_text("\n".join(map(json.dumps, ROWS)))
    for task, kind, more in (("choice", "multiple_choice", CHOICE), ("text", "generate_until", GENERATION)):
        Path(folder, f"{task}.yaml").write_text(TASK.format(task=task, kind=kind, data=data) + more)
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": Path(name).name, "base_url": f"{url}/completions", "tokenizer": name, "num_concurrent": 2},
        tasks=["choice", "text"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
    )
samples = results["samples"]
print(
    json.dumps(
        {
            "accuracy": results["results"]["choice"]["acc,none"],
            "logprobs": [float(answer[0][0]) for sample in samples["choice"] for answer in sample["resps"]],
            "texts": [sample["resps"][0][0] for sample in samples["text"]],
        }
    )
)
