"""The page of sources: each claim has its evidence, and the evidence is there; tables of studies are those of their data."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
from scipy import stats

from tests.docs.pages import check_command
from tests.docs.tables import ROOT, names_of_tests, rows

PAGE = ROOT / "docs" / "sources.md"
SOURCES = {
    "The note on metrics and their feasibility": 15,
    "The note on hashing": 5,
    "Grouped Recall@K": 10,
    "The distance ratio": 20,
    "Average precision as a loss, and of binary codes": 10,
}
"""A section for each of the five sources, and the fewest claims that it holds."""
DEPARTURES = (
    "docs/average_precision_loss.md", "docs/class_count_invariance.md", "docs/discriminant_ratio.md",
    "docs/distance_ratio.md", "docs/exactness.md", "docs/feasibility.md", "configs/distance_ratio/README.md",
)  # fmt: skip
"""Pages that measure what a source claims, or define something otherwise."""


def section(page: Path, title: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    text = page.read_text(encoding="utf-8")
    [opening] = re.findall(rf"^(#+) {re.escape(title)}$", text, re.M)
    below = text.split(f"\n{opening} {title}\n")[1]
    return re.split(rf"^#{{1,{len(opening)}}} ", below, flags=re.M)[0]


def anchor(heading: str) -> str:
    """As GitHub and the documentation's site make it."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).replace(" ", "-")


def check_evidence(cell: str, page: Path = PAGE) -> int:
    """Check that each test, link and command of a cell is there, and return how many there are."""
    tests = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", cell)
    for file, name in tests:
        assert name in names_of_tests(file), f"{file} has no {name}"
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", cell)
    for path, place in links:
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"there is no {path}"
        if place:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            assert place in {anchor(heading) for heading in headings}, f"{path} has no #{place}"
    commands = re.findall(r"`(python [^`]+)`", cell)
    for command in commands:
        check_command(command.split())
    return len(tests) + len(links) + len(commands)


@pytest.mark.parametrize("title", SOURCES)
def test_every_claim_has_a_verdict_and_evidence_that_is_there(title: str) -> None:
    claims = rows(section(PAGE, title))
    assert len(claims) >= SOURCES[title]
    for claim, where, done, verdict in claims:
        assert claim, where
        assert where, claim
        assert re.match(r"\*\*(seen|differs|not tried)\*\*", verdict), (claim, verdict)
        assert check_evidence(done) or verdict.startswith("**not tried**"), claim


def test_each_source_has_its_section_and_the_others_are_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for title in SOURCES:
        assert f"](#{anchor(title)})" in text, title
    for name in ("Revaud", "McSherry and Najork", "HashNet"):
        assert name in text


def test_departures_are_one_table_which_the_pages_name() -> None:
    departures = rows(section(PAGE, "Deliberate departures"))
    assert all(len(cells) == 3 and all(cells) for cells in departures)
    text = " ".join(cell for cells in departures for cell in cells)
    check_evidence(text)
    for words in ("ε", "[0, 1]", "normal over groups", "distributions", "checkpoints of one training"):
        assert words in text, words
    for page in DEPARTURES:
        assert "sources.md#deliberate-departures" in (ROOT / page).read_text(encoding="utf-8"), page


@pytest.mark.parametrize("page", ["class_count_invariance.md", "feasibility.md", "average_precision_loss.md"])
def test_the_evidence_of_the_pages_is_there(page: str) -> None:
    path = ROOT / "docs" / page
    for cells in rows(path.read_text(encoding="utf-8")):
        check_evidence(" ".join(cells), path)


