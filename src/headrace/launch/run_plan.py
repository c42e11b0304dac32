"""The processes of a run on its hosts, placed again when hosts are lost or servers are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.config.sft import OfflineConfig
from headrace.launch.hosts.base import Host, ProcessSpec
from headrace.launch.placement import Place, place
from headrace.launch.processes import needs_of, processes_of
from headrace.launch.replacement import place_again, scale
from headrace.runfile.run import RunConfig
from headrace.transport.journal_files import HOSTS_VAR
from headrace.transport.run_dir import RunDir


class RunPlan:
    """Implements `fleet.Plan`. `env`: environment variables of all processes."""

    def __init__(
        self,
        config: RunConfig | OfflineConfig,
        run: RunDir,
        hosts: Sequence[Host],
        *,
        resume: bool,
        max_running: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._config, self._run, self._env = config, run, env or {}
        self._resume, self._max_running = resume, max_running
        self._needs = needs_of(config)
        self.placement = place(hosts, self._needs)

    def specs(self) -> list[ProcessSpec]:
        specs = processes_of(
            self._config, self._run, self.placement, resume=self._resume, max_running=self._max_running
        )
        env = {**self._env, HOSTS_VAR: str(len(self.placement.hosts))}
        return [replace(spec, env={**env, **spec.env}) for spec in specs]

    def move(self, hosts: Sequence[Host]) -> list[ProcessSpec]:
        self.placement = place_again(self.placement, hosts, self._needs)
        return self.specs()

    def scale(self, hosts: Sequence[Host], servers: int, may_wait: bool) -> list[ProcessSpec]:
        self.placement = scale(self.placement, hosts, self._needs, servers, may_wait)
        return self.specs()

    @property
    def left_out(self) -> Sequence[Place]:
        return self.placement.left_out
