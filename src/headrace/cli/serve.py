"""`headrace serve`: serve a model over HTTP, or the model of a run."""

from __future__ import annotations

import argparse
import os
import shlex
from functools import partial
from pathlib import Path

from headrace.cli.common import RUN_FILES
from headrace.cli.processes import bytes_per_parameter, process
from headrace.config.base import Tree
from headrace.config.inference import InferenceConfig
from headrace.errors import BadInput
from headrace.inference.embedded.backend import EngineProcess
from headrace.inference.keys import read_keys_file
from headrace.inference.memory import ColocatedTrainer
from headrace.inference.model_shape import TESTED_FIX, VLLM_FIX, decoder_obstacle, embedded_obstacle
from headrace.launch.process import stop_with_launcher
from headrace.launch.processes import servers_at_least
from headrace.launch.run_directory import in_use, is_run
from headrace.launch.saved_config import read_run, read_sampled_run
from headrace.machine import frozen_imports, keep_compiled_kernels
from headrace.observe.prometheus import exporting
from headrace.observe.status import setup_logging
from headrace.observe.tracing import tracing
from headrace.runfile.reading import parse_overrides, put, validate
from headrace.runfile.run import RunConfig
from headrace.text import import_renderers
from headrace.text.hub import model_directory, read_settings
from headrace.transport.adapter import is_adapter
from headrace.transport.run_dir import RunDir
from headrace.transport.weights_link import is_linked

PORT = 8000
HELP = f"""\
Any key of [inference] can be set: --port N (default {PORT}, or any free port as a server of a run), --host,
--max_running, --served_name, --engine vllm (which must be installed), --vllm.tensor_parallel_size N, ...

Routes: /v1/models, /v1/chat/completions, /v1/responses, /v1/completions, /inference/v1/generate (token ids in and out),
/tokenize, /health, /metrics.

Keys are read from environment variables. HEADRACE_API_KEY: the clients' key, required if other machines can reach the
address. HEADRACE_ADMIN_KEY: for requests that change what is served (weights, adapters); without it, a server outside a
run refuses them. --http.keys_file FILE replaces both variables, and may change while the server runs.

If RUN has ended, its newest weights are served. If it has not, the server joins the run as one of its servers; with
--alone it serves the current weights independently of the run.
"""


def configure_serve(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", metavar="MODEL|RUN", help="a model directory or hub name; a run directory")
    parser.add_argument("--name", help="the name of this server in its run (default inference)")
    parser.add_argument("--alone", action="store_true", help="serve a run's newest weights, not as one of its servers")
    parser.add_argument(
        "--sharing", choices=("alternate", "overlap"), help="the run's trainer is on the same device: in turns, or not"
    )
    parser.epilog = HELP


def run_serve(arguments: argparse.Namespace) -> int:
    alone = arguments.alone or (arguments.name is None and is_over(Path(arguments.target)))
    config = read_target(arguments.target, arguments.overrides, alone=alone)
    run = None if config.output_dir is None else RunDir(config.output_dir)
    keep_compiled_kernels()
    engine = EngineProcess() if config.engine == "embedded" else None
    with frozen_imports():  # takes seconds: after the arguments were checked
        import_renderers()
        from headrace.inference.server.main import serve

    if run is None or alone:
        setup_logging()
        stop_with_launcher()
        key_var = config.api_key_var if os.environ.get(config.api_key_var) else None
        if config.http.keys_file is not None:
            key_var = "KEY" if read_keys_file(config.http.keys_file).api else None

        def announce(url: str) -> None:
            print(greeting(url, key_var), flush=True)

        serve(config, status=None, run=run, announce=announce, engine=engine)
        return 0
    with process(arguments.name or "inference", run) as status:
        shared = colocated_trainer(Path(arguments.target), run, arguments.sharing) if arguments.sharing else None
        of_run = read_sampled_run(Path(arguments.target))
        export = partial(exporting, of_run.prometheus, run, status.current.process)
        with tracing(of_run.otel, run, status.current.process):
            serve(config, status=status, run=run, shared=shared, engine=engine, export=export)
    return 0


def colocated_trainer(target: Path, run: RunDir, sharing: str) -> ColocatedTrainer:
    """Describe the trainer that shares the device with a server of a run."""
    config = read_sampled_run(target)
    trainer = config.trainer if isinstance(config, RunConfig) else config
    alternates = sharing == "alternate"
    return ColocatedTrainer(
        run.device_lock if alternates else None,
        bytes_per_parameter(trainer, while_training=not alternates),
        servers_at_least(config),
    )


def is_over(target: Path) -> bool:
    """Return whether this is a finished run that no process is continuing."""
    run = RunDir(target)
    return is_run(target) and (run.final_model.is_dir() or run.final_adapter.is_dir()) and not in_use(target)


def read_target(target: str, overrides: list[str], *, alone: bool = False) -> InferenceConfig:
    """Return the configuration of a server of a run, or of a model on the default port."""
    path = Path(target)
    tree: Tree
    if path.suffix in RUN_FILES or (path / "config.toml").is_file():
        tree = _server_of_run(path, alone).model_dump(mode="json", exclude_none=True)
        if alone:
            tree = {"served_name": target, **tree, "port": tree["port"] or PORT}
    else:
        model_directory(target, "MODEL|RUN")  # raises if the model does not exist
        tree = {"model": {"name": target}, "port": PORT}
    for key, value in parse_overrides(overrides):
        put(tree, key, value)
    config = validate(InferenceConfig, tree, target)[0]
    if config.model.name is not None:
        settings = read_settings(model_directory(config.model.name) / "config.json")
        refused = partial(BadInput, key="model.name", value=config.model.name)
        if (obstacle := decoder_obstacle(settings)) is not None:
            raise refused(obstacle, fix=TESTED_FIX)
        if config.engine == "embedded" and (obstacle := embedded_obstacle(settings)) is not None:
            raise refused(obstacle, fix=VLLM_FIX)
    return config


def _server_of_run(path: Path, alone: bool) -> InferenceConfig:
    config = read_run(path) if alone else read_sampled_run(path)
    server = config.inference if isinstance(config, RunConfig) else config.server()
    if not alone or server.output_dir is None:
        return server
    start = starting_model(RunDir(server.output_dir), server.model.name)
    return server.model_copy(update={"model": server.model.model_copy(update={"name": start})})


def starting_model(run: RunDir, base: str | None) -> str | None:
    """Return the model to load before the newest published version: the final model if there is one.

    If an adapter was published, it is the `base` model that the adapter belongs to.
    """
    lasting = [path for path in map(run.weights.path, run.weights.published()) if not is_linked(path)]
    if run.final_model.is_dir() and not (lasting and is_adapter(lasting[-1])):
        return str(run.final_model)
    if not lasting and run.latest_checkpoint_step() and not in_use(run.root):  # the trainer of a running run has them
        fact = "the run was stopped, and only its checkpoints have its weights"
        raise BadInput(fact, file=run.root, fix=f"Write a model with `headrace export {run.root} DIR`, and serve DIR.")
    return base


def greeting(url: str, key_var: str | None) -> str:
    """Return how to call the server; `key_var` is the variable with its key, if it requires one."""
    key = f' -H "Authorization: Bearer ${key_var}"' if key_var else ""
    body = shlex.quote('{"messages": [{"role": "user", "content": "Hello"}]}')
    return (
        f"serving on {url}/v1; try\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {body}\n"
        f"  headrace chat {url}"
    )
