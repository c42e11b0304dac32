"""Names and texts of a run cannot change a page: they are shown as text, and their size does not freeze it."""

import pytest

from headrace.safe_text import escape_control
from tests.view.conftest import Browsing
from tests.view.hostile_run import CONTROL, HOSTILE, LENGTHS, MARKUP, MATHS, NAME, NOTICE_STEP, STEP

pytestmark = pytest.mark.view

RAW = "/[\\u0000-\\u0008\\u000b-\\u001f\\u202a-\\u202e\\u2066-\\u2069\\u200b]/.test(document.body.textContent)"
INJECTED = "document.querySelectorAll('main script, main img, main b[onmouseover]').length"


def open_hostile(browsing: Browsing, *parts: object) -> None:
    browsing.go("run", browsing.run_id(NAME), *parts)
    assert browsing.page.evaluate(INJECTED) == 0
    assert not browsing.page.evaluate(RAW)


@pytest.mark.parametrize(
    "parts",
    [(), ("steps",), ("step", STEP), ("step", STEP, "group", 0), ("draws",), ("evaluation",), ("settings",)],
    ids=lambda parts: "-".join(map(str, parts)) or "overview",
)
def test_no_page_takes_markup_or_control_characters_from_a_run(browsing: Browsing, parts: tuple[object, ...]):
    open_hostile(browsing, *parts)
    assert escape_control(NAME) in browsing.page.inner_text(".crumbs")


def test_hostile_names_are_text_in_the_list_of_runs(browsing: Browsing):
    assert escape_control(NAME) in browsing.text("table")
    assert browsing.page.evaluate(INJECTED) == 0 and not browsing.page.evaluate(RAW)


def test_a_hostile_conversation_is_shown_as_it_was_written(browsing: Browsing):
    open_hostile(browsing, "step", STEP, "rollout", 0)
    shown = browsing.page.text_content("main")
    assert shown is not None
    assert MARKUP in shown and escape_control(CONTROL) in shown


def test_a_notice_is_text_and_a_mark_at_its_step(browsing: Browsing):
    open_hostile(browsing)
    assert f"step {NOTICE_STEP}: {escape_control(HOSTILE)}" in browsing.page.text_content(".notices")
    browsing.page.wait_for_selector(".chart .u-over canvas, .chart canvas")
    marked = """canvas => {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return data.some((_, i) => i % 4 === 0 && data[i] === 0xc4 && data[i + 1] === 0x6a && data[i + 2] === 0);
    }"""
    browsing.wait(f"() => ({marked})(document.querySelector('.chart canvas'))")


def test_histograms_are_heat_maps_that_show_their_counts(browsing: Browsing):
    open_hostile(browsing)
    maps = browsing.page.locator("canvas.heat")
    maps.nth(2).scroll_into_view_if_needed()
    assert maps.count() == 3
    painted = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(value => value > 0)"
    assert all(maps.nth(index).evaluate(painted) for index in range(3))
    box = maps.nth(0).bounding_box()
    browsing.page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 3)
    shown = f"caption.textContent.includes('step {STEP}: 1 from')"
    browsing.wait(f"[...document.querySelectorAll('figcaption')].some(caption => {shown})")


def test_formulas_are_mathml_and_hostile_ones_stay_text(browsing: Browsing):
    open_hostile(browsing, "step", STEP, "rollout", 1)
    page, answer = browsing.page, ".message.assistant > .text"
    assert page.locator("math").count() == 0
    assert page.text_content(answer) == MATHS
    page.get_by_label("rendered maths").check()
    browsing.wait("() => document.querySelectorAll('math').length >= 3")
    assert page.evaluate(INJECTED) == 0
    unsafe = "element => [...element.attributes].some(({name}) => /^on|href|src|^id$/.test(name))"
    assert not page.evaluate(f"[...document.querySelectorAll('math *')].some({unsafe})")
    shown = page.text_content(answer)
    assert r"$\href{javascript:alert(4)}{x}$" in shown and r"$\class{c}" in shown
    assert r"$\def\a{\a\a}\a$ costs $5 and $6, \(\unknown" in shown
    page.get_by_label("rendered maths").uncheck()
    browsing.wait("() => document.querySelectorAll('math').length === 0")
    assert page.text_content(answer) == MATHS


def test_every_character_that_python_escapes_is_escaped_in_the_browser(browsing: Browsing):
    characters = [chr(code) for code in [*range(0xD800), *range(0xE000, 0x10000), *range(0xE0000, 0xE1000)]]
    escaped = browsing.page.evaluate("characters => characters.filter(c => HR.text(c) !== c)", characters)
    assert escaped == [character for character in characters if escape_control(character) != character]


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_the_page_answers_while_it_shows_a_rollout_of_any_size(browsing: Browsing, row: int):
    page = browsing.page
    open_hostile(browsing, "step", STEP, "rollout", row)
    page.locator(".token-text").scroll_into_view_if_needed()
    page.locator(".token-text span").first.wait_for()
    assert page.evaluate("document.querySelectorAll('.token-text span').length") <= min(LENGTHS[row], 12_000)
    page.locator(".token-text").focus()
    page.keyboard.press("End")
    last = LENGTHS[row] - 1
    browsing.wait("n => document.querySelector('.numbers').textContent.replaceAll(',', '').includes(String(n))", last)
    assert page.locator(".token-text span.at").get_attribute("data-i") == str(last)
