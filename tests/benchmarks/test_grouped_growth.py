"""The benchmark runs, and counts the pairs and groups that it names."""

from tests.scripts import imported_script


def test_columns_are_multiples_of_the_first_row_in_three_kinds_of_growth(capsys):
    with imported_script("benchmarks/grouped_growth.py") as growth:
        small, large = growth.Size(400, 20, 5), growth.Size(800, 40, 5)
        assert (small.groups, large.groups, small.pairs_in_groups) == (4, 8, 4 * 100**2)
        _, line = growth.lines("items", {small: [1.0, 2.0, 4.0], large: [3.0, 4.0, 8.0]})
        assert line == ("items", 800, 5, 8, 4.0, (2.0, 2.0, 3.0), 2.0, 2.0)
        words = "--items 200 400 --items-of-groups 400 --group-sizes 2 4 --group-size 2 --per-class 20 --dim 8"
        assert growth.main([*words.split(), "--rounds", "1", "--threads", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 3 * 2
    assert [row.split(" | ")[1:4] for row in rows[4:6]] == [["200", "10", "1"], ["400", "20", "1"]]
