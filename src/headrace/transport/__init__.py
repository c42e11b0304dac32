"""The files of a run directory: how processes exchange data, and what is left of a run.

    path                          content                                                 module
    config.toml                   the complete run file                                   launch/saved_config.py
    code_folders.json             folders of the user's code, for resuming                launch/own_code.py
    platform.json                 versions, device and threads of the trainer             transport/platform.py
    journal-E.sqlite              the state of every draw; the newest epoch E counts      transport/journal.py
    batches/step-N.safetensors    training batches, orchestrator to trainer               transport/batches.py
    weights/v-INC-STEP/           published weights, trainer to engines                   transport/weights.py
      tensors.json                  manifest of weights that stay in the trainer's memory transport/weights_link.py
      adapter_config.json           of a published LoRA adapter                           transport/adapter.py
    weights/acknowledged.json     the version that all engines sample from                transport/weights.py
    probes/v-INC-STEP.safetensors sequences with trainer logprobs, to measure drift       transport/batches.py
    endpoints/NAME.NONCE.json     addresses and keys of inference servers                 transport/endpoint.py
    driver.json                   address and key of the run's driver, while it runs      launch/driver.py
    .canary-NONCE/                test that all hosts share the directory, while it runs  transport/shared_directory.py
    rollouts/step-N.parquet       rollouts of a step, also eval-step-N.parquet            transport/rollout_files.py
    tokens/step-N/                token tables of selected steps                          transport/run_dir.py
    checkpoints/step-N/           trainer checkpoints                                     trainer/checkpoint.py
    reference/                    logprobs of a DPO run's data under its start model      trainer/dpo.py
    model/                        the final model                                         trainer/model.py
    turns/                        the lock of a device shared by trainer and engine       transport/lock.py
    epochs/ROLE/E.json            epochs of launcher, orchestrator, trainer; their leases transport/epochs.py
    .drafts/ROLE-E-NONCE/         what an epoch writes, before it gets its final name     transport/epochs.py
    status/                       state of each process, for the terminal view            observe/status.py
    metrics.jsonl                 metrics of all processes                                observe/metrics.py
    metrics/PROCESS.NONCE.jsonl   the same on several hosts, until they are collected     observe/metrics.py
    monitors/                     positions up to which monitors have read                observe/monitors.py
    prometheus/targets/NAME.json  address of a process's metrics, for file_sd_configs     observe/prometheus.py
    prometheus/dashboard.json     a Grafana dashboard of these metrics                    observe/grafana.py
    heartbeat.json                last sign of life of the run                            launch/heartbeat.py
    logs/                         log file of each process                                launch/supervisor.py
    summary.md, reward.svg        summary of the run                                      observe/summary.py

`run_dir.py` has the paths, `files.py` atomic writes, `digests.py` digests, `verification.py` the check of all of them.
"""
