"""The page in a real browser: nothing reaches the console, names stay text, and cells open by mouse and keyboard."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from scripts.common.answers import Answers
from scripts.common.features import Features
from scripts.reporting.details import Predicted, add_pictures, choose, detail
from scripts.reporting.feature_page import render_features
from scripts.reporting.feature_study import accuracies, study
from scripts.reporting.page import PageContent, page_data, render
from scripts.reporting.run_record import RunRecord
from scripts.reporting.thumbnails import Thumbnails
from tests.scripts.reporting.browser import MISSING
from utils.data.formats.readers import MemoryImages

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")
HOSTILE = "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">"
ENTER = "\ue007"
RIGHT = "\ue014"
DOWN = "\ue015"
# Images load when they scroll into view: here all at once, and each is waited for; one that cannot be decoded is an error.
WIDTHS = """return Promise.all([...document.images].map((one) => {
    one.loading = "eager";
    return one.decode().then(() => one.naturalWidth);
}))"""


def page(path, classes):
    """A page of a run with this many classes, one of which has a hostile name; two images of class 1 are taken for 2."""
    labels = np.repeat(np.arange(classes), 4)
    predicted = labels.copy()
    predicted[4:6] = 2
    answers = Answers(5 * torch.eye(classes)[predicted], torch.from_numpy(labels))
    names = (HOSTILE, *(f"class {one}" for one in range(1, classes)))
    grey = Image.new("L", (8, 8), 128)
    one = Predicted(0, answers, [f"val[{n}]" for n in range(len(labels))], lambda _: grey, "x")
    chosen = choose(one, 1)
    store = Thumbnails()
    made = detail(one, chosen, store, add_pictures(one, chosen, store, lambda: None), 1)
    steps = {
        name: np.arange(1.0, 501.0) for name in ("step", "loss", "top1", "top5", "lr", "gradient_norm", "loss_scale")
    }
    epochs = {name: np.array([1.0, 2.0]) for name in ("epoch", "val_loss", "val_top1", "seconds")}
    run = RunRecord(HOSTILE, None, steps=steps, epochs=epochs | {"step": np.array([250.0, 500.0])})
    data = page_data([run]) | {"details": [made | {"classes": 0}], "classes": [list(names)], "images": store.uris}
    path.write_text(render(PageContent([run], data)), encoding="utf-8")
    return path


def cell_text(browser):
    return browser.run(
        "return document.getElementById('cell').hidden ? '' : document.getElementById('cell').textContent"
    )


@pytest.mark.parametrize(("classes", "width", "dark"), [(6, 1440, False), (6, 390, True), (40, 390, True)])
def test_the_page_fits_shows_names_as_text_and_reports_no_error(browser, tmp_path, classes, width, dark):
    browser.open(page(tmp_path / "page.html", classes), width=width, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    table = browser.run(
        "const box = document.querySelector('#classes .scroll'); return [box.scrollWidth, box.clientWidth]"
    )
    assert table[0] <= table[1], "the class table fits, too"
    assert browser.run("return document.title").endswith("training report")
    assert browser.run("return document.querySelectorAll('img[onerror]').length") == 0
    assert HOSTILE in browser.run("return document.getElementById('unsure').textContent")
    assert browser.run("return document.querySelectorAll('#charts svg polyline').length") >= 6
    assert browser.run("return document.querySelectorAll('#mistakes img').length") == 2
    assert browser.run(WIDTHS) and set(browser.run(WIDTHS)) == {8}
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark
    assert browser.messages() == []


def test_a_click_on_a_cell_of_the_table_shows_its_images(browser, tmp_path):
    browser.open(page(tmp_path / "page.html", 6))
    browser.click(".matrix-table tbody tr:nth-child(2) td:nth-child(4) button")
    assert "class 1 taken for class 2: 2 images" in cell_text(browser)
    assert browser.run("return document.querySelectorAll('#cell img').length") == 2
    browser.click("#cell button")
    assert cell_text(browser) == ""
    browser.press(".matrix-table tbody tr:nth-child(1) td:nth-child(2) button", ENTER)
    assert f"{HOSTILE} recognised: 4 images" in cell_text(browser)
    assert browser.messages() == []


def test_a_canvas_opens_the_cell_under_the_mouse_and_the_one_reached_by_keys(browser, tmp_path):
    browser.open(page(tmp_path / "page.html", 80))
    browser.run("document.querySelector('#matrix-tools select').value = 'given'")
    browser.run("document.querySelector('#matrix-tools select').dispatchEvent(new Event('change'))")
    browser.run("document.querySelector('.viewport').scrollIntoView({block: 'center'})")
    canvas = "const box = document.querySelector('.viewport canvas').getBoundingClientRect();"
    left, top, width, height = browser.run(f"{canvas} return [box.left, box.top, box.width, box.height]")
    side = (min(width, height) - 20) / 80  # of a cell, with all classes in view
    # row 1, column 2
    x = left + 20 + 2.5 * side
    y = top + 20 + 1.5 * side
    for kind in ("mousePressed", "mouseReleased"):
        browser.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert "class 1 taken for class 2: 2 images" in cell_text(browser)
    browser.click("#cell button")
    browser.press(".viewport", RIGHT + RIGHT + RIGHT + DOWN + ENTER)
    assert "class 1 taken for class 2: 2 images" in cell_text(browser)
    assert browser.messages() == []


def test_a_chart_is_read_with_the_keyboard_and_over_another_axis(browser, tmp_path):
    browser.open(page(tmp_path / "page.html", 6))
    browser.press("#charts svg", RIGHT + RIGHT)
    tip = browser.run("return document.getElementById('tip').textContent")
    assert tip.startswith("epoch 0.0") and "training" in tip
    browser.run(
        "const one = document.querySelector('#chart-tools select'); one.value = 'hours'; one.dispatchEvent(new Event('change'))"
    )
    browser.press("#charts svg", RIGHT)
    assert browser.run("return document.getElementById('tip').textContent").startswith("hours ")
    assert browser.messages() == []


def test_of_many_runs_the_values_nearest_to_the_pointer_are_read(browser, tmp_path):
    epochs = {name: np.array([1.0, 2.0]) for name in ("epoch", "step", "seconds")}
    losses = np.linspace(1, 2, 30)
    runs = [
        RunRecord(f"run {n}.", None, epochs=epochs | {"val_loss": np.full(2, loss)}) for n, loss in enumerate(losses)
    ]
    (tmp_path / "page.html").write_text(render(PageContent(runs, page_data(runs))), encoding="utf-8")
    browser.open(tmp_path / "page.html")
    for y, named in ((0, "run 29."), (226, "run 0.")):  # the highest loss lies at the top
        browser.run(
            f"LineChart.all[0].read(2, 100, document.querySelector('#charts svg').getBoundingClientRect().y + {y})"
        )
        tip = browser.run("return document.getElementById('tip').textContent")
        assert named in tip and tip.count("run ") == 12 and "and 18 more" in tip
    assert browser.messages() == []


def test_a_run_without_an_epoch_is_shown_over_steps_and_says_so(browser, tmp_path):
    run = RunRecord("run", None, steps={name: np.arange(1.0, 9.0) for name in ("step", "loss")})
    (tmp_path / "page.html").write_text(render(PageContent([run], page_data([run]))), encoding="utf-8")
    browser.open(tmp_path / "page.html")
    assert browser.run("return document.querySelector('#chart-tools select').value") == "step"
    assert browser.run("return document.querySelectorAll('#charts svg polyline').length") == 1
    assert browser.messages() == []


def test_classes_are_sorted_by_a_click_on_the_head(browser, tmp_path):
    browser.open(page(tmp_path / "page.html", 6))
    first = "return document.querySelector('#classes tbody th').textContent"
    assert browser.run(first) == "class 1", "the hardest"
    browser.click("#classes thead th:nth-child(3) button")
    assert browser.run(first) != "class 1"
    assert (
        browser.run("return document.querySelector('#classes th[aria-sort]').getAttribute('aria-sort')") == "descending"
    )


def test_a_page_of_features_alone_is_filled(browser, tmp_path):
    draw = np.random.default_rng(0)
    labels = np.arange(12) % 2
    images = MemoryImages(torch.zeros(12, 1, 8, 8, dtype=torch.uint8), torch.from_numpy(labels))

    def features(split):
        values, thumbnails = (draw.random((12, size), dtype=np.float32) for size in (4, 256))
        ids = [f"{split}[{n}]" for n in range(12)]
        return Features(split, values, thumbnails, labels, np.arange(12), ids, ("ape", "bee"), images)

    of = study({split: features(split) for split in ("train", "val")}, "val")
    loaded = SimpleNamespace(path="last.pt", settings={"dataname": "digits"}, arch="fc")
    (tmp_path / "features.html").write_text(render_features(of, loaded, accuracies(of)), encoding="utf-8")
    browser.open(tmp_path / "features.html")
    assert browser.run("return document.querySelectorAll('#feature-map circle').length") == 12
    assert browser.messages() == []
