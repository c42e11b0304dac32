"""An algorithm whose state depends on every group that it has credited, and on their order."""

from headrace.algorithms.base import Algorithm


class RunningBaseline(Algorithm):
    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.baselines: dict[str, float] = {}

    async def score_group(self, group):
        for rollout in group:
            agent = rollout.rollout.agent
            before = self.baselines.get(agent, 0.0)
            rollout.assign_advantages(rollout.reward - before)
            self.baselines[agent] = self.decay * before + (1 - self.decay) * rollout.reward

    def state(self):
        return self.baselines

    def load_state(self, state):
        self.baselines = state
