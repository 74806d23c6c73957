"""Which task folders of Harbor's can be played here, and what is said of the others."""

from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.rollout.harbor.folders import read_task_folders
from tests.rollout.harbor.tasks import task_folder

LIMITS = """
schema_version = "1.1"
[task]
name = "bees/wax"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 90
[verifier]
timeout_sec = 30.5
env = { LEVEL = "2" }
[environment]
cpus = 2
memory_mb = 2048
gpus = 0
allow_internet = true
env = { HIVE = "one" }
"""


def test_a_task_has_its_instruction_its_files_and_its_own_limits(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "tasks/wax", LIMITS)
    (task,) = read_task_folders(tmp_path / "tasks")
    assert (task.task_id, task.prompt) == ("bees/wax", "the quick\n")
    package = task.package
    assert package is not None
    assert (package.timeout_s, package.reward_timeout_s) == (90.0, 30.5)
    assert (package.workdir, package.files, package.hidden) == ("/app", folder / "environment", tmp_path / "tasks")
    assert package.variables == {"HIVE": "one"}
    assert package.judge_variables == {"HIVE": "one", "LEVEL": "2"}


def test_tests_may_have_a_key_and_what_they_say_of_a_variable_counts_for_them(tmp_path: Path) -> None:
    toml = '[environment.env]\nLEVEL = "1"\n[verifier.env]\nLEVEL = "2"\nOPENAI_API_KEY = "k"\n'
    (task,) = read_task_folders(task_folder(tmp_path / "one", toml))
    assert task.package is not None
    assert task.package.variables == {"LEVEL": "1"}
    assert task.package.judge_variables == {"LEVEL": "2", "OPENAI_API_KEY": "k"}


def test_without_a_word_about_them_limits_are_harbors_and_the_name_is_the_folders(tmp_path: Path) -> None:
    for name in ("b", "a"):
        task_folder(tmp_path / name)
    (tmp_path / "notes").mkdir()
    tasks = read_task_folders(tmp_path)
    assert [task.task_id for task in tasks] == ["a", "b"]
    assert [(each.timeout_s, each.reward_timeout_s) for task in tasks if (each := task.package)] == [(None, 600.0)] * 2


def test_a_folder_may_be_one_task(tmp_path: Path) -> None:
    assert [task.task_id for task in read_task_folders(task_folder(tmp_path / "one"))] == ["one"]


@pytest.mark.parametrize(
    ("dockerfile", "workdir", "has_files"),
    [
        ("FROM ubuntu:24.04\n", "/app", False),
        ("# a comment\nfrom python:3.13-slim\nWORKDIR /srv\nWORKDIR bees\nLABEL a=b \\\n  c=d\n", "/srv/bees", False),
        ("FROM debian\nWORKDIR /workspace\nCOPY . .\n", "/workspace", True),
        ("FROM debian\nWORKDIR /app\nCOPY ./ /app/\nCMD sleep 1", "/app", True),
    ],
)
def test_a_base_without_steps_needs_no_image(tmp_path: Path, dockerfile: str, workdir: str, has_files: bool) -> None:
    folder = task_folder(tmp_path / "one", dockerfile=dockerfile)
    (task,) = read_task_folders(folder)
    assert task.package is not None
    assert (task.package.workdir, task.package.files is not None) == (workdir, has_files)


