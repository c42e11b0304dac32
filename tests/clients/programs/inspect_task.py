"""inspect-ai: a task of three samples, generated and scored."""

import json
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.util import json_schema
from pydantic import BaseModel


class Answer(BaseModel):
    yes: bool


url, name = sys.argv[1:]
schema = ResponseSchema(name="answer", json_schema=json_schema(Answer))
config = GenerateConfig(max_tokens=512, temperature=1.0, response_schema=schema)
model = get_model(f"openai-api/headrace/{name}", base_url=url, api_key="none", config=config)
task = Task(dataset=[Sample(input="Hello", target="yes") for _ in range(3)], solver=generate(), scorer=includes())
with tempfile.TemporaryDirectory() as folder:
    [log] = eval(task, model=model, log_dir=folder, display="none")
    answers = [json.loads(sample.output.completion) for sample in log.samples]  # read from the log
accuracy = log.results.scores[0].metrics["accuracy"].value
print(json.dumps({"status": log.status, "accuracy": accuracy, "answers": answers}))
