"""Every page of `headrace view` over recorded runs, in a browser."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import headrace
from tests.view.conftest import Browsing

pytestmark = pytest.mark.view


def test_the_runs_of_a_folder_are_listed_sorted_and_filtered(browsing: Browsing):
    page = browsing.page
    names = page.locator("tbody tr td:nth-child(2)")
    assert {"rl", "hackable", "sft"} <= set(names.all_inner_texts())
    page.get_by_role("button", name="run", exact=True).click()
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("run")
    assert names.all_inner_texts() == sorted(names.all_inner_texts(), key=str.lower)
    page.get_by_role("button", name="run", exact=True).click()
    assert page.locator("th[aria-sort=descending]").count() == 1
    page.get_by_label("filter").fill("hackable")
    assert names.all_inner_texts() == ["hackable"]
    assert page.locator("svg.spark polyline").count() == 1


def test_a_runs_charts_share_crosshair_zoom_smoothing_and_scale(browsing: Browsing):
    page = browsing.page
    browsing.go("run", browsing.run_id("rl"))
    page.wait_for_selector(".chart canvas")
    assert page.locator(".chart canvas").count() >= 2
    first = page.locator(".chart .u-over").first
    first.hover()
    browsing.wait("[...document.querySelectorAll('figcaption span')].filter(s => s.textContent).length >= 2")
    page.get_by_label("log scale").check()
    page.get_by_label("smoothing").fill("0.6")
    first.wait_for()  # another scale draws the charts again
    box = first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 30, steps=4)
    page.mouse.up()
    reset = page.get_by_role("button", name="all steps")
    reset.click()  # waits until it is enabled
    assert reset.is_disabled()
    assert "Where the time went" in browsing.text()


def test_a_step_leads_to_its_groups_and_rollouts(browsing: Browsing):
    page, run = browsing.page, browsing.run_id("rl")
    browsing.go("run", run, "steps")
    page.get_by_role("link", name="4", exact=True).click()
    browsing.settle()
    rewards = [float(text) for text in page.locator("[aria-label=rollouts] tbody td:nth-child(3)").all_inner_texts()]
    assert rewards == sorted(rewards, reverse=True)
    page.locator("[aria-label=groups] tbody a").first.click()
    browsing.settle()
    page.wait_for_selector(".card .message.assistant")
    shown = [float(text.split()[-1]) for text in page.locator(".card h3").all_inner_texts()]
    assert len(shown) > 1 and shown == sorted(shown, reverse=True)
    page.locator(".card h3 a").first.click()
    browsing.settle()
    assert {"Conversation", "Tokens", "Credit"} <= set(page.locator("h2").all_inner_texts())


def test_tokens_are_coloured_by_each_recorded_quantity_and_show_their_numbers(browsing: Browsing):
    page = browsing.page
    browsing.go("run", browsing.run_id("rl"), "step", 4, "rollout", 0)
    tokens = page.locator(".token-text span")
    tokens.first.wait_for()
    choice = page.get_by_label("colour by")
    names = choice.locator("option").evaluate_all("options => options.map(option => option.value)")
    assert {"advantages", "logprobs", "versions", "mask"} <= set(names)
    coloured = {}
    for name in names:
        choice.select_option(name)
        tokens.first.wait_for()
        coloured[name] = page.locator(".token-text span[style*=background]").count()
    assert coloured["mask"] > 0 and coloured["versions"] > 0 and coloured["logprobs"] > 0
    tokens.last.hover()
    numbers = browsing.text(".numbers")
    assert "position" in numbers and str(tokens.count() - 1) in numbers


def test_the_waterfall_shows_the_sums_that_the_server_computed(browsing: Browsing):
    page, run = browsing.page, browsing.run_id("rl")
    browsing.go("run", run, "step", 4, "rollout", 0)
    page.wait_for_selector("table.credit tbody")
    credit = page.evaluate("path => fetch(path).then(r => r.json())", f"api/runs/{run}/steps/4/rollouts/0/credit")
    assert page.locator("svg.waterfall").count() == len(credit["bars"]) > 2
    assert credit["algorithm"] in browsing.text()
    assert {bar["name"] for bar in credit["bars"]} <= set(page.locator("table.credit td:first-child").all_inner_texts())


def test_a_draw_shows_its_life_in_the_journal(browsing: Browsing):
    page = browsing.page
    browsing.go("run", browsing.run_id("rl"), "draws")
    total = page.locator("[aria-label=draws] tbody tr").count()
    assert total > 4
    page.locator("[aria-label=draws] tbody a").first.click()
    browsing.settle()
    assert "drawn" in browsing.text(".events")


def test_evaluations_show_intervals_and_tasks_before_and_after(browsing: Browsing):
    page = browsing.page
    browsing.go("run", browsing.run_id("rl"), "evaluation")
    page.wait_for_selector(".chart canvas")
    assert page.locator("[aria-label=tasks] tbody tr").count() > 0
    page.locator("[aria-label=tasks] tbody a").first.click()
    browsing.settle()
    assert "evaluation of version" in browsing.text(".crumbs")
    assert "Conversation" in page.locator("h2").all_inner_texts()


def test_two_runs_are_compared_over_each_other(browsing: Browsing):
    page = browsing.page
    for name in ("rl", "hackable"):
        page.get_by_label(f"compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare 2 runs").click()
    browsing.settle()
    page.wait_for_selector(".chart canvas")
    assert page.locator("[aria-label=differences] tbody tr").count() > 0
    assert "trainer" in browsing.text("[aria-label='settings that differ']")


def test_texts_of_a_run_are_searched(browsing: Browsing):
    page, run = browsing.page, browsing.run_id("rl")
    rollout = page.evaluate("path => fetch(path).then(r => r.json())", f"api/runs/{run}/steps/4/rollouts/0")
    word = rollout["messages"][0]["content"].split()[0]
    browsing.go("run", run, "search")
    page.get_by_label("text").fill(word)
    page.keyboard.press("Enter")
    page.wait_for_selector(".hits mark")
    assert page.locator(".hits mark").first.inner_text().lower() == word.lower()
    page.locator(".hits a").first.click()
    browsing.settle()
    assert "Conversation" in page.locator("h2").all_inner_texts()


def test_settings_and_an_sft_run_are_shown(browsing: Browsing):
    browsing.go("run", browsing.run_id("sft"), "settings")
    assert "model.name" in browsing.text()
    browsing.go("run", browsing.run_id("sft"))
    browsing.page.wait_for_selector(".chart canvas")


def test_an_unknown_page_and_an_unknown_run_are_refused_with_a_way_back(browsing: Browsing):
    page = browsing.page
    browsing.go("run", browsing.run_id("rl"), "nonsense")
    assert page.locator("[role=alert] a[href='#/']").count() == 1
    browsing.go("run", "0" * 12)
    assert page.locator(".error").count() == 1
    page.errors[:] = [error for error in page.errors if "404" not in error]  # the browser reports the refusal itself


def test_the_page_works_with_the_keyboard_alone(browsing: Browsing):
    page, run = browsing.page, browsing.run_id("rl")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.tagName") == "MAIN"
    page.keyboard.press("/")
    page.keyboard.type("hackable")
    assert page.locator("tbody tr").count() == 1
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "hackable":
            break
    page.keyboard.press("Enter")
    browsing.settle()
    browsing.wait("document.activeElement.tagName === 'H1'")
    browsing.go("run", run, "step", 2)
    page.keyboard.press("]")
    browsing.wait("document.querySelector('h1').textContent.startsWith('step 3')")
    page.keyboard.press("[")
    browsing.wait("document.querySelector('h1').textContent.startsWith('step 2')")
    browsing.go("run", run, "step", 4, "rollout", 0)
    page.locator(".token-text").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    count = page.locator(".token-text span").count()
    browsing.wait("n => document.querySelector('.numbers').textContent.includes(String(n))", count - 2)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_colours_follow_the_preference_of_the_system(browsing: Browsing, scheme: str):
    browsing.page.emulate_media(color_scheme=scheme)
    color = browsing.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, color[4:-1].split(","))) < 80) == (scheme == "dark")


def test_an_export_opens_from_files_without_a_server(page: Any, recorded: Path, tmp_path: Path):
    status, output = headrace("view", recorded / "rl", "--export", tmp_path / "export")
    assert status == 0, output
    browsing = Browsing(page, (tmp_path / "export" / "index.html").as_uri())
    page.wait_for_selector(".chart canvas")
    run = page.url.split("/run/")[1]
    for route in ("steps", "step/4", "step/4/group/0", "step/4/rollout/0", "evaluation", "draws", "settings"):
        browsing.go("run", run, route)
        assert page.locator(".error").count() == 0, route
