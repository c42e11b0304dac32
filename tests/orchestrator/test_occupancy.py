"""How much of the engines' slots a step used, and how long its tail was."""

from headrace.orchestrator.concurrency import Occupancy


def test_slots_are_used_by_episodes_in_flight_and_a_queue_does_not_count():
    occupancy = Occupancy(slots=4)
    occupancy.advance(1.0, in_flight=8, awaits_rollouts=True)
    occupancy.advance(3.0, in_flight=2, awaits_rollouts=True)
    assert occupancy.take_metrics() == {"perf/slots_used": 2.5 / 4.0, "time/tail": 0.0}


def test_the_tail_is_the_time_in_which_a_batch_waits_with_less_than_half_of_the_slots_in_use():
    occupancy = Occupancy(slots=4)
    occupancy.advance(1.0, in_flight=1, awaits_rollouts=True)
    occupancy.advance(2.0, in_flight=1, awaits_rollouts=False)
    occupancy.slots = 2  # an engine is gone
    occupancy.advance(4.0, in_flight=1, awaits_rollouts=True)
    assert occupancy.take_metrics()["time/tail"] == 1.0


def test_a_step_begins_with_nothing_counted():
    occupancy = Occupancy(slots=4)
    occupancy.advance(1.0, in_flight=1, awaits_rollouts=True)
    occupancy.take_metrics()
    assert occupancy.take_metrics() == {"perf/slots_used": 0.0, "time/tail": 0.0}
