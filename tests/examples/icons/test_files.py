"""Icon themes as the freedesktop specification lays them out: base folders, index.theme, families, the nearest file."""

from pathlib import Path

from icons.files import IconFolder, base_folders, families, find_themes, icon_files

from tests.examples.icon_trees import SVG, picture, theme


def test_base_folders_follow_the_variables_and_their_defaults() -> None:
    given = {"XDG_DATA_HOME": "/d", "XDG_DATA_DIRS": "/a:relative::/d:/b"}
    default, chosen = (list(map(str, base_folders({"HOME": "/h", **variables}))) for variables in ({}, given))
    assert default == ["/h/.icons", "/h/.local/share/icons", "/usr/local/share/icons", "/usr/share/icons"]
    assert chosen == ["/h/.icons", "/d/icons", "/a/icons", "/b/icons"]


def test_themes_are_found_with_sizes_contexts_and_inheritance(tmp_path: Path) -> None:
    folders = {
        "32/apps": {"Size": 32, "Context": "Applications", "Type": "Fixed"},
        "32@2/apps": {"Size": 32, "Scale": 2},
        "any": {"Size": 48, "MinSize": 16, "MaxSize": 256, "Type": "Scalable", "Context": "Actions"},
        "wrong": {"Size": "large"},
    }
    index = theme(tmp_path, "Art", folders, inherits=("Old", "hicolor")) / "index.theme"
    index.write_text(f"{index.read_text()}\n[unlisted]\nSize=8\n")
    theme(tmp_path, "hicolor", {"32": {"Size": 32}})
    for name, content in {"Broken": b"\xff\xfe\x00", "Empty": b"", "Bare": b"[Icon Theme]\nName=x\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.theme").write_bytes(content)
    (tmp_path / "NoIndex").mkdir()
    (found,) = find_themes([tmp_path, tmp_path / "missing"])
    assert (found.name, found.inherits) == ("Art", ("Old", "hicolor"))
    assert found.folders == (
        IconFolder("32/apps", 32, 32, 32, "Applications"),
        IconFolder("32@2/apps", 64, 64, 64, ""),
        IconFolder("any", 48, 16, 256, "Actions"),
    )


def test_a_theme_of_two_base_folders_is_one_and_the_first_has_precedence(tmp_path: Path) -> None:
    for root, size in (("user", 16), ("system", 32)):
        home = theme(tmp_path / root, "Art", {"icons": {"Size": size}})
        picture(0).save(home / "icons" / f"{root}.png")
        picture(1).save(home / "icons" / "both.png")
    (found,) = find_themes([tmp_path / "user", tmp_path / "system"])
    assert found.folders[0].size == 16
    files = icon_files([found], 16, vectors=True, symbolic=False)
    assert sorted(files) == ["both", "system", "user"]
    assert files["both"].path.is_relative_to(tmp_path / "user")


def test_variants_of_a_theme_are_one_family(tmp_path: Path) -> None:
    for name, inherits in {
        "Art": (),
        "Art-Dark": ("Other",),  # equal but for a word of shade
        "art-icon-theme-blue": (),
        "Art-human": ("Art-common",),  # inherits Art over another theme, and begins with its name
        "Art-common": ("Art-human", "Art"),  # two that inherit from each other
        "Art-of-others": (),  # begins with the name, but inherits nothing
        "Artful": ("Art",),  # inherits, but the name only looks alike
        "Mono": (),  # a word of shade alone
    }.items():
        theme(tmp_path, name, {"icons": {"Size": 16}}, inherits)
    linked = theme(tmp_path, "eArt", {"icons": {"Size": 16}, "own": {"Size": 32}, "more": {"Size": 64}})
    for folder in ("icons", "more"):
        (linked / folder).rmdir()
        (linked / folder).symlink_to("../Art/icons")
    found = {name: [theme.name for theme in group] for name, group in families(find_themes([tmp_path])).items()}
    assert found == {
        "Art": ["Art", "eArt", "Art-Dark", "Art-human", "Art-common", "art-icon-theme-blue"],
        **{name: [name] for name in ("Art-of-others", "Artful", "Mono")},
    }


def test_the_nearest_size_counts_and_pixels_come_before_vectors(tmp_path: Path) -> None:
    folders = {
        "16": {"Size": 16, "Context": "Actions"},
        "24": {"Size": 24, "Context": "Actions"},
        "32": {"Size": 32, "Context": "Emblems"},
        "any": {"Size": 48, "MinSize": 30, "MaxSize": 256, "Type": "Scalable", "Context": "Actions"},
        "missing": {"Size": 32},
    }
    home = theme(tmp_path, "Art", folders)
    (home / "missing").rmdir()
    for file in ("16/near.png", "24/near.png", "16/both.png", "32/both.png", "24/tie.png", "32/tie.png", "16/far.png"):
        picture(0).save(home / file)
    for file in ("any/both.svg", "any/far.svg", "16/text.txt"):
        (home / file).write_text(SVG.format(side=8, content=""))
    themes = find_themes([tmp_path])

    def chosen(size: int, *, vectors: bool = True) -> dict[str, str]:
        files = icon_files(themes, size, vectors=vectors, symbolic=False)
        return {name: file.path.relative_to(home).as_posix() for name, file in files.items()}

    assert chosen(32) == {"both": "32/both.png", "far": "any/far.svg", "near": "24/near.png", "tie": "32/tie.png"}
    assert chosen(32, vectors=False)["far"] == "16/far.png"
    assert chosen(28)["tie"] == "32/tie.png"  # equally near: the larger one
    assert chosen(64)["both"] == "any/both.svg"
    assert icon_files(themes, 32, vectors=True, symbolic=False)["both"].context == "Emblems"
