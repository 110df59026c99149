"""The HTML report: one file, read as a person does in a real browser."""

import json
import os
import re
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_callbacks import DEFAULT_METRICS, evaluate_retrieval, evaluate_trials
from fewshot_callbacks.functional.retrieval.registry import METRICS
from fewshot_callbacks.functional.verification.identification import IDENTIFICATION_METRICS
from fewshot_callbacks.functional.verification.trials import TRIAL_METRICS
from fewshot_callbacks.report import Model, ReportItems, ReportSettings, pictures_of_files, write_report, write_trials
from fewshot_callbacks.report.page import write_whole
from tests.messages import missing_facts, refused
from tests.report.browser import CONTRAST, emulate, open_browser, resize

MARKUP = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
NAMES = [MARKUP, "eagle owl", "{{ 7 * 7 }}", "Ω & <b>bold</b>", *(f"class {n}" for n in range(60))]
MISLABELLED = (5, 77, 130)
# Slices of the queries.
CAMERAS = [MARKUP, "roof", "بيت", "a long name " * 40]
# Queries and the training items that are copies of them.
COPIES = ((0, 3), (40, 41))


def noisy_classes(noise, seed=0, per_class=5):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(NAMES), 16, generator=generator)
    rows = centres.repeat_interleave(per_class, 0)
    return rows + noise * torch.randn(rows.shape, generator=generator)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    embeddings = noisy_classes(0.45)
    labels = [name for name in NAMES for _ in range(5)]
    for index in MISLABELLED:
        labels[index] = NAMES[(index // 5 + 7) % len(NAMES)]
    train = noisy_classes(0.45, seed=1)[:50]
    for query, item in COPIES:
        train[item] = embeddings[query]
    files = [folder / f"{index:03}.png" for index in range(len(labels))]
    for index, file in enumerate(files):
        Image.new("L", (30, 20), index % 200 + 40).save(file)
    files[7].unlink()
    files[8].write_bytes(b"no image")
    items = ReportItems(embeddings, labels, "items", pictures_of_files(files, 96), [file.name for file in files])
    metrics = (*DEFAULT_METRICS[:-1], "recall@precision0.5", "recall@precision0.9")
    cameras = [CAMERAS[index % 4] for index in range(len(labels))]
    report = evaluate_retrieval(embeddings, labels, metrics=metrics, slices={"camera": cameras})
    weaker = embeddings + 0.6 * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(2))
    other = Model(evaluate_retrieval(weaker, labels, metrics=metrics), ReportItems(weaker, labels), name="weaker")
    split = ReportItems(train, ["train"] * 50, "training items")
    words = {"title": f"Report {MARKUP}", "name": MARKUP}
    written = write_report(folder / "report.html", report, items, train=split, other=other, **words)
    html = written.path.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    return SimpleNamespace(
        **vars(written), html=html, data=data, report=report, other=other, embeddings=embeddings, labels=labels
    )


@pytest.fixture(scope="module")
def browser(example):
    browser = open_browser()
    browser.get(example.path.as_uri())
    yield browser
    browser.quit()


@pytest.fixture
def page(browser, example):
    resize(browser, 1280, 900)
    emulate(browser, "light")
    browser.get(example.path.as_uri())
    return browser


def text_of(page, name):
    return page.find_element("id", name).get_attribute("textContent")


def move_to_threshold(page, index):
    page.execute_script(
        "const s = document.getElementById('slider'); s.value = arguments[0]; s.dispatchEvent(new Event('input'));",
        index,
    )


def class_rows(page):
    return page.execute_script(
        "return [...document.querySelectorAll('#class-table tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )


def type_into(page, name, words):
    field = page.find_element("id", name)
    field.clear()
    field.send_keys(words)


def test_mislabelled_items_and_copies_in_the_training_set_are_found(example):
    listed = [int(suspect["item"].partition("-")[2]) for suspect in example.data["suspects"]]
    assert set(listed[: len(MISLABELLED)]) == set(MISLABELLED)
    between = next(group for group in example.data["duplicates"] if "between" in group["kind"])
    assert {tuple(int(name.partition("-")[2]) for name in pair[:2]) for pair in between["pairs"]} >= set(COPIES)
    assert [pair[2] for pair in between["pairs"][:2]] == [1.0, 1.0]


def test_the_page_names_no_address_to_load_from(example):
    html = example.html
    assert not re.findall(r"""(?:src|href|action|url\()\s*=?\s*["'(]?(?:https?:)?//""", html)
    assert set(re.findall(r"https?://[^\s\"'<>]+", html)) <= {"http://www.w3.org/2000/svg"}  # a name of a namespace
    assert "default-src 'none'" in html


def test_pictures_that_cannot_be_read_are_named_and_the_others_shown(example):
    assert any("007.png" in line and "008.png" in line and "2 images" in line for line in example.omissions)
    assert len(example.data["images"]) > 200
    assert missing_facts(example.html, ("Exif", "<bdi>white</bdi>")) == []


def test_the_page_tells_its_size_and_keeps_below_max_mb(example, tmp_path):
    assert example.size == example.path.stat().st_size
    assert f"{example.size / 1e6:.1f} MB" in example.html or f"{example.size / 1e3:.0f} kB" in example.html
    items = ReportItems(example.embeddings, example.labels, picture=lambda _: torch.rand(3, 90, 90))
    small = write_report(tmp_path / "small.html", example.report, items, settings=ReportSettings(max_mb=0.4))
    assert small.size < 0.4e6
    assert any(missing_facts(line, ("images", "0.4 MB")) == [] for line in small.omissions)


def tables_of_slices(browser):
    """The cells of each table of slices, the headings first."""
    return browser.execute_script("""return [...document.querySelectorAll('#slices table')].map(
        table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent)))""")


def test_each_slice_has_its_value_and_its_gain_the_worst_first(page, example):
    values, gains = tables_of_slices(page)
    precision = example.report.per_query["mAP"]
    weaker = example.other.report.per_query["mAP"]
    expected = {}
    for code, name in enumerate(CAMERAS):
        chosen = torch.arange(len(precision)) % 4 == code
        chosen &= ~precision.isnan()
        classes = {example.labels[index] for index in chosen.nonzero().flatten().tolist()}
        numbers = (precision[chosen].mean(), weaker[chosen].mean(), int(chosen.sum()), len(classes))
        expected[name if len(name) < 160 else f"{name[:159]}…"] = [float(number) for number in numbers]
    assert values[0][:5] == ["camera", "mAP", "interval", "queries", "classes"]
    assert [row[0] for row in values[1:]] == sorted(expected, key=lambda name: expected[name][0])
    for name, value, interval, queries, classes, _ in values[1:]:
        assert float(value) == pytest.approx(expected[name][0], abs=6e-5)
        assert [int(queries), int(classes)] == expected[name][2:]
        low, high = map(float, interval.split(" to "))
        assert low < float(value) < high
    assert [row[0] for row in gains[1:]] == sorted(expected, key=lambda name: expected[name][0] - expected[name][1])
    for name, first, second, difference, *_ in gains[1:]:
        assert [float(first), float(second)] == pytest.approx(expected[name][:2], abs=6e-5)
        assert float(difference) == pytest.approx(expected[name][0] - expected[name][1], abs=6e-5)
    assert missing_facts(page.find_element("id", "slices").text, ("95 %", "worst slice", "Holm")) == []


def test_the_worst_slices_of_many_are_listed_and_fit_into_max_mb(example, browser, tmp_path):
    labels = torch.arange(1200) // 2
    rows = noisy_classes(0.4, per_class=19)[:1200]
    cuts = [f"{'&' * 200}{query % 60}" for query in range(1200)]
    report = evaluate_retrieval(
        rows, labels, slices={"cut": cuts, "side": labels % 2, "cut again": cuts, "third": cuts}
    )
    items = ReportItems(rows, labels.tolist(), picture=lambda _: torch.rand(3, 90, 90))
    few = ReportSettings(max_mb=0.8, worst=20, searchable=20, suspects=0, duplicates=0)
    written = write_report(tmp_path / "many.html", report, items, settings=few)
    browser.get(written.path.as_uri())
    of_cut, _, of_side, _ = tables_of_slices(browser)
    precision = report.per_query["mAP"]
    worst = sorted(float(precision[torch.arange(1200) % 60 == cut].mean()) for cut in range(60))
    assert [float(row[1]) for row in of_cut[1:]] == pytest.approx(worst[:50], abs=6e-5)
    assert len(of_side) == 3
    assert 0.6e6 < written.size < 0.8e6
    assert any(missing_facts(line, ("50 of 60", "cut")) == [] for line in written.omissions)


def test_the_report_says_that_queries_are_sampled(example, tmp_path):
    settings = ReportSettings(worst=5, searchable=10, suspects=0, duplicates=0, confusion_queries=50)
    items = ReportItems(example.embeddings, example.labels)
    omissions = write_report(tmp_path / "few.html", example.report, items, settings=settings).omissions
    assert any("15 of 320 queries" in line or "14 of 320 queries" in line for line in omissions)
    assert any(missing_facts(line, ("Confusions", "50 queries")) == [] for line in omissions)


@pytest.mark.parametrize("similarity", ["euclidean", "hamming"])
def test_a_gallery_searched_by_each_similarity_has_a_report(similarity, tmp_path):
    rows = noisy_classes(0.5)
    if similarity == "hamming":
        rows = (rows > 0).float()
    labels = torch.arange(len(NAMES)).repeat_interleave(5)
    ids = torch.arange(len(rows))
    names = dict(enumerate(NAMES))
    query = ids % 5 == 0
    arguments = rows[query], labels[query], rows, labels
    report = evaluate_retrieval(*arguments, query_ids=ids[query], gallery_ids=ids, similarity=similarity)
    queries = ReportItems(rows[query], labels[query].tolist(), "queries", label_names=names, ids=ids[query])
    gallery = ReportItems(rows, labels.tolist(), "gallery", label_names=names, ids=ids)
    written = write_report(tmp_path / "report.html", report, queries, gallery)
    assert "eagle owl" in written.path.read_text(encoding="utf-8")


def test_a_single_class_with_texts_instead_of_images_and_intervals_of_another_confidence(tmp_path):
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    items = ReportItems(rows, ["one"] * 12, picture=lambda index: f"text {index}")
    report = evaluate_retrieval(rows, ["one"] * 12, confidence=0.9)
    written = write_report(tmp_path / "report.html", report, items)
    assert any("Suspects" in line for line in written.omissions)
    html = written.path.read_text(encoding="utf-8")
    assert "text 3" in html
    assert "90 % interval" in html
    assert "95 % interval" not in html


def test_without_metrics_of_pairs_there_is_no_threshold_to_move(example, browser, tmp_path):
    report = evaluate_retrieval(example.embeddings, example.labels, metrics=("mAP", "recall@1"))
    written = write_report(tmp_path / "report.html", report, ReportItems(example.embeddings, example.labels, "queries"))
    browser.get_log("browser")
    browser.get(written.path.as_uri())
    assert browser.find_elements("id", "threshold") == []
    assert browser.find_elements("css selector", "#class-table tbody tr")
    assert browser.find_elements("css selector", "#panels > *")
    assert browser.get_log("browser") == []


def test_an_estimate_has_no_report(example, tmp_path):
    few = evaluate_retrieval(example.embeddings, example.labels, max_queries=50)
    with refused(ValueError, "50 queries", "320 items", "max_queries"):
        write_report(tmp_path / "report.html", few, ReportItems(example.embeddings, example.labels))


def test_an_interrupt_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def test_the_page_requests_nothing_and_logs_no_error(example, browser):
    browser.get_log("performance")
    browser.get(example.path.as_uri())
    time.sleep(0.5)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [
        event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requested if not url.startswith(("file://", "data:"))] == []
    assert browser.get_log("browser") == []


def test_labels_are_shown_as_text_not_as_markup(page):
    assert page.title.startswith("Report </script>")
    assert "owned" not in page.title.partition("</script>")[0]
    assert page.execute_script("return document.querySelectorAll('b b, img[src=\"x\"]').length") == 0
    type_into(page, "filter", "{{ 7")
    assert class_rows(page)[0][0] == "{{ 7 * 7 }}"


def test_names_are_kept_apart_from_the_numbers_beside_them(page):
    """Beside a word that is written from right to left, a number would stand on its other side."""
    isolated = "return [...document.querySelectorAll(arguments[0])].map(e => getComputedStyle(e).unicodeBidi)"
    for place in (".lead bdi", "td.confused bdi", "#slices tbody bdi"):
        assert set(page.execute_script(isolated, place)) == {"isolate"}


@pytest.mark.parametrize("share", [0.2, 0.95])
def test_the_numbers_are_those_of_the_chosen_threshold(page, example, share):
    counts = example.report.pair_counts
    index = int(share * (len(counts.thresholds) - 1))
    move_to_threshold(page, index)
    threshold = float(counts.thresholds[index])
    exact = evaluate_retrieval(example.embeddings, example.labels, threshold=threshold, label_groups=None)
    assert float(text_of(page, "at-threshold")) == pytest.approx(threshold, abs=1e-4)
    for name, value in (
        ("precision", exact["pair_precision"]),
        ("recall", exact["pair_recall"]),
        ("f1", exact["pair_f1"]),
    ):
        assert float(text_of(page, f"at-{name}")) == pytest.approx(value, abs=2e-3)
    matches = exact.decision.false_positives / counts.irrelevant
    assert float(text_of(page, "at-fmr")) == pytest.approx(matches, rel=0.01, abs=1e-5)
    assert float(text_of(page, "at-fnmr")) == pytest.approx(1 - exact["pair_recall"], abs=2e-3)
    time.sleep(0.5)
    assert text_of(page, "at-precision") in text_of(page, "spoken")


def test_operating_points_are_exact(page, example):
    buttons = page.find_elements("css selector", "#points button")
    assert [button.text for button in buttons] == ["best F1", "precision 0.5", "precision 0.9", "equal error rates"]
    buttons[1].click()
    point = example.report.at_precision[0.5]
    assert float(text_of(page, "at-recall")) == pytest.approx(point.recall, abs=5.1e-5)
    assert buttons[1].get_attribute("aria-pressed") == "true"


def test_the_threshold_moves_by_keyboard_and_by_dragging_the_figure(page):
    slider = page.find_element("id", "slider")
    before = text_of(page, "at-threshold")
    slider.send_keys("\ue012")  # arrow to the left
    assert float(text_of(page, "at-threshold")) < float(before)
    figure = page.find_element("css selector", "#scores svg")
    from selenium.webdriver import ActionChains

    page.execute_script(
        "arguments[0].scrollIntoView({block: 'end'})", figure
    )  # not below the numbers, which stay in view
    ActionChains(page).drag_and_drop_by_offset(figure, -60, 0).perform()
    moved = float(text_of(page, "at-threshold"))
    ActionChains(page).drag_and_drop_by_offset(figure, 40, 0).perform()
    assert float(text_of(page, "at-threshold")) > moved


def test_the_table_sorts_filters_and_grows(page, example):
    assert len(class_rows(page)) == 50
    values = [float(row[2]) for row in class_rows(page)]
    assert values == sorted(values)
    page.find_element("css selector", "#class-table th:nth-child(1) button").send_keys("\ue007")  # enter
    head = page.find_element("css selector", "#class-table th:nth-child(1)")
    assert head.get_attribute("aria-sort") == "ascending"
    page.find_element("id", "more-classes").click()
    assert len(class_rows(page)) == len(NAMES)
    type_into(page, "filter", "EAGLE")
    assert [row[0] for row in class_rows(page)] == ["eagle owl"]
    label = example.report.label_names.index("eagle owl")
    is_owl = example.report.query_labels == label
    assert float(class_rows(page)[0][2]) == pytest.approx(
        float(example.report.per_query["mAP"][is_owl].mean()), abs=5.1e-4
    )


def test_search_finds_queries_by_label_and_by_number(page, example):
    shown = "return [...document.querySelectorAll('#panels .panel')].map(p => p.querySelector('h4').textContent)"
    worst = page.execute_script(shown)
    assert len(worst) == 12
    type_into(page, "search", "eagle owl")
    found = page.execute_script(shown)
    assert found
    assert all(head.startswith("eagle owl") for head in found)
    query = example.data["panels"][-1]["query"].partition("-")[2]
    type_into(page, "search", query)
    assert any(f"{int(query):03}.png" in head for head in page.execute_script(shown))
    type_into(page, "search", "no such label")
    assert page.execute_script(shown) == []
    assert text_of(page, "search-count").startswith("0 of")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (768, "light"), (1280, "light")])