@pytest.mark.parametrize(
    ("dockerfile", "toml", "test", "why"),
    [
        ("FROM a\nRUN apt-get install -y \\\n jq\n", "", "", "environment/Dockerfile line 2 is RUN apt-get install"),
        ("FROM a\nFROM b\n", "", "", "environment/Dockerfile line 2 is FROM b"),
        ("FROM a\nCOPY data /data\n", "", "", "environment/Dockerfile line 2 is COPY data /data"),
        ("FROM a\nWORKDIR /root\n", "", "", "its working directory is /root, where the sandbox cannot put"),
        ("FROM a\nWORKDIR /app/../etc\n", "", "", "its working directory is /app/../etc"),
        ("FROM a\nWORKDIR /bees:wax\n", "", "", "its working directory is /bees:wax, where the sandbox cannot put"),
        ("FROM a\nCOPY . .\nWORKDIR /data\n", "", "", "environment/Dockerfile line 3 is WORKDIR /data"),
        ("FROM a\nWORKDIR bees\n", "", "", "environment/Dockerfile line 2 is WORKDIR bees"),
        ('FROM a\nWORKDIR "/app"\n', "", "", 'environment/Dockerfile line 2 is WORKDIR "/app"'),
        (
            "FROM a\nCOPY . .\n",
            "[environment]\nworkdir = '/data'",
            "",
            "environment/Dockerfile copies files to /app, but environment.workdir is /data",
        ),
        (
            None,
            "[environment]\nworkdir = '/old'",
            "",
            "its working directory is /old, where the sandbox cannot put",
        ),
        (None, "[environment]\ndocker_image = 'x'", "", "task.toml sets environment.docker_image"),
        (None, "[environment]\ngpus = 1", "", "task.toml sets environment.gpus"),
        (None, "[environment]\nallow_internet = false", "", "environment.allow_internet is false"),
        (None, "[verifier]\nenvironment_mode = 'separate'", "", "task.toml sets verifier.environment_mode"),
        (None, "[[steps]]\nname = 'a'", "", "task.toml sets steps"),
        (None, "", "apt-get update -y && apt-get install -y curl", "tests/test.sh line 2 installs packages"),
    ],
)
def test_what_needs_an_image_is_refused_by_name(
    tmp_path: Path, dockerfile: str | None, toml: str, test: str, why: str
) -> None:
    task_folder(tmp_path / "plain")
    task_folder(tmp_path / "rich", toml, test=test, dockerfile=dockerfile)
    with pytest.raises(Refused) as refused:
        read_task_folders(tmp_path)
    assert (
        f"1 of 2 tasks need an image, but `bombus rollout` plays with this machine's own programs: rich ({why}"
        in str(refused.value)
    )


@pytest.mark.parametrize("name", [".dockerignore", "Dockerfile.dockerignore"])
def test_files_that_are_kept_out_of_an_image_are_not_shown_to_an_agent(tmp_path: Path, name: str) -> None:
    folder = task_folder(tmp_path / "one", dockerfile="FROM a\nCOPY . .\n")
    (folder / "environment" / name).write_text("answers.json\n")
    with pytest.raises(Refused, match=rf"one \(environment/{name} keeps files out of the image"):
        read_task_folders(tmp_path)
    (folder / "environment/Dockerfile").write_text("FROM a\n")
    assert read_task_folders(tmp_path), "where nothing is copied nothing is left out"


def test_what_an_agent_is_said_to_have_done_before_is_not_left_out_silently(tmp_path: Path) -> None:
    (task_folder(tmp_path / "one") / "trajectory.json").write_text("{}")
    with pytest.raises(Refused, match=r"one \(its trajectory\.json contains an earlier agent's actions"):
        read_task_folders(tmp_path)


def test_a_task_of_several_steps_is_refused_for_them_and_not_for_its_missing_instruction(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "one", "[[steps]]\nname = 'a'")
    (folder / "instruction.md").unlink()
    with pytest.raises(Refused, match=r"one \(task\.toml sets steps\)"):
        read_task_folders(tmp_path)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("<!-- harbor-canary GUID 1 -->\n# Canary 2\n\nCount.\n", "Count.\n"),
        ("Count.\n<!-- harbor-canary GUID 1 -->\n", "Count.\n<!-- harbor-canary GUID 1 -->\n"),
        ("# Bees\n\nCount.\n", "# Bees\n\nCount.\n"),
    ],
)
def test_the_marks_of_a_benchmark_above_an_instruction_are_not_shown_to_agents(
    tmp_path: Path, written: str, shown: str
) -> None:
    task_folder(tmp_path / "one", instruction=written)
    assert read_task_folders(tmp_path)[0].prompt == shown


