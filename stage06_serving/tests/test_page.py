"""The page in headless Chromium, against a real server. Its frames: test_inside.

The server's model is made by hand and repeats one text: markup, which must stay text.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("selenium", reason="requirements-dev.txt is not installed")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from shared.checkpoint import Config, random_tensors
from shared.testing import FIELDS

from .asking import first_frame, post, until, until_idle
from .conftest import checkpoint, serving
from .faulty_server import MODULE

SAID = (
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 2'> & "
    "\u201cBen\u201d \N{FOX FACE} ran home.\n"
)
pytestmark = pytest.mark.slow
BYTES = SAID.encode()
POSITIONS = 1024
FEW_BLOCKS = ("--kv-memory", "1MiB")  # 128: the sanitizer checks all of them after every step
OWNED, SHARED, CACHED, FREE = range(4)  # in the text below the map

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def recite(text: str, folder: Path) -> Path:
    """A checkpoint that repeats `text`: its layers do nothing, each position leads to one byte."""
    fields = {"n_positions": POSITIONS, "n_embd": 64, "n_layer": 1}
    shapes = random_tensors(Config.from_dict(FIELDS | fields))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in shapes.items()}
    data = text.encode()
    letters = sorted(set(data))
    tensors["ln_f.weight"] += 1
    for dimension, byte in enumerate(letters):  # a direction each; a byte is its own token id
        tensors["wte.weight"][byte, dimension] = 5.0
    for position in range(POSITIONS):
        tensors["wpe.weight"][position, letters.index(data[position % len(data)])] = 1000.0
    return checkpoint(folder, tensors, **fields)


@pytest.fixture(scope="module")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recite(SAID, tmp_path_factory.mktemp("page") / "reciter")


@pytest.fixture(scope="module")
def served(house, reciter, slowly):
    """A slow server, for all tests that break nothing."""
    running = house("--model", str(reciter), *FEW_BLOCKS, "--max-num-seqs", "8", env=slowly)
    yield running
    assert running.process.poll() is None and "Traceback" not in running.stderr(), running.stderr()


@pytest.fixture(scope="module")
def browser():
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium or its chromedriver is missing (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    # In a container the sandbox has no rights, and /dev/shm is small.
    switches = "headless=new no-sandbox disable-dev-shm-usage disable-gpu window-size=1280,1000"
    for switch in switches.split():
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The page in a browser, as a reader sees it."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        browser.get(url)

    def __getitem__(self, name: str) -> Any:
        return self.browser.find_element(By.ID, name)

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def until(self, holds: Callable[[], Any]) -> None:
        until(holds, lambda: f"the page has {self.run('return document.body.innerText')!r}")

    def shows(self, name: str, words: str) -> None:
        """Wait until the element with this name has the text."""
        self.until(lambda: words in self[name].text)

    def start(self, **values: str) -> None:
        for name, value in values.items():
            field = self[name.replace("_", "-")]
            field.clear()
            field.send_keys(value)
        self["start"].click()

    def ask(self, meanwhile: Callable[[], object] = lambda: None, **values: str) -> None:
        """Start, and wait for the end of the answer, calling `meanwhile` again and again."""
        self.start(**{"prompt": "x", "temperature": "0"} | values)
        self.until(lambda: meanwhile() or self["status"].text.startswith("Done"))

    def texts(self) -> list[str]:
        answers = "[...document.querySelectorAll('.answer')]"
        return self.run(f"return {answers}.map(answer => answer.textContent)")

    def blocks(self) -> list[int]:
        """The counts below the map: blocks of one sequence, shared, cached, free."""
        words = self.run("return document.getElementById('map-words').textContent")
        return [int(count) for count in re.findall(r"\d+", words.replace(",", ""))] or [0] * 4

    def picture(self, name: str) -> str:
        return self.run(f"return document.getElementById('{name}').toDataURL()")

    def media(self, **features: str) -> None:
        """Emulate media features, such as prefers_color_scheme="dark"."""
        pairs = [{"name": name.replace("_", "-"), "value": features[name]} for name in features]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": pairs})

    def errors(self) -> list[str]:
        log = self.browser.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]


@pytest.fixture
def page(browser, served):
    """The page, live and idle; the browser's log must stay free of errors."""
    until_idle(served)
    browser.get_log("browser")
    page = Page(browser, served.url)
    page.shows("link", "Live")
    page.until(lambda: sum(page.blocks()) > 0)
    yield page
    page.media()
    browser.get("about:blank")
    assert page.errors() == []