def test_every_text_can_be_read_at_any_width(page, width, scheme):
    """No line is cut off, and no name of a metric broken: `recall@10` in two lines would read as `recall@1`."""
    resize(page, width, 844)
    emulate(page, scheme)
    time.sleep(0.3)
    page_of = "document.documentElement"
    assert page.execute_script(f"return {page_of}.scrollWidth <= {page_of}.clientWidth")
    assert page.execute_script(CONTRAST) == []
    lines = """return [...document.querySelectorAll('table.plain tbody th')].map(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return [cell.textContent, new Set([...range.getClientRects()].map(line => Math.round(line.top))).size];
    })"""
    found = dict(page.execute_script(lines))
    assert "recall@10" in found
    assert set(found.values()) <= {0, 1}


def test_a_long_path_stays_in_its_box(browser, tmp_path):
    rows = noisy_classes(0.3)
    rows[1] = rows[0]
    labels = [name for name in NAMES for _ in range(5)]
    files = [f"{'folder_of_a_long_name/' * 8}{index}.png" for index in range(len(rows))]
    items = ReportItems(rows, labels, "items", files=files)
    browser.get(write_report(tmp_path / "long.html", evaluate_retrieval(rows, labels), items).path.as_uri())
    outside = """return [...document.querySelectorAll('.panel bdi, .pair bdi')].filter(name => {
        const box = name.closest('li, .panel, .pair').getBoundingClientRect();
        return [...name.getClientRects()].some(line => line.right > box.right + 1);
    }).map(name => name.textContent)"""
    assert files[0] in browser.find_element("id", "duplicate-list").text
    for width in (390, 1280):
        resize(browser, width, 900)
        assert browser.execute_script(outside) == []


