"""Several data providers as one: order, shares, and the preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.environments.arguments import BadArgument
from headrace.environments.hackable import TrainingSample, build_data_provider
from headrace.environments.hackable.providers import interleave
from headrace.rollout.digest import fingerprint

DATA = Path(__file__).parents[2] / "data"
GSM8K, MATH = str(DATA / "gsm8k"), str(DATA / "math")


def samples(provider: str, seed: int = 0, /, **kwargs: Any) -> list[TrainingSample]:
    return list(build_data_provider(provider, kwargs, seed))


def sums(count: int, operation: str = "+", **more: Any) -> dict[str, Any]:
    return {"provider": "arithmetic", "kwargs": {"num_tasks": count, "operations": operation}, **more}


def operations_in(found: list[TrainingSample]) -> str:
    """Which provider each sample is of: they differ in their operation."""
    return "".join("+" if "+" in sample.info["question"] else "*" for sample in found)


def test_interleaving_keeps_each_order_and_spreads_both_evenly():
    assert "".join(interleave("ab", "123456")) == "1a234b56"


def test_the_preset_gives_the_samples_that_it_gave_before_it_was_one():
    recorded = [
        (0, {}, "139f4a1873da0de168066019f4b0cf2d"),
        (1, {}, "0ea72ed3588009f06142f4b8f66ff624"),
        (0, {"levels": [2, 5], "limit": 30}, "6c168468022653cac08658a6ec9eb41e"),
    ]
    for seed, kwargs, digest in recorded:
        found = samples("gsm8k_math_curriculum", seed, gsm8k_source=GSM8K, math_source=MATH, split="test", **kwargs)
        assert fingerprint([[sample.prompt, sample.answer, sample.info] for sample in found]).digest == digest
    assert [sample.key for sample in found[:3]] == ["004c7c57d756cd79", "2cfea61abe179e7d", "729d472a97228fce"]


def test_the_preset_has_both_data_sets_and_gets_harder():
    found = samples("gsm8k_math_curriculum", gsm8k_source=GSM8K, math_source=MATH, split="test")
    sources = [sample.info["source"] for sample in found]
    assert (sources.count("gsm8k"), sources.count("math")) == (50, 50)
    assert sources[:4] == ["gsm8k", "math", "gsm8k", "math"]
    levels = [sample.info["level"] for sample in found if sample.info["source"] == "math"]
    assert levels == sorted(levels)


def test_an_order_is_one_after_another_or_spread_or_shuffled():
    parts = [sums(4), sums(4, "*")]
    orders = {order: samples("curriculum", providers=parts, order=order) for order in ("sequential", "shuffled")}
    assert operations_in(orders["sequential"]) == "++++****"
    assert operations_in(samples("curriculum", providers=parts)) == "+*+*+*+*"
    assert operations_in(samples("curriculum", providers=parts, limit=3)) == "+*+"
    assert orders["shuffled"] != orders["sequential"]
    assert {sample.key for sample in orders["shuffled"]} == {sample.key for sample in orders["sequential"]}
    assert samples("curriculum", providers=parts, order="shuffled") == orders["shuffled"]
    assert samples("curriculum", 1, providers=parts, order="shuffled") != orders["shuffled"]


def test_shares_cut_down_the_provider_that_has_too_many_and_repeat_nothing():
    found = samples("curriculum", providers=[sums(6, share=3), sums(40, "*", share=1)], order="sequential")
    assert operations_in(found) == "++++++**"
    assert len({sample.key for sample in found}) == 8


def test_an_example_that_several_providers_have_is_taken_from_the_first(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "own"}\n{"question": "both"}\n')
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "both", "level": 1}\n{"question": "new"}\n')
    parts = [{"provider": "local", "kwargs": {"path": str(file)}} for file in (path, other)]
    found = samples("curriculum", providers=parts, order="sequential", instructions="")
    assert [(sample.prompt, sample.info.get("level")) for sample in found] == [
        ("own", None),
        ("both", None),
        ("new", None),
    ]


def test_a_provider_is_sorted_by_an_entry_of_info_and_unknown_values_come_first(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = ('{"question": "b", "level": 2}', '{"question": "c", "level": null}', '{"question": "a", "level": 1}')
    path.write_text("\n".join(rows))
    parts = [{"provider": "local", "kwargs": {"path": str(path)}, "order_by": "level"}]
    found = samples("curriculum", providers=parts, instructions="")
    assert [sample.prompt for sample in found] == ["c", "a", "b"]
    assert {sample.info["source"] for sample in found} == {"local"}


def test_words_and_tags_are_handed_to_every_provider_that_sets_none():
    own = sums(1)
    own["kwargs"]["instructions"] = "Be quick."
    first, second = samples("curriculum", providers=[sums(1, "*"), own], instructions="", tags=["<a>", "</a>"])
    assert first.prompt == first.info["question"]
    assert second.prompt.startswith("Be quick.")
    assert first.info["tags"] == second.info["tags"] == ["<a>", "</a>"]


@pytest.mark.parametrize(
    ("kwargs", "key", "value"),
    [
        ({"providers": []}, "providers", []),
        ({"providers": "gsm8k"}, "providers", "gsm8k"),
        ({"providers": [{"kwargs": {}}]}, "providers.0", {"kwargs": {}}),
        ({"providers": [sums(1), {"provider": "math", "shares": 1}]}, "providers.1", {"provider": "math", "shares": 1}),
        ({"providers": [sums(1, share=0)]}, "providers.0.share", 0),
        ({"providers": [sums(1, share=1), sums(1)]}, "providers.1.share", None),
    ],
)
def test_a_part_that_cannot_be_used_is_named(kwargs: dict[str, Any], key: str, value: Any):
    with pytest.raises(BadArgument) as error:
        samples("curriculum", **kwargs)
    assert (error.value.key, error.value.value) == (key, value)