def expected(tokens: int, length: int = 1) -> str:
    """The model's answer to a prompt of `length` bytes."""
    return (BYTES * 4)[length - 1 :][:tokens].decode("utf-8", "replace")


def test_text_streams_in_while_the_pictures_move(page):
    """Markup in an answer or a prompt is text."""
    idle = page.blocks()
    assert idle[OWNED] == idle[SHARED] == 0
    seen: list[tuple[Any, ...]] = []

    def look() -> None:
        pictures = page.picture("map"), page.picture("timeline")
        seen.append(("".join(page.texts()), page.blocks()[OWNED], *pictures))

    prompt = "<img src=x onerror='window.harmed = 3'>"
    whole = expected(160, len(prompt))
    page.ask(look, prompt=prompt, max_tokens="160")
    texts, owned, maps, timelines = (set(values) for values in zip(*seen, strict=True))
    assert min(map(len, (texts, owned, maps, timelines))) > 4 and max(owned) > 4
    assert all(whole.startswith(text) for text in texts) and page.texts() == [whole]
    assert "<script>" in page["answers"].text and prompt in page["answers"].text
    assert page.run("return document.querySelectorAll('#answers script, #answers img').length") == 0
    assert page.run("return window.harmed") is None
    assert page["status"].text == f"Done: {len(prompt)} tokens in, 160 out."
    assert "finish reason: length" in page["answers"].text
    assert page["start"].is_displayed() and not page["stop"].is_displayed()
    page.shows("running", "0")
    after = page.blocks()
    assert after[OWNED] == after[SHARED] == 0 and after[CACHED] >= 160 // 16
    assert sum(after) == sum(idle)


def test_a_click_on_a_prompt_starts_it_and_samples_share_theirs(page):
    """Times of tokens are shown while a sequence runs; the line of token rates moves."""
    page.until(lambda: page["ttft"].text == page["itl"].text == "–")  # no times without tokens
    before, button = page.picture("rates"), page["prompts"].find_element(By.TAG_NAME, "button")
    page["max-tokens"].clear()
    page["max-tokens"].send_keys("60")
    button.click()
    page.shows("itl", " ms")
    page.shows("status", "Done")
    assert page["prompt"].get_property("value") == button.text
    assert page["answers"].text.startswith(button.text) and page.picture("rates") != before
    assert not page["rates-words"].text.endswith("peak 0")
    page.start(prompt="x" * 65, max_tokens="120", temperature="0.7", samples="3")
    page.until(lambda: page.blocks()[SHARED] >= 4 and page["running"].text == "3")
    page.shows("status", "Done")
    assert page.texts() == [expected(120, 65)] * 3
    assert page["answers"].text.count("x" * 65) == 1 and "Answer 3 of 3" in page["answers"].text


def test_the_timeline_scrolls_and_stays_where_it_was_scrolled_to(page):
    def scrolled(left):
        words = page["timeline-words"].text
        page.run(f"document.getElementById('steps-view').scrollLeft = {left}")
        page.until(lambda: page["timeline-words"].text != words)  # other steps are shown
        return page["timeline-words"].text.split(" to ")

    page.ask(max_tokens="300")
    newest = page["steps"].text
    first, last = scrolled(0)
    page.ask(max_tokens="20")
    assert page["timeline-words"].text == f"{first} to {last}"
    scrolled(1e6)
    page.until(lambda: page["timeline-words"].text.split(" to ")[1] == page["steps"].text)
    assert page["steps"].text != newest


