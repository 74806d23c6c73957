"""The documentation is true: its paths, links, commands and pictures are those of the tree."""

import re
import shlex
from pathlib import Path

import pytest

from bombus.cli import COMMANDS, main
from tests import log_rules
from tests.overwatch.picture import PICTURE, picture, words

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
PAGES = sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("bench/*.md")})
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (DOCS / "architecture.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WITH_SUBCOMMANDS = {"replay", "log", "env", "deploy"}
INSTALLED = {
    "git",
    "cd",
    "cp",
    "pip",
    "curl",
    "nats-server",
    "torchrun",
    "docker",
    "kubectl",
    "sbatch",
    "sky",
    "ssh",
    "tail",
    "export",
}  # not ours


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def section(title: str, page: Path = DOCS / "architecture.md") -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"{name_of(page)} has the section {title!r}"
    return found[1]


def rows(title: str) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# ---- every page -----------------------------------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    """Return the commands of a page: lines of its `sh` blocks, and lines after a prompt in others.

    A line that ends with a backslash continues in the next one.
    """
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for kind, block in blocks if kind == "sh" for line in block.splitlines()]
    lines += [line.removeprefix("$ ") for _, block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [command for line in lines if (command := re.split(r"[#|]", line)[0].strip())]


def test_every_test_that_the_threat_model_names_exists() -> None:
    named_tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    lines = [line for line in section("What holds", ROOT / "SECURITY.md").splitlines() if line.startswith("| ")]
    promises = [line for line in lines if not line.startswith("| threat |")]
    assert promises
    assert all("::test_" in line for line in promises), "each line names its test"
    for path, test in named_tests:
        assert re.search(rf"^(?:async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (path, test)


def is_bombus(word: str) -> bool:
    return word == "bombus" or word.endswith("/bombus")


def test_every_command_of_a_page_exists() -> None:
    for page in PAGES:
        for command in commands(page):
            first, *rest = shlex.split(command)
            if first == "make":
                assert rest[0] in TARGETS, (name_of(page), command)
            elif is_bombus(first):
                assert rest[0] in COMMANDS, (name_of(page), command)
            elif first.endswith("python"):
                there = exists_as_module(rest[1]) if rest[0] == "-m" else (ROOT / rest[0]).exists()
                assert there, (name_of(page), command)
            else:
                assert first in INSTALLED or (ROOT / first).is_file(), (name_of(page), command)


def test_every_flag_of_a_bombus_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for page in PAGES:
        for command in commands(page):
            first, *rest = shlex.split(command)
            flags = {word for word in rest if word.startswith("--")}
            if is_bombus(first) and flags:
                with pytest.raises(SystemExit):
                    main([*rest[: 2 if rest[0] in WITH_SUBCOMMANDS else 1], "--help"])
                assert flags <= set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out)), (name_of(page), command)


def exists_as_module(name: str) -> bool:
    if name == "pytest":
        return True
    path = name.replace(".", "/")
    folders = [ROOT, ROOT / "shared", *(ROOT / "services").iterdir()]
    return any((folder / f"{path}.py").is_file() or (folder / path / "__main__.py").is_file() for folder in folders)


def test_every_benchmark_of_the_results_exists() -> None:
    named = re.findall(r"`[^`]*?python (?:-m (bench\.\w+)|(bench/\w+\.py))", (ROOT / "bench/RESULTS.md").read_text())
    assert named
    for module, path in named:
        assert exists_as_module(module) if module else (ROOT / path).is_file(), module or path


def anchor(heading: str) -> str:
    """Return the name that a heading has in a link, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links(page: Path) -> list[tuple[Path, str]]:
    """Return where the links of a page lead in the tree, and to which heading there, "" for none."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    parts = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [((page.parent / file).resolve() if file else page, heading) for file, _, heading in parts]


def test_every_link_of_a_page_leads_somewhere() -> None:
    for page in PAGES:
        for leads_to, heading in links(page):
            assert leads_to.exists(), f"{name_of(page)} links to {leads_to}"
            if heading:
                headings = re.findall(r"^#+ (.*)$", leads_to.read_text(), re.MULTILINE)
                assert heading in map(anchor, headings), f"{name_of(page)} links to {leads_to}#{heading}"


def test_every_file_that_a_page_names_exists() -> None:
    """A name in backquotes with a top folder of the tree in front is a path."""
    tops = "|".join(("shared", "services", "tests", "bench", "examples", "docs", "deploy"))
    for page in PAGES:
        for path in re.findall(rf"`((?:{tops})/[\w./-]*)`", page.read_text()):
            assert (ROOT / path).exists(), f"{name_of(page)} names {path}"


# ---- the README -----------------------------------------------------------------------------------------------


def test_the_readme_has_at_most_700_words_beside_its_blocks() -> None:
    text = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(re.sub(r"\]\(\S+?\)", "]", text).split()) <= 700


def test_the_readmes_program_is_the_one_that_the_tests_run() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert program == (ROOT / "examples/readme.py").read_text()
    assert len([line for line in program.splitlines() if line.strip()]) <= 20


async def test_the_picture_of_the_terminal_is_the_screen_of_today() -> None:
    assert f"]({PICTURE.name})" in (DOCS / "operations.md").read_text()
    assert words(PICTURE.read_text()) == words(await picture()), "run: python -m tests.overwatch.picture"


def test_every_page_of_the_docs_can_be_reached_from_the_readme_or_a_page_that_it_links_to() -> None:
    linked = {page for page, _ in links(ROOT / "README.md") if page.suffix == ".md"}
    reached = linked.union(*({target for target, _ in links(page)} for page in linked))
    for page in [*DOCS.glob("*.md"), DOCS / "decisions/README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        assert page.resolve() in reached, name_of(page)


# ---- docs/architecture.md -------------------------------------------------------------------------------------


def test_the_file_map_has_every_service_and_only_what_exists() -> None:
    block = re.search(r"<!-- file map -->\n```\n(.*?)```", ARCHITECTURE, re.DOTALL)
    assert block, "docs/architecture.md has a file map"
    named = [line.split()[0] for line in block[1].splitlines() if line.strip()]
    for name in named:
        assert (ROOT / name).exists(), f"{name} is in the file map and not in the tree"
    for folder in (ROOT / "services").glob("*/bombus_*"):
        assert f"{name_of(folder)}/" in named


def test_every_path_of_the_change_table_exists_and_it_has_at_least_twenty_rows() -> None:
    table = rows("To change ... open ...")
    assert len(table) >= 20
    for change, opened in table:
        assert named(opened), change
        for path in named(opened):
            assert (ROOT / path).exists(), f"to change {change}: {path} does not exist"


def test_every_folder_of_shared_and_services_is_among_the_rooms() -> None:
    rooms = {path.rstrip("/") for folder, _ in rows("The rooms") for path in named(folder)}
    for room in rooms:
        assert (ROOT / room).is_dir(), f"{room} is in docs/architecture.md and not in the tree"
    for top in (ROOT / "shared/bombus", *(ROOT / "services").glob("*/bombus_*")):
        for package in (top, *(init.parent for init in top.rglob("__init__.py"))):
            assert name_of(package) in rooms, f"{name_of(package)} is not in docs/architecture.md"


# ---- docs/log.md ----------------------------------------------------------------------------------------------


def test_the_log_page_names_the_tests_of_each_rule() -> None:
    assert log_rules.PAGE.read_text() == log_rules.page(), "run: python -m tests.log_rules"


def test_every_test_that_the_log_page_names_exists() -> None:
    there = set(log_rules.tests())
    for rule, found in log_rules.held_by().items():
        assert set(found) <= there, f"R{rule} of tests/log_rules.py names a test that does not exist"
        is_missing = log_rules.NOT_BUILT.get(rule) == log_rules.WHOLE
        assert bool(found) != is_missing, f"R{rule} has no test, or has some and is said to be missing"


def test_the_text_of_a_rule_says_what_of_it_is_not_built() -> None:
    text = log_rules.PAGE.read_text().partition("## Which tests")[0]
    rules = re.findall(r"^\*\*R(\d+)\b(.*?)(?=^\*\*R|\Z)", text, re.MULTILINE | re.DOTALL)
    said = {int(rule) for rule, words in rules if "not built yet" in " ".join(words.split()).lower()}
    assert said == set(log_rules.NOT_BUILT)


def test_every_rule_is_on_the_log_page() -> None:
    text = log_rules.PAGE.read_text().partition("## Which tests")[0]
    assert [int(rule) for rule in re.findall(r"^\*\*R(\d+)\b", text, re.MULTILINE)] == list(log_rules.RULES)


# ---- docs/decisions -------------------------------------------------------------------------------------------


def test_each_decision_has_a_number_of_its_own() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert len(set(numbers)) == len(numbers)


def test_every_decision_that_is_cited_exists() -> None:
    """By its number, in sources and pages. Those that were folded into something else are cited by their reason."""
    numbers = {int(page.name[:4]) for page in DECISIONS}
    files = {page.name for page in DECISIONS}
    folders = ("shared", "services", "tests", "bench", "examples")
    for path in [*PAGES, *(source for folder in folders for source in (ROOT / folder).rglob("*.py"))]:
        text = path.read_text()
        for cited in re.findall(r"\bdecisions?((?:,?\s+(?:and |to )?\d+)+)", text, re.IGNORECASE):
            assert numbers.issuperset(map(int, re.findall(r"\d+", cited))), f"{name_of(path)} cites decision{cited}"
        for file in re.findall(r"decisions/(\d{4}-[\w-]+\.md)", text):
            assert file in files, f"{name_of(path)} cites {file}"


def test_a_decision_has_a_title_a_status_a_date_and_its_reasons() -> None:
    for page in DECISIONS:
        lines = page.read_text().splitlines()
        assert re.match(rf"# {int(page.name[:4])}\. \S", lines[0]), page.name
        assert lines[2] == "- Status: accepted", (page.name, lines[2])
        assert re.fullmatch(r"- Date: \d{4}-\d\d-\d\d", lines[3]), (page.name, lines[3])
        headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        assert headings == ["Decision", "Why", "Turned down"], page.name


def test_the_index_names_each_decision_once_by_its_title() -> None:
    index = (DOCS / "decisions/README.md").read_text()
    entries = dict(re.findall(r"^- \[(\d+\. .*)\]\((\S+)\)$", index, re.MULTILINE))
    titles = {page.read_text().splitlines()[0].removeprefix("# "): page.name for page in DECISIONS}
    assert entries == titles
