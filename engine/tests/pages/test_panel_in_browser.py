"""The panel in a real browser shows exactly what was recorded, and all of it is reachable."""

import json

import numpy as np
import pytest

from lockstep.pages.panel import panel_page, render
from lockstep.whole_files import write_output

NUMBERS = "rows => rows.map(row => [row.dataset.rank, row.dataset.value])"


@pytest.fixture
def path(recorded, tmp_path):
    write_output(tmp_path / "panel.html", panel_page(recorded[0]))
    return tmp_path / "panel.html"


@pytest.fixture
def view(path, show):
    return show(path)


def numbers(view):
    """Return the numbers on the page, (ranks, values)."""
    numbers = view.locator("#ranks tr").evaluate_all(NUMBERS)
    ranks = sorted({int(rank) for rank, _ in numbers})
    return np.array([[float(value) for at, value in numbers if int(at) == rank] for rank in ranks])


def act(view, times=1):
    for _ in range(times):
        view.locator("#next").click()


def choose_ranks(view, ranks):
    view.locator("#rank-choice label").nth(ranks - 1).click()


def test_gradients_differ_before_and_are_the_recorded_mean_after(view, recordings):
    parameter = recordings[0]["parameters"][0]
    act(view)
    before = numbers(view)
    assert before.tolist() == parameter["before"]
    assert (before[0] != before[1]).all()
    act(view)
    after = numbers(view)
    assert (after[0] == after[1]).all()
    assert after[0] == pytest.approx(before.mean(axis=0), rel=1e-6)


def test_the_panel_s_update_equals_the_run_s_on_all_ranks(view, recordings):
    act(view, 3)
    assert numbers(view).tolist() == 2 * [recordings[0]["parameters"][0]["updated"]]


def test_every_parameter_can_be_looked_at(view, recordings):
    act(view)
    names = [item["name"] for item in recordings[0]["parameters"]]
    assert view.locator("#parameter option").all_inner_texts() == names
    view.locator("#parameter").select_option(index=5)
    assert numbers(view).tolist() == recordings[0]["parameters"][5]["before"]


def test_samples_are_those_that_each_rank_had(view, recordings):
    titles = [item.get_attribute("title") for item in view.locator(".sample").all()]
    assert titles == [text for rank in recordings[0]["samples"] for text in rank]
    assert numbers_are_hidden(view)


def numbers_are_hidden(view):
    return set(view.locator("#ranks .value").all_inner_texts()) == {"–"}


def test_one_walks_through_the_recorded_steps_and_back(view, recordings):
    for recording in recordings:
        assert f"step {recording['step']} (" in view.inner_text("#step-name")
        act(view)
        assert numbers(view).tolist() == recording["parameters"][0]["before"]
        view.locator("#next").press(".")
    assert view.locator("#later").is_disabled()
    view.locator("#earlier").click()
    assert view.inner_text("#step-name").startswith(f"step {recordings[-2]['step']} (")
    view.locator("#step").fill("0")
    assert view.locator("#earlier").is_disabled()


def test_the_page_works_with_the_keyboard_only(view, recordings):
    keyboard = view.keyboard
    keyboard.press("ArrowRight")
    assert numbers(view).tolist() == recordings[0]["parameters"][0]["before"]
    keyboard.press("p")
    assert numbers(view).tolist() == recordings[0]["parameters"][1]["before"]
    keyboard.press("ArrowRight")
    assert numbers(view)[1].tolist() == recordings[0]["parameters"][1]["after"]
    keyboard.press("ArrowLeft")
    assert numbers(view).tolist() == recordings[0]["parameters"][1]["before"]
    keyboard.press("r")
    assert numbers_are_hidden(view)
    keyboard.press(".")
    assert view.inner_text("#step-name").startswith(f"step {recordings[1]['step']} ")
    keyboard.press("5")
    assert view.locator(".card").count() == 5


def test_the_tab_key_reaches_every_control_and_enter_presses_it(view):
    reached = []
    for _ in range(14):
        view.keyboard.press("Tab")
        reached.append(view.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"step", "later", "ranks", "parameter", "next"} <= set(reached)
    view.locator("#next").focus()
    view.keyboard.press("Enter")
    assert view.locator("#stages [aria-current]").inner_text() == "2 Gradients"


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_other_numbers_of_ranks_are_simulated_and_say_so(view, ranks):
    assert view.locator("#simulation").is_hidden()
    choose_ranks(view, ranks)
    assert "Simulation: this step ran on 2 ranks, not on" in view.inner_text("#simulation")
    assert view.locator(".card.simulated").count() == max(0, ranks - 2)
    act(view)
    before = numbers(view)
    assert len(np.unique(before, axis=0)) == len(before) == ranks
    act(view)
    assert numbers(view) == pytest.approx(np.tile(before.mean(axis=0), (ranks, 1)), rel=1e-9)
    choose_ranks(view, 2)
    assert view.locator("#simulation").is_hidden()