def test_the_keyboard_is_enough_and_everything_has_a_name(page, served):
    """Through all fields by Tab, Ctrl+Enter starts, Escape stops, and so does the button; the focus
    is visible. Fields have labels, the pictures texts, and changes are announced."""
    fields = "[...document.querySelectorAll('textarea, input')]"
    assert page.run(f"return {fields}.filter(each => !each.labels.length).length") == 0
    for name in ("map", "timeline", "rates"):
        assert page[name].get_attribute("role") == "img" and page[name].accessible_name
    assert page["answers"].get_attribute("aria-live") == "polite"
    roles = {"error": "alert", "status": "status", "link": "status"}
    assert {name: page[name].get_attribute("role") for name in roles} == roles

    def press(*keys):
        ActionChains(page.browser).send_keys(*keys).perform()

    def focused():
        return page.run("return document.activeElement.id")

    buttons = [""] * 3  # of the prompts
    for name in ("prompt", *buttons, "max-tokens", "temperature", "samples", "start", "freeze"):
        press(Keys.TAB)
        outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert (focused(), outline) == (name, "solid")
    press(Keys.SPACE)
    assert page["freeze"].get_attribute("aria-pressed") == "true"
    press(Keys.SPACE)
    page["prompt"].clear()
    page["prompt"].send_keys("x")
    press(*[Keys.TAB] * 4, "900")  # a field is selected when Tab comes to it
    press(Keys.CONTROL + Keys.ENTER + Keys.NULL)
    page.until(lambda: len("".join(page.texts())) > 20 and page.blocks()[OWNED])
    press(Keys.ESCAPE)
    page.shows("status", "Stopped.")
    text = page.texts()[0]
    until_idle(served)
    page.until(lambda: page.blocks()[OWNED] == 0 == int(page["running"].text))
    assert page.texts() == [text] and 20 < len(text) < 900  # the text stays
    page["start"].send_keys(Keys.ENTER)
    page.until(lambda: focused() == "stop")
    press(Keys.ENTER)
    page.shows("status", "Stopped.")
    assert focused() == "start"  # the focus is not lost
    page.ask(max_tokens="20")  # and the next request works
    assert page.texts() == [expected(20)]