def test_a_script_beside_test_sh_installs_nothing_either_but_a_comment_may_say_so(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "one", test="  # pip install pytest\nsh /tests/lib/run.sh")
    assert read_task_folders(tmp_path)
    (folder / "tests/lib").mkdir()
    (folder / "tests/lib/run.sh").write_text("set -e\npip3 install -q pytest\n")
    with pytest.raises(Refused, match=r"one \(tests/lib/run\.sh line 2 installs packages with 'pip3 install'\)"):
        read_task_folders(tmp_path)


def test_services_need_an_image(tmp_path: Path) -> None:
    (task_folder(tmp_path / "rich") / "environment/docker-compose.yaml").write_text("services: {}")
    with pytest.raises(Refused, match=r"rich \(environment/docker-compose.yaml starts services\)"):
        read_task_folders(tmp_path)


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[agent", "task.toml cannot be read: "),
        ("agent = 1", "agent in task.toml is not a table"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec in task.toml is 0, but must be above 0 and at most 86400 s"),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec in task.toml is True"),
        ("[task]\nname = 7", "`task_id` must be a string of 1 to 512 characters"),
        ("[verifier.env]\nKEY = '${OPENAI_API_KEY}'", "verifier.env.KEY in task.toml refers to a variable of Harbor's"),
        ("[environment.env]\nOPENAI_BASE_URL = 'x'", "environment.env in task.toml sets OPENAI_BASE_URL"),
        ("[verifier.env]\n'-S' = 'x'", "verifier.env in task.toml has '-S', which is not a valid name for a variable"),
        ("[environment]\nworkdir = 7", "environment.workdir in task.toml is not a string"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(tmp_path: Path, toml: str, why: str) -> None:
    folder = task_folder(tmp_path / "one", toml)
    with pytest.raises(Refused) as refused:
        read_task_folders(tmp_path)
    assert f"--task {folder}: {why}" in str(refused.value)


def test_variables_are_no_longer_than_a_program_can_be_given(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "one", f"[verifier.env]\nKEY = '{'x' * 65532}'")  # with KEY= 65,536 bytes
    assert read_task_folders(tmp_path)
    (folder / "task.toml").write_text(f"[verifier.env]\nKEY = '{'x' * 65533}'")
    with pytest.raises(Refused, match=r"one: verifier.env in task.toml has over 65536 bytes: put long values"):
        read_task_folders(tmp_path)


def test_links_that_lead_to_each_other_are_refused(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "one")
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").symlink_to("instruction.md")
    with pytest.raises(Refused, match=r"one: .*loop"):
        read_task_folders(tmp_path)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh", "task.toml"])
def test_a_task_that_lacks_a_file_is_refused(tmp_path: Path, missing: str) -> None:
    task_folder(tmp_path / "whole")
    (task_folder(tmp_path / "half") / missing).unlink()
    with pytest.raises(Refused, match=missing):
        read_task_folders(tmp_path)


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh", "tests", "environment"])
def test_a_part_of_a_task_that_is_a_link_to_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    folder = task_folder(tmp_path / "tasks/one")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused) as refused:
        read_task_folders(tmp_path / "tasks")
    assert f"its {name} is a link that leads out of the data set, to {tmp_path / 'elsewhere'}:" in str(refused.value)


def test_a_task_that_is_a_link_to_elsewhere_is_refused_for_agents_could_read_its_tests_there(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "elsewhere")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/one").symlink_to(folder)
    with pytest.raises(Refused) as refused:
        read_task_folders(tmp_path / "tasks")
    assert f"it is a link that leads out of {tmp_path / 'tasks'}, to {folder}, which agents could" in str(refused.value)
    assert read_task_folders(tmp_path / "tasks/one"), "given by itself it is hidden where it is"


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        task_folder(tmp_path / name, "[task]\nname = 'x/y'")
    with pytest.raises(Refused, match="another task is also named 'x/y'"):
        read_task_folders(tmp_path)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="has no tasks: a Harbor folder must have 1 to"):
        read_task_folders(tmp_path)
