"""SFT inside a run: the teacher's tokens, by cross-entropy."""

from headrace.algorithms.sft import Sft
from headrace.orchestrator.filters import has_no_advantage
from headrace.rollout.routing import route_actions
from tests.algorithms.teachers import rollout_of, set_up, survivors


async def test_what_the_teacher_sampled_is_trained_by_ce_alone_with_weight_one():
    algorithm = await set_up(Sft())
    group = survivors([rollout_of([1, 2], [3], one_sample=True, reward=reward) for reward in (1.0, 0.0)])
    for view in group:
        await algorithm.score_rollout(view)
    await algorithm.score_group(group)
    await algorithm.score_batch(group)
    for view in group:
        [sample] = view.samples
        assert sample.streams == {}  # no credit, whatever the rewards
        route_actions(sample, algorithm.action_loss_type)
        assert sample.streams["ce_weights"].tolist() == [0, 1, 1, 0, 1]
        assert sample.streams["rl_weights"].tolist() == [0] * 5
        assert not has_no_advantage(view.rollout)
        assert not view.drop_reason


def test_it_trains_with_ce_and_its_teacher_plays_instead_of_scoring():
    assert (Sft.action_loss_type, Sft.model_role) == ("ce", "")