def test_a_phone_needs_no_horizontal_scrolling(page):
    size = {"width": 375, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.browser.refresh()
        page.shows("link", "Live")
        page.ask(prompt="long" * 40, max_tokens="90", temperature="0.5", samples="2")
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [375, 375]
        scrolls = "each.closest('#steps-view')"
        outside = f"each => each.getBoundingClientRect().right > 375.5 && !{scrolls}"
        assert page.run(f"return [...document.querySelectorAll('body *')].filter({outside})") == []
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_pictures_follow_the_scheme_hold_when_frozen_and_need_no_animation(page):
    """With reduced motion, a picture is painted now and then, outside the browser's frames."""

    def shown():
        return *(page.picture(name) for name in ("map", "timeline", "rates")), page["steps"].text

    colours = []
    for scheme in ("light", "dark"):
        page.media(prefers_color_scheme=scheme)
        page.until(lambda: page.picture("map") not in colours)  # it is painted anew
        colour = page.run("return getComputedStyle(document.body).backgroundColor")
        colours.extend([page.picture("map"), colour])
    assert len(set(colours)) == 4
    page["freeze"].click()
    before = shown()
    page.ask(max_tokens="60")
    assert shown() == before
    page["freeze"].click()
    page.until(lambda: shown()[1] != before[1])
    page.media(prefers_reduced_motion="reduce")
    before = shown()
    page.run("window.requestAnimationFrame = () => { window.animated = true; }")
    page.ask(max_tokens="60")
    cursor = "getComputedStyle(document.querySelector('.answer'), '::after')"
    assert page.run(f"return {cursor}.animationName") == "none"
    page.until(lambda: shown()[1] != before[1])
    assert page.run("return window.animated") is None


def test_no_two_sequences_that_run_look_alike(page, served):
    """Two running sequences, although 259 came and went between them; their blocks, and a free
    one."""
    running = [["sequence-1", 0], ["sequence-261", 260]]
    shown = {"running": running, "map": [[0, 1], [260, 1], [-1, 62]]}
    frame = json.dumps(f"data: {json.dumps(first_frame(served) | shown)}\n\n")
    source = f"""const ask = fetch; window.fetch = (path, options) =>
        path === "/live" ? Promise.resolve(new Response({frame})) : ask(path, options);"""
    name = "ScriptToEvaluateOnNewDocument"
    command = page.browser.execute_cdp_cmd
    script = command(f"Page.add{name}", {"source": source})
    page.browser.refresh()
    page.until(lambda: page.blocks()[OWNED] == 2)
    command(f"Page.remove{name}", script)
    block = "document.getElementById('map').getContext('2d').getImageData(32 * n, 0, 32, 32).data"
    assert len(set(page.run(f"return [0, 1, 2].map(n => {block}.join())"))) == 3


def test_errors_are_shown_in_the_servers_words(page, served):
    for wrong in ({"temperature": 3}, {"max_tokens": 0}, {"n": 2}):
        body = {"prompt": "x", "max_tokens": 5, "temperature": 0, "n": 1} | wrong
        message = post(served, json=body).json()["error"]["message"]
        body["samples"] = body.pop("n")
        page.start(**{name: str(value) for name, value in body.items()})
        page.shows("error", message)
        assert page["error"].text == message and page["start"].is_displayed()
    assert all("status of 400" in error for error in page.errors())  # the browser's own note


def test_nothing_comes_from_another_host(page, served):
    page.ask(max_tokens="20")
    names = "return performance.getEntries().map(each => each.name)"
    asked = {f"{served.url}/v1/completions", f"{served.url}/v1/models"}
    page.until(lambda: asked <= {*page.run(names)})
    urls = {name for name in page.run(names) if ":" in name}
    assert all(url.startswith((served.url, "data:")) for url in urls)
    result = page.browser.execute_async_script(
        "fetch('http://127.0.0.2:9/').then(() => arguments[0]('sent'), "
        "error => arguments[0](error.message))"
    )
    assert result != "sent"  # by the page's own policy, not because no server is there
    assert any("Content Security Policy" in error for error in page.errors())


def test_a_key_is_asked_for_and_large_pools_are_drawn(browser, house, reciter):
    """A frame holds fewer than 70,000 blocks, and the page says so. The sanitizer is off: it
    would check all of them."""
    many = ("--block-size", "1", "--kv-memory", f"{70_000 * 512}", "--no-sanitize")
    running = house("--model", str(reciter), "--api-key", "open-sesame", *many)
    page, missing = Page(browser, running.url), "API key is missing or wrong"
    page.shows("link", "Waiting for a key")
    assert page["key-form"].is_displayed() and missing in page["key-why"].text
    page.start(prompt="x", max_tokens="4", temperature="0")
    page.shows("error", missing)
    page["key"].send_keys("wrong", Keys.ENTER)
    page.until(page["key-form"].is_displayed)  # it asks again
    page["key"].send_keys("open-sesame", Keys.ENTER)
    page.shows("link", "Live")
    assert not page["key-form"].is_displayed()
    page.ask(max_tokens="4")
    assert page.texts() == [expected(4)]
    page.until(lambda: page.blocks()[CACHED] == 4)
    assert sum(page.blocks()) == 65_536
    page.ask(max_tokens="4")
    shown, high = page["map-size"].text, page["map"].size["height"]
    assert re.fullmatch(r"the first (6|7|8)\d of 70,000 blocks of 1 tokens", shown)
    page.ask(max_tokens="300")
    page.shows("map-size", "the first 5")  # more are drawn
    assert high < page["map"].size["height"] < 360  # the more blocks, the smaller each
    stored = page.run("return [localStorage.length, sessionStorage.length, document.cookie]")
    assert stored == [0, 0, ""]
    assert all("status of 401" in error for error in page.errors())
    browser.get("about:blank")


def test_the_page_reports_a_lost_server_and_finds_it_again(browser, house, reciter, slowly):
    options = ("--model", str(reciter), *FEW_BLOCKS)
    with serving(*options, "--grace", "0", env=slowly, module=MODULE) as running:
        page = Page(browser, running.url)
        page.shows("link", "Live")
        page.start(prompt="x", max_tokens="900", temperature="0")
        page.until(lambda: any(page.texts()))
        running.stop()
        page.shows("link", "The server is gone: trying again")
        page.shows("error", "shutting down")
        page["start"].click()
        page.shows("error", "cannot be reached")
        assert not re.search("Traceback|ERROR", running.stderr()), running.stderr()
        house(*options, "--port", str(running.port))
        page.shows("link", "Live")
        page.until(lambda: page["steps"].text == "0" and page.blocks()[FREE])
        assert page.blocks()[:FREE] == [0, 0, 0]
        page.ask(max_tokens="20")
        assert page.texts() == [expected(20)]
        browser.get("about:blank")
    browser.get_log("browser")


def test_a_conversation_goes_on_until_a_new_one_begins(browser, house):
    """With the model that --chat serves. Each message is sent with the whole conversation so
    far."""
    page = Page(browser, house("--chat", "--kv-memory", "2MiB", "--no-sanitize").url)
    page.until(page["new-chat"].is_displayed)  # the form is for messages
    assert not page["samples"].is_displayed() and "Pim" in page["prompt"].get_attribute("value")

    def send(*words: str) -> int:
        before = page["status"].text
        page["prompt"].send_keys(*words, Keys.ENTER)
        page.until(lambda: "Done" in page["status"].text != before)
        assert page["prompt"].get_attribute("value") == ""
        return int(re.findall(r"\d+", page["status"].text)[0])

    for name, value in {"temperature": "0", "max-tokens": "40"}.items():
        page[name].clear()
        page[name].send_keys(value)
    first, second = send(), send("Go on")
    answers = page.texts()
    assert len(answers) == 2 and all(answers) and second > first + 30
    assert page["answers"].text.index("Go on") > page["answers"].text.index(answers[0][:40])
    page["new-chat"].click()
    assert page.texts() == [] and not page["answers"].is_displayed()
    assert send("Tell me a story about a brave goat called Pim and a lost key") == first
    page.until(lambda: page.texts() == answers[:1])  # drawn a frame later
    assert page["knows"].is_displayed()  # the model's limits are said once
    assert page["answers"].location["y"] < page["form"].location["y"]
    browser.get("about:blank")


def test_a_full_context_loses_whole_turns_and_says_so(browser, house):
    """The system prompt stays; what the server gets is read from its own count of tokens."""
    options = "--chat --kv-memory 2MiB --max-model-len 200 --no-sanitize"
    page = Page(browser, house(*options.split()).url)
    page.until(page["new-chat"].is_displayed)
    page["system-field"].click()
    page["system"].send_keys("Tell short stories.")
    counts = []
    for i in range(4):
        page.ask(prompt=f"Tell me a story {i}", max_tokens="50")
        counts.append(int(re.findall(r"\d+", page["status"].text)[0]))
        page.run("document.getElementById('status').textContent = ''")
    assert max(counts) <= 150 and "The context is full" in page["answers"].text
    assert len(page.texts()) == 4 and all("status of 400" in error for error in page.errors())
    browser.get("about:blank")


def test_markdown_of_an_answer_is_elements_and_never_markup(browser, house, tmp_path):
    asked = "User: x\nAssistant:"  # by the simple template
    words = "# T\n\n**bold** *thin* `<b>`\n\n- one\n- two\n\n1. three\n\n"
    words += "```\na < *b*\n```\n<img src=x>"
    folder = recite("\n" * (len(asked) - 1) + words, tmp_path / "reciter")
    page = Page(browser, house("--model", str(folder), "--chat", *FEW_BLOCKS).url)
    page.until(page["new-chat"].is_displayed)
    page.ask(max_tokens=str(len(words)))
    html = "document.querySelector('.answer').innerHTML"
    lists = '<ul><li>one</li><li>two</li></ul><ol start="1"><li>three</li></ol>'
    page.until(lambda: "&lt;img src=x&gt;" in page.run(f"return {html}"))
    assert re.sub(r' class=""', "", page.run(f"return {html}")) == (
        "<h3>T</h3><p><strong>bold</strong> <em>thin</em> <code>&lt;b&gt;</code></p>"
        f"{lists}<pre><code>a &lt; *b*</code></pre><p>&lt;img src=x&gt;</p>"
    )
    page.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    page["answers"].find_element(By.CSS_SELECTOR, ".foot button").click()
    assert page.run("return window.copied") == words
    assert page.errors() == []
    browser.get("about:blank")