def data_of(study: str) -> dict:
    return json.loads((ROOT / "docs" / "figures" / "data" / f"{study}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("study", "first", "collapses"), [("health", 0, 8), ("health_icons", 11, 1)])
def test_correlations_are_those_of_the_checkpoints(study: str, first: int, collapses: int) -> None:
    checkpoints, page = data_of(f"embedding_{study}"), ROOT / "docs" / "embedding_health.md"
    runs = {(row["method"], row["rate"], row["seed"]) for row in checkpoints}
    assert (len(checkpoints), len(runs)) == (72, 24)
    said = [(row["method"], row["step"]) for row in checkpoints if row["collapse"]]
    assert {method for method, _ in said} == {"attraction"}
    assert len(said) == collapses
    assert collapses == 1 or sum(step == 160 for _, step in said) == 4
    sound = [row for row in checkpoints if row["method"] != "attraction"]
    columns = [(checkpoints, "mAP"), (checkpoints, "accuracy"), (sound, "mAP")]
    columns.append(([row for row in sound if row["step"] == 160], "mAP"))
    printed = [cells for cells in rows(section(page, "What the numbers tell")) if cells[0].startswith("`")]
    assert len(printed) == 22
    for name, *cells in printed[first : first + 11]:
        for (some, outcome), cell in zip(columns, cells, strict=True):
            pairs = [(row[name.strip("`")], row[outcome]) for row in some]
            assert abs(stats.spearmanr(pairs).statistic) == pytest.approx(abs(float(cell.split()[0])), abs=0.0051)


def test_means_of_draws_are_those_of_the_data() -> None:
    printed = {cells[0]: cells for cells in rows(section(ROOT / "docs/class_count_invariance.md", SIZES)) if cells}
    for draws in data_of("class_count_invariance")["draws"]:
        _, recall, grouped, ends, *_ = printed[str(draws["classes"])]
        for cell, metric in ((recall, "recall"), (grouped, "grouped")):
            values = [100 * one["value"] for one in draws[metric]]
            expected = f"{statistics.mean(values):.1f}"
            if len(values) > 1:
                expected += f" ({min(values):.1f} to {max(values):.1f})"
            assert cell == expected
        low, high = (100 * statistics.mean(one[end] for one in draws["grouped"]) for end in ("low", "high"))
        assert ends == f"{low:.1f} to {high:.1f}"


SIZES = "One network, fewer and more classes"


def paired(first: list[float], second: list[float]) -> tuple[float, float]:
    """Mean of second minus first, and half of its 95 % interval over the seeds."""
    changes = [b - a for a, b in zip(first, second, strict=True)]
    half = float(stats.t.ppf(0.975, len(changes) - 1)) * statistics.stdev(changes) / len(changes) ** 0.5
    return statistics.mean(changes), half


def test_curves_of_both_heads_are_those_of_the_data() -> None:
    printed = {cells[0]: cells[1:] for cells in rows(section(ROOT / "docs/distance_ratio.md", CURVES))}
    names = {"1-shot": "1-shot", "5-shot": "5-shot", "5-shot, nearest": "5-shot, nearest support point"}
    for task, heads in data_of("distance_ratio")["tasks"].items():
        for episodes, cell in zip((200, 1200, 2000), printed[names[task]], strict=True):
            softmax, dr = ([100 * dict(seed["val"])[episodes] for seed in heads[head]] for head in ("softmax", "dr"))
            change, half = paired(softmax, dr)
            expected = f"{statistics.mean(softmax):.2f}, {statistics.mean(dr):.2f}; {change:+.2f} ±{half:.2f}"
            assert cell == expected


CURVES = "Training (figures 2, 3 and 6)"


def is_below_zero(difference: str) -> bool:
    """Whether the interval over classes of a cell like `-0.024 [-0.033, -0.015] ±0.041` is."""
    bracket = re.search(r"\[(\S+), (\S+)\]", difference)
    assert bracket is not None, difference
    return float(bracket[2]) < 0


def test_soft_average_precision_is_called_better_where_both_intervals_say_so() -> None:
    page = ROOT / "docs" / "average_precision_loss.md"
    better: dict[str, set[str]] = {}
    for of in ("glyphs", "icons"):
        table = re.findall(rf"<!-- table: {of} -->\n(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.S)[0]
        data = data_of("average_precision_loss")["mAP"][of]
        titles = {title: name for name, title in data_of("average_precision_loss")["titles"].items()}
        better[of] = set()
        for title, _, _, _, _, difference, *_ in rows(table):
            if not difference:
                continue
            change, half = paired(data["ap"], data[titles[title]])  # more digits than the cell has
            if is_below_zero(difference) and change + half < 0:
                better[of].add(titles[title])
    ours = {"ap-5-bins", "ap-batch-64", "ap-batch-1024", "ap-batch-4096"}
    assert better["glyphs"] - ours == {"softmax", "arcface", "smoothap"}
    assert better["icons"] - ours == {"arcface", "smoothap", "fastap"}
    result = re.search(r"\*\*Result\.\*\*.*?\n\n", page.read_text(encoding="utf-8"), re.S)
    assert result is not None
    words = " ".join(result[0].split())
    assert "SmoothAP and ArcFace on both sets, of the softmax head on glyphs, and of FastAP on icons" in words


KINDS = (
    "AVX2 alone", "half-precision products", "simulated", "kind not recorded", "kind of processor", "not measured:",
)  # fmt: skip


@pytest.mark.parametrize("name", ["benchmarks/README.md", "docs/measurements.md"])
def test_measured_tables_name_the_kind_of_processor(name: str) -> None:
    page = ROOT / name
    for title in re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.M):
        words = " ".join(section(page, title).split())
        assert any(kind in words for kind in KINDS) or "**Not measured" in words, title


def test_a_kind_that_an_option_simulates_is_called_simulated() -> None:
    for page in (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")):
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            if "ONEDNN_MAX_CPU_ISA" in paragraph:
                assert "simulated" in paragraph, (page, paragraph)


def test_the_readme_gives_the_range_over_kinds() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    compared = rows(section(ROOT / "README.md", "Compared with what you use today"))
    kinds = [cells for cells in compared if len(cells) == 3]
    assert [cells[0] for cells in kinds] == [
        "half-precision products", "byte products (VNNI) alone, simulated", "AVX2 alone",
    ]  # fmt: skip
    multiples = [float(number) for cells in kinds for cell in cells[1:] for number in re.findall(r"\d\.\d+", cell)]
    assert "0.3 to 3 times" in text.split("\n\n")[2]
    assert round(min(multiples), 1) == 0.3
    assert max(multiples) <= 3
