"""The page in a real browser: answers stream, and it sends no request to anywhere else."""

import subprocess

import pytest

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.chat.template import template_of

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def url_of(python_of_forks):
    """Start a server for a run; return its address."""
    processes = []

    def start(run, *words):
        program = [python_of_forks, "-m", "lockstep_gpt", "serve", str(run)]
        process = subprocess.Popen(
            [*program, "--port", "0", *words], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return next(line.split()[1] for line in process.stdout if line.startswith("ready: "))

    yield start
    for process in processes:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def chat_url(saved_run, url_of):
    run = saved_run(ByteTokenizer(), source="chat", path="conversations.jsonl")
    return url_of(run)


@pytest.fixture(scope="module")
def endless_url(saved_run, url_of):
    """The server of a model whose likeliest answer has no end."""
    tokenizer = ByteTokenizer()
    stops = template_of(tokenizer).stop
    run = saved_run(tokenizer, never=stops, source="chat", path="conversations.jsonl")
    return url_of(run, "--longest", "90000")


@pytest.fixture(scope="module")
def base_url(saved_run, url_of):
    return url_of(saved_run(ByteTokenizer(), source="stdlib"))


@pytest.fixture
def show(watched):
    """Open the page; check that it asked only its own server, and that no rule was broken."""
    tab, messages, requests = watched
    expected = []

    def open_page(url, width=1280, color_scheme="light"):
        tab.set_viewport_size({"width": width, "height": 800})
        tab.emulate_media(color_scheme=color_scheme)
        tab.goto(url)
        tab.wait_for_selector("#send:not([disabled])")
        return tab

    open_page.expected = expected
    yield open_page
    assert [line for line in messages if not any(message in line for message in expected)] == []
    assert requests
    assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in requests)
    assert len({url.split("/")[2] for url in requests if url.startswith("http")}) == 1


def send(page, text):
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def wait_until_settled(page):
    page.wait_for_selector("#stop[disabled]")
    return page


def test_one_talks_and_the_history_is_sent(chat_url, show):
    page = show(chat_url)
    assert page.locator("#about").inner_text() == "context: 64 tokens"
    page.locator("#longest").fill("9")
    page.locator("#temperature").fill("0")
    with page.expect_request("**/v1/chat/completions") as first:
        send(page, "hi <b>there</b>")
    wait_until_settled(page)
    assert first.value.post_data_json["max_tokens"] == 9
    assert first.value.post_data_json["temperature"] == 0
    assert page.locator(".user").inner_text() == "hi <b>there</b>"
    assert page.locator("main b").count() == 0
    answer = page.locator(".assistant").text_content()
    assert answer
    with page.expect_request("**/v1/chat/completions") as second:
        send(page, "again")
    wait_until_settled(page)
    assert second.value.post_data_json["messages"] == [
        {"role": "user", "content": "hi <b>there</b>"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "again"},
    ]
    page.locator("#reset").click()
    assert page.locator(".message").count() == 0
    with page.expect_request("**/v1/chat/completions") as third:
        send(page, "new")
    wait_until_settled(page)
    assert len(third.value.post_data_json["messages"]) == 1


@pytest.mark.slow
def test_an_answer_grows_and_can_be_stopped(endless_url, show, wait_for):
    page = show(endless_url)
    page.locator("#longest").fill("90000")
    page.locator("#temperature").fill("0")
    send(page, "go on")
    answer = page.locator(".assistant")
    wait_for(lambda: len(answer.text_content()) > 20)
    in_sight = "all => all.scrollHeight - all.scrollTop - all.clientHeight < 2"
    wait_for(lambda: len(answer.text_content()) > 3000)
    assert page.locator("#messages").evaluate(in_sight)
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    early = len(answer.text_content())
    wait_for(lambda: len(answer.text_content()) > early)
    page.locator("#stop").click()
    wait_until_settled(page)
    assert page.locator(".note").inner_text() == "Stopped."
    length = len(answer.text_content())
    page.wait_for_timeout(200)
    assert len(answer.text_content()) == length


def test_what_was_left_out_and_errors_are_shown(chat_url, show):
    show.expected.append("400 (Bad Request)")
    page = show(chat_url)
    page.locator("#longest").fill("9")
    page.locator("#temperature").fill("0")  # a random answer may be empty, and is then taken back
    for _ in range(4):
        send(page, "0123456789")
        wait_until_settled(page)
    assert "the oldest messages (" in page.locator(".note").last.inner_text()
    send(page, 90 * "x")
    page.wait_for_selector(".error")
    assert "shorten it" in page.locator(".error").inner_text()
    wait_until_settled(page)
    assert page.locator(".assistant").count() == page.locator(".user").count() == 4
    assert page.locator("#text").input_value() == 90 * "x"


def test_an_answer_at_its_limit_says_so(endless_url, show):
    page = show(endless_url)
    page.locator("#longest").fill("9")
    page.locator("#temperature").fill("0")
    send(page, "go on")
    wait_until_settled(page)
    assert page.locator(".note").inner_text() == "The answer was cut off at the limit."


def test_a_base_model_continues_the_text(base_url, show):
    page = show(base_url)
    assert "was not trained on conversations" in page.locator("#about").inner_text()
    page.locator("#longest").fill("9")
    send(page, "def f(")
    wait_until_settled(page)
    assert page.locator(".assistant").text_content().startswith("def f(")
    assert page.locator(".user").count() == 0


def test_its_policy_allows_only_its_own_parts(base_url, show):
    page = show(base_url)
    policy = page.request.get(base_url).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("style-src").startswith("'sha256-")
    assert rules.pop("script-src").startswith("'sha256-")
    none = ("default-src", "base-uri", "form-action", "frame-ancestors")
    assert rules == {**dict.fromkeys(none, "'none'"), "img-src": "data:", "connect-src": "'self'"}
    show.expected.append("Content Security Policy")
    ran = page.evaluate(
        "() => { const each = document.createElement('script');"
        " each.textContent = 'window.ran = true'; document.head.append(each); return window.ran; }"
    )
    assert not ran


@pytest.mark.parametrize("width", [320, 768, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_makes_the_page_scroll_sideways(chat_url, show, width, scheme):
    page = show(chat_url, width=width, color_scheme=scheme)
    page.locator("#longest").fill("2")
    send(page, 40 * "x")
    wait_until_settled(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(253, 253, 252)"
    assert light == (scheme == "light")


def test_every_control_has_a_name_and_can_be_reached_by_keys(chat_url, show):
    page = show(chat_url)
    names = (
        "all => all.map(each => each.ariaLabel || each.labels?.[0]?.innerText || each.innerText)"
    )
    assert all(page.locator("button, input, textarea").evaluate_all(names))
    reached = []
    page.locator("#text").focus()
    for _ in range(5):
        reached.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert reached == ["text", "temperature", "longest", "reset", "send"]