def test_pictures_and_fields_have_names(page):
    assert page.execute_script("return [...document.images].filter(i => !i.alt).length") == 0
    assert page.execute_script("return document.images.length") > 50
    fields = "return [...document.querySelectorAll('input, button')]"
    unnamed = f"{fields}.filter(e => !e.labels?.length && !e.textContent.trim()).length"
    assert page.execute_script(unnamed) == 0
    assert page.execute_script("return [...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0


def test_a_meaning_is_understood_without_the_row_above_it():
    """A report may show one metric alone."""
    words = re.compile(r"^the same\b|\bof these two\b|\bfor these\b|\bthe same thresholds\b", re.IGNORECASE)
    for metric in (*METRICS, *TRIAL_METRICS, *IDENTIFICATION_METRICS):
        assert not words.search(metric.meaning)


ROWS = "return [...document.querySelectorAll('table.measures tbody tr')].map(row => row.getBoundingClientRect())"
FIGURES = "return [...document.querySelectorAll('figure.drawn')].map(figure => figure.getBoundingClientRect())"


def test_a_report_of_trials_can_be_read_on_a_telephone_and_its_figures_stand_apart(browser, tmp_path):
    rng = np.random.default_rng(0)
    same = np.arange(400) % 2 == 0
    scores = rng.normal(size=400) + same
    path = tmp_path / "trials.html"
    write_trials(path, evaluate_trials(scores, same, folds=np.arange(400) % 5), scores.tolist(), same.tolist())
    resize(browser, 390, 900)
    browser.get(path.as_uri())
    rows = browser.execute_script(ROWS)
    assert len(rows) == 5
    assert all(row["height"] < 170 and row["left"] >= 0 and row["right"] <= 390 for row in rows)
    resize(browser, 1280, 900)
    browser.get(path.as_uri())
    assert all(row["height"] < 70 for row in browser.execute_script(ROWS))
    first, second = browser.execute_script(FIGURES)
    assert second["left"] - first["right"] >= 8 or second["top"] - first["bottom"] >= 8
    assert browser.get_log("browser") == []