def test_the_step_covers_micro_batch_times_ranks(view):
    assert view.inner_text("#coverage") == "4 samples × 2 ranks = 8 samples"
    choose_ranks(view, 8)
    assert view.inner_text("#coverage") == "4 samples × 8 ranks = 32 samples"


def test_the_noise_scale_is_drawn_with_its_advice(view, recordings):
    advice = recordings[-1]["advice"]
    assert view.inner_text("#advice") == f"{advice[0].upper()}{advice[1:]}."
    label = view.locator("#noise svg").get_attribute("aria-label")
    assert all(f"step {item['step']}: " in label for item in recordings)


def test_each_change_is_announced(view):
    labels = set()
    for _ in range(4):
        labels.add(view.locator("[role=status]").inner_text())
        act(view)
    assert len(labels) == 4


def test_every_control_has_an_accessible_name(view):
    names = (
        "all => all.map(each => each.ariaLabel || each.labels?.[0]?.innerText || each.innerText)"
    )
    assert all(view.locator("button, input, select").evaluate_all(names))
    assert view.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("width", [320, 768, 1600])
def test_no_width_makes_the_page_scroll_sideways(path, show, width):
    view = show(path, width=width)
    choose_ranks(view, 8)
    act(view, 2)
    assert view.evaluate("document.documentElement.scrollWidth") <= width


def contrast(view, selector):
    """Return the contrast ratio of text to the page (WCAG 2.2, 1.4.3)."""
    colors = view.locator(selector).first.evaluate(
        "each => [getComputedStyle(each).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = sorted(luminance(color) for color in colors)
    return (light[1] + 0.05) / (light[0] + 0.05)


def luminance(color):
    parts = np.array([int(part) for part in color[4:-1].split(",")]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(path, show, scheme):
    view = show(path, color_scheme=scheme)
    act(view, 2)
    assert contrast(view, "h1") > 7
    assert all(contrast(view, item) > 4.5 for item in (".lead", ".value", "footer", ".norm"))
    body = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(body) > 0.5) == (scheme == "light")


@pytest.mark.slow
def test_numbers_move_to_the_mean_unless_motion_is_to_be_reduced(path, show):
    still = show(path)
    act(still, 2)
    assert len(set(still.locator("#ranks .value").all_inner_texts())) == 4
    mean = still.locator("#ranks").inner_text()
    moving = show(path, reduced_motion="no-preference")
    act(moving, 2)
    between = set(moving.locator("#ranks .value").all_inner_texts())
    moving.wait_for_timeout(900)
    assert set(moving.locator("#ranks .value").all_inner_texts()) != between
    assert moving.locator("#ranks").inner_text() == mean


def test_markup_in_samples_is_shown_as_text(recordings, tmp_path, show):
    nasty = "</script><img src=x onerror=alert(1)><b>bold</b>"
    first = {**recordings[0], "samples": [[nasty], [nasty]]}
    write_output(tmp_path / "page.html", render({"name": nasty, "recordings": [first]}))
    view = show(tmp_path / "page.html")
    assert view.locator(".sample").first.inner_text() == nasty
    assert view.locator("#ranks img, #ranks b").count() == 0


def test_values_that_are_not_finite_are_marked(recordings, tmp_path, show):
    first = json.loads(json.dumps(recordings[0]))
    first["parameters"][0]["before"][1][0] = first["parameters"][0]["after"][0] = None
    write_output(tmp_path / "page.html", render({"name": "bad", "recordings": [first]}))
    view = show(tmp_path / "page.html")
    act(view)
    assert view.locator("#ranks .value").all_inner_texts().count("not finite") == 1
    act(view)
    assert view.locator("#ranks .value").all_inner_texts().count("not finite") == 2


def test_the_page_answers_within_a_second_with_forty_steps_of_a_gpt2_on_eight_ranks(
    recordings, tmp_path, show
):
    parameter = {**recordings[0]["parameters"][0], "norms": 8 * [1.0]}
    parameter["before"] = 4 * parameter["before"]
    sizes = {"ranks": 8, "losses": 8 * [3.0], "samples": 8 * [["text"]]}
    step = {**recordings[0], **sizes, "parameters": 148 * [parameter]}
    steps = [{**step, "step": 50 * index} for index in range(1, 41)]
    write_output(tmp_path / "page.html", render({"name": "gpt2", "recordings": steps}))
    view = show(tmp_path / "page.html")
    assert view.locator(".card").count() == 8
    assert view.evaluate("performance.getEntriesByType('navigation')[0].domComplete") < 1000  # ms
