"""Task folders of Harbor's that are played against a whole hive, each in its own sandbox."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bombus import AsyncSwarmClient
from bombus.errors import Refused
from bombus.hive.failures import FailureKind
from bombus.rollout.harbor.folders import read_task_folders
from bombus.rollout.harbor.sandbox import agent_prefix, check_sandbox, hides, judge_words, verifier_folder
from bombus.rollout.plan import RolloutOptions, plan_of
from bombus.rollout.process import StopReason
from bombus.rollout.records import LostEpisode, PlayedEpisode
from bombus.rollout.tasks import TaskPackage
from bombus.rollout.workspace import EpisodeFolder
from tests.gateway.openai_hive import GatewayHive, says
from tests.rollout.harbor.tasks import task_folder
from tests.rollout.hive import Rolled

# That of a virtual environment may be in /tmp, of which each agent sees its own.
PYTHON = Path(sys.executable).resolve()
AGENT = f"{PYTHON} -I -S agent.py {{prompt}} 1"


@pytest.fixture(scope="module", autouse=True)
def _sandboxes(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("sandboxes")
    (task,) = read_task_folders(task_folder(folder / "one"))
    assert task.package is not None
    try:
        check_sandbox(task.package, folder)
    except Refused as why:
        pytest.skip(str(why))


def rolled(folder: Path, client: AsyncSwarmClient, **options: Any) -> Rolled:
    given = {"task": folder / "tasks", "workspace": None, "reward": "", "agent": AGENT, "retries": 0, **options}
    return Rolled(folder, client, **given)


def printed(folder: Path) -> str:
    (record,) = [json.loads(line) for line in (folder / "out/episodes.jsonl").read_text().splitlines()]
    return Path(record["output"]).read_text()


async def test_an_agent_works_where_the_task_says_and_its_tests_judge(
    tmp_path: Path, served: GatewayHive, client: AsyncSwarmClient
) -> None:
    task_folder(tmp_path / "tasks/one")
    task_folder(
        tmp_path / "tasks/two",
        dockerfile="FROM ubuntu:24.04\nWORKDIR /bees/wax\nCOPY . .\n",
        test="test -f /bees/wax/answer.txt && test $(pwd) = /bees/wax; echo $((1 - $?)) > /logs/verifier/reward.txt",
        instruction="jumps over",
    )
    served.replica.otherwise = says("ok")
    rollout = rolled(tmp_path, client)
    tally = await rollout.run()
    assert sorted(tally.rewards) == [0.75, 1.0]
    assert {record["task_id"]: record["reward"] for record in rollout.records()} == {"one": 0.75, "two": 1.0}
    await served.until(lambda engine: not engine.open)
    assert sorted(ended.task for ended in served.engine.pool.values()) == ["one", "two"]
    assert list(rollout.left_over()) == []
    assert not (tmp_path / "tasks/one/environment/answer.txt").exists()


async def test_an_agent_sees_neither_tests_nor_solutions_and_can_plant_no_reward(
    tmp_path: Path, served: GatewayHive, client: AsyncSwarmClient
) -> None:
    folder = task_folder(tmp_path / "tasks/one", test="ls /logs/agent /tmp/left; cat /logs/verifier/reward.txt")
    outside = tmp_path / "outside"
    outside.mkdir()
    top = "/".join(tmp_path.parts[1:3])  # tmp/..., where a later sandbox has the episode's own folders
    look = (
        f"cat {folder}/tests/test.sh; ls -A {tmp_path}/tasks /tests; touch /usr/planted; echo 1 > /tests/test.sh; "
        f"echo 1 > /logs/verifier/reward.txt; touch /logs/agent/log; echo a > /tmp/left; rmdir /logs/verifier; "
        f"mv /{top} /tmp/elsewhere && ln -s {outside} /{top}; exec {PYTHON} -I -S agent.py x 1"
    )
    rollout = rolled(tmp_path, client, agent=f"sh -c '{look}'")
    await rollout.run()
    (result,) = rollout.heard.results
    assert isinstance(result, LostEpisode)
    assert "wrote neither reward.txt nor reward.json: cat: /logs/verifier/reward.txt: No such file" in result.why
    assert list(outside.iterdir()) == [], "nothing of a later sandbox is made where an agent's link leads"
    said = printed(tmp_path)
    assert "No such file or directory" in said.splitlines()[0], "of the tests"
    assert "solution" not in said
    assert "cannot touch '/usr/planted': Read-only file system" in said
    assert (
        Path(result.output).with_name(f"{Path(result.output).stem}-reward.txt").read_text()
        == "/tmp/left\n\n/logs/agent:\nlog\n"
    )


async def test_an_agent_does_not_read_what_others_have_printed(served: GatewayHive, client: AsyncSwarmClient) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="a 8 ") as made:
        folder = Path(made)
        task_folder(folder / "tasks/one")
        (folder / "out/outputs").mkdir(parents=True)
        (folder / "out/outputs/another.txt").write_text("the answer is 42\n")
        look = f'cat "{folder}"/out/outputs/*; exec {AGENT.format(prompt="x")}'
        rollout = rolled(folder, client, agent=f"sh -c {shlex.quote(look)}")
        tally = await rollout.run()
        assert tally.rewards == [0.75]
        assert "No such file or directory" in printed(folder)
        assert "42" not in printed(folder)


async def test_a_tasks_variables_are_set_inside_and_start_no_program_of_its_own_outside(
    tmp_path: Path, served: GatewayHive, client: AsyncSwarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    monkeypatch.setenv("HF_TOKEN", "private")
    toml = '[environment.env]\nPATH = "bin:/usr/bin:/bin"\nLEVEL = "a b"\n[verifier.env]\nHOME = "/nowhere"\n'
    test = 'echo "$PATH,$LEVEL$HF_TOKEN,$HOME"; echo 1 > /logs/verifier/reward.txt'
    program = task_folder(tmp_path / "tasks/one", toml, test=test) / "environment/bin/unshare"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ntouch {outside}\nexec /usr/bin/unshare "$@"\n')
    program.chmod(0o755)
    agent = f"sh -c 'echo $PATH,$LEVEL$HF_TOKEN; {AGENT.format(prompt='x')}'"
    rollout = rolled(tmp_path, client, agent=agent)
    await rollout.run()
    (result,) = rollout.heard.results
    assert isinstance(result, PlayedEpisode)
    assert not outside.exists()
    assert printed(tmp_path).startswith("bin:/usr/bin:/bin,a b\n")
    said = Path(result.output).with_name(f"{Path(result.output).stem}-reward.txt").read_text().strip()
    assert said.startswith("bin:/usr/bin:/bin,a b,/")
    assert not said.endswith("/nowhere")


async def test_the_limits_of_a_task_are_those_of_its_run(
    tmp_path: Path, served: GatewayHive, client: AsyncSwarmClient
) -> None:
    task_folder(tmp_path / "tasks/one", "[agent]\ntimeout_sec = 6")
    rollout = rolled(tmp_path, client, agent=f"sh -c '{AGENT.format(prompt='x')}; exec sleep 600'")
    await rollout.run()
    (result,) = rollout.heard.results
    assert isinstance(result, PlayedEpisode)
    assert (result.stopped, result.reward) == (StopReason.TIMEOUT, 0.75)
    assert result.seconds < 60


async def test_tests_that_take_too_long_have_not_judged(
    tmp_path: Path, served: GatewayHive, client: AsyncSwarmClient
) -> None:
    task_folder(
        tmp_path / "tasks/one", "[verifier]\ntimeout_sec = 1", test="echo 1 > /logs/verifier/reward.txt; exec sleep 600"
    )
    rollout = rolled(tmp_path, client)
    await rollout.run()
    (result,) = rollout.heard.results
    assert isinstance(result, LostEpisode)
    assert result.why == "the reward command took longer than 1 s"


def sandboxed(folder: Path, toml: str, *command: str) -> list[str]:
    """Return the words that run a command as an agent of a task is run."""
    (task,) = read_task_folders(task_folder(folder / "tasks", toml))
    assert task.package is not None
    episode = EpisodeFolder(folder / "run/0", folder / "run/0/copy/environment")
    for each in (episode.workspace, episode.home, episode.temporary, episode.outputs):
        each.mkdir(parents=True)
    return [*agent_prefix(task.package, episode, episode.outputs), *command]


def in_sandbox(folder: Path, toml: str, script: str) -> str:
    """Run a script as an agent of a task would be, and return what it prints."""
    words = sandboxed(folder, toml, "sh", "-c", script)
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def test_no_agent_outlives_the_end_of_its_sandbox_nor_escapes_the_signals_that_end_it(tmp_path: Path) -> None:
    escape = ("setsid", "setpriv", "--pdeathsig=clear")  # no signal when its parent dies
    words = sandboxed(tmp_path, "", *escape, "sh", "-c", "echo ready; exec sleep 40")
    agent = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"ready\n"
    os.killpg(agent.pid, signal.SIGKILL)
    agent.communicate(timeout=20)  # which waits until nothing has its output open


def test_an_agent_is_told_to_end_and_its_exit_code_is_passed_on(tmp_path: Path) -> None:
    ended = subprocess.run(sandboxed(tmp_path / "a", "", "sh", "-c", "exit 7"), check=False, timeout=60)
    assert ended.returncode == 7
    agent = subprocess.Popen(
        sandboxed(tmp_path / "b", "", "sh", "-c", "echo ready; exec sleep 40"),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"ready\n"
    os.killpg(agent.pid, signal.SIGTERM)
    agent.communicate(timeout=20)
    assert agent.returncode == 128 + signal.SIGTERM


def test_a_link_to_tests_of_another_task_keeps_its_mode(tmp_path: Path) -> None:
    shared = task_folder(tmp_path / "tasks/one") / "tests/test.sh"
    shared.chmod(0o640)
    other = task_folder(tmp_path / "tasks/two") / "tests/test.sh"
    other.unlink()
    other.symlink_to(shared)
    task = read_task_folders(tmp_path / "tasks")[1]
    assert task.package is not None
    episode = EpisodeFolder(tmp_path / "run/0", tmp_path / "run/0/copy/environment")
    episode.outputs.mkdir(parents=True)
    judge_words(task.package, episode)
    assert shared.stat().st_mode & 0o777 == 0o640
    copy = episode.outputs / "tests/test.sh"
    assert (copy.is_symlink(), copy.stat().st_mode & 0o777) == (False, 0o755)


def judged(folder: Path, data_set: Path, script: str) -> tuple[int, str]:
    """Run a script as the agent of a task, then its tests. Return their exit code and the reward."""
    (task,) = read_task_folders(data_set)
    assert task.package is not None
    episode = EpisodeFolder(folder / "run/0", folder / "run/0/copy/environment")
    for each in (episode.workspace, episode.home, episode.temporary, episode.outputs):
        each.mkdir(parents=True)
    agent = [*agent_prefix(task.package, episode, episode.outputs), "sh", "-c", script]
    subprocess.run(agent, check=True, timeout=60)
    ended = subprocess.run(judge_words(task.package, episode), check=False, timeout=60)
    reward = verifier_folder(episode) / "reward.txt"
    return ended.returncode, reward.read_text() if reward.exists() else ""


def test_tests_that_name_no_interpreter_are_run_by_bash_as_harbor_runs_them(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "tasks/one")
    (folder / "tests/test.sh").write_text("if [[ 1 == 1 ]]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n")
    assert judged(tmp_path, tmp_path / "tasks", "true") == (0, "1\n")


def test_a_link_of_an_agents_in_its_tmp_decides_nothing_about_the_sandbox_of_its_tests() -> None:
    """The data set is in /tmp, of which an agent has its own: it may make a link where the data set would be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as tasks, tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        task_folder(Path(tasks) / "one")
        inside = Path(made, "run/0.outputs", "root", "usr")
        script = (
            f"rmdir {tasks} 2>/dev/null; ln -s {inside} {tasks}; ln -s {inside} /tmp/.git; echo ok > /app/answer.txt"
        )
        assert judged(Path(made), Path(tasks), script) == (0, "0.75\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_a_file_system_with_no_options_but_rw_cannot_be_written_either(tmp_path: Path) -> None:
    words = sandboxed(tmp_path, "", "sh", "-c", "touch /mnt/x; ls -A /mnt")
    outside = 'mount -t tmpfs -o strictatime tmpfs /mnt && exec "$@"'
    said = subprocess.run(
        ["unshare", "--mount", "sh", "-c", outside, "sh", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (said.stdout, "Read-only file system" in said.stderr) == ("", True)


def test_the_log_of_a_hive_beside_which_it_is_played_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        kept = Path(made, ".bombus")
        kept.mkdir()
        (kept / "nats-url").write_text("nats://somewhere\n")
        monkeypatch.chdir(made)
        assert in_sandbox(Path(made, "sets"), "", f'ls -A "{kept}"; cat "{kept}/nats-url"; true') == ""


@pytest.mark.parametrize("is_named", [True, False])
def test_a_hive_elsewhere_and_files_with_its_keys_are_hidden_as_long_as_it_runs(is_named: bool) -> None:
    """What its processes do not name they have open."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made, tempfile.TemporaryDirectory(dir="/var/tmp") as other:
        data, keys = Path(made, "srv"), [Path(other, name) for name in ("admin", "client", "names", "environment")]
        store = data / "nats/jetstream"
        store.mkdir(parents=True)
        (data / "nats-url").write_text("nats://somewhere\n")
        (store / "blk").write_text("call\n")
        for key in keys:
            key.write_text("sk-secret\n")
        look = f'ls -A "{data}"; cat {shlex.join(map(str, keys))} "{data}/nats-url" 2>/dev/null; true'
        flags = ("--admin-key-file", "--client-key", "--client-keys-file", "--key-file")
        named = [f"{flags[0]}={keys[0]}", *(word for pair in zip(flags[1:], keys[1:]) for word in map(str, pair))]
        hive = [sys.executable, "-c", "import time; time.sleep(3600)", *named]
        hive += [f"--store={store}"] if is_named else []
        with (
            (store / "blk").open() as opened,
            subprocess.Popen(hive, stdin=None if is_named else opened) as running,
        ):
            opened.close()
            try:
                assert in_sandbox(Path(made, "sets"), "", look) == ""
            finally:
                running.kill()


def test_its_folders_are_its_own_and_it_has_no_powers_over_the_machine(tmp_path: Path) -> None:
    said = in_sandbox(
        tmp_path,
        "[environment]\nworkdir = '/work dir/a'",
        'pwd; touch here "$HOME/b" /tmp/c; echo "$HOME"; grep -h "CapEff\\|NoNewPrivs" /proc/self/status; '
        "ls /dev/sd* || true",
    )
    workdir, home, powers, no_more = said.splitlines()
    assert (workdir, home) == ("/work dir/a", str(tmp_path / "run/0/home"))
    assert (powers.split()[1], no_more.split()[1]) == ("0" * 16, "1")
    run = tmp_path / "run/0"
    assert all(path.exists() for path in (run / "copy/environment/here", run / "home/b", run / "tmp/c"))


def test_no_program_and_no_device_in_a_folder_of_its_own_has_powers_there(tmp_path: Path) -> None:
    said = in_sandbox(
        tmp_path,
        "",
        'while read -r _ _ _ _ at options _; do case $at in /app | /tmp | /logs/* | "$HOME") echo $options ;; esac; '
        "done < /proc/self/mountinfo",
    )
    options = [line.split(",") for line in said.splitlines()]
    assert len(options) == 5
    assert all({"nosuid", "nodev"} <= {*each} for each in options)


def test_no_setting_of_the_kernel_can_be_written_not_even_where_root_makes_the_sandbox(tmp_path: Path) -> None:
    settings = "/proc/sys/kernel/core_pattern /proc/sys/net/ipv4/ip_forward /proc/sys/vm/drop_caches /proc/irq/*/*"
    said = in_sandbox(
        tmp_path,
        "",
        f'for each in {settings}; do ( : >> "$each" ) 2>/dev/null && echo "$each"; done; '
        "find /proc -mindepth 1 -maxdepth 1 -type f -perm /222 -writable; "
        "echo 5 > /proc/self/oom_score_adj && echo own",
    )
    assert said == "own\n"


def test_tasks_and_other_episodes_are_hidden_where_nothing_else_is() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="a 5 \\7b ") as made:
        folder = Path(made)
        (folder / "run/1").mkdir(parents=True)
        (folder / "seen").mkdir()
        look = f'cd "{folder}"; ls run run/0 tasks; touch seen/x || true'
        said = in_sandbox(folder, "", look)
        assert said == "run:\n0\n\nrun/0:\ncopy\nhome\ntmp\n\ntasks:\n"
        assert not (folder / "seen/x").exists()


def test_the_history_of_a_repository_with_the_tasks_is_hidden_as_they_are() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="a 7 ") as made:
        kept = Path(made, ".git/objects")
        kept.mkdir(parents=True)
        (kept / "solution").write_text("echo ok > answer.txt\n")
        Path(made, "README").write_text("tasks\n")
        look = f'cd "{made}"; cat README; ls -A .git; cat .git/objects/solution; true'
        said = in_sandbox(Path(made, "sets"), "", look)
        assert said == "tasks\n"


def test_where_programs_of_the_user_keep_keys_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="a 6 ") as made:
        home = Path(made, "home")
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh/id_ed25519").write_text("private\n")
        (home / ".cache/huggingface").mkdir(parents=True)
        (home / ".cache/huggingface/token").write_text("private\n")
        Path(made, "netrc").write_text("private\n")
        (home / ".netrc").symlink_to(Path(made, "netrc"))
        (home / "notes").write_text("public\n")
        monkeypatch.setenv("HOME", str(home))
        said = in_sandbox(
            Path(made), "", f'cd "{home}"; ls -A .ssh; cat .cache/huggingface/token .netrc ../netrc notes'
        )
        assert said == "public\n"
        assert (home / ".ssh/id_ed25519").read_text() == "private\n"


def test_the_flags_that_a_task_folder_replaces_are_refused(tmp_path: Path) -> None:
    task_folder(tmp_path / "tasks/one")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "p"}\n')

    def why(**options: Any) -> str:
        with pytest.raises(Refused) as refused:
            plan_of(RolloutOptions.model_validate({"task": tmp_path / "tasks", "agent": "true", **options}))
        return str(refused.value)

    assert "--reward cannot be combined with a folder of tasks, which have their own: leave it out" in why(
        reward="true"
    )
    assert "--workspace cannot be combined with a folder of tasks" in why(workspace=tmp_path)
    assert "--sandbox cannot be combined with a folder of tasks" in why(sandbox="env")
    assert "--reward is missing: only a folder of tasks" in why(task=tmp_path / "tasks.jsonl")
    assert "--agent: there is no program nosuchagent on the PATH" in why(agent="nosuchagent")


def test_an_agent_that_the_sandbox_would_hide_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task_folder(tmp_path / "tasks/one")
    (tmp_path / "agent").symlink_to("/tmp/agent")
    (tmp_path / "tasks/agent").write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)

    def planned(agent: object) -> None:
        plan_of(RolloutOptions.model_validate({"task": Path("tasks"), "agent": str(agent)}))

    for hidden in ("/tmp/agent", "/run/agent", "/usr/../tmp/agent", tmp_path / "agent", tmp_path / "tasks/agent"):
        with pytest.raises(Refused, match=r"--agent: the sandbox of task .* hides .*agent.* elsewhere"):
            planned(hidden)
    for seen in ("/bin/sh", "/app/agent", "./agent", "/tmpfile/agent"):
        planned(seen)


@pytest.mark.parametrize(
    ("program", "is_hidden"),
    [("/opt/agent", True), ("/opt/operations/agent", False), ("/srv/tasks/agent", True), ("/srv/agent", False)],
)
def test_a_sandbox_hides_the_data_set_and_what_is_beside_its_working_directory(program: str, is_hidden: bool) -> None:
    package = TaskPackage(
        folder=Path("/srv/tasks/one"),
        hidden=Path("/srv/tasks"),
        files=None,
        workdir="/opt/operations",
        timeout_s=1.0,
        reward_timeout_s=1.0,
    )
    assert hides(package, Path(program)) is is_hidden


def test_a_typed_time_limit_only_shortens_that_of_a_task(tmp_path: Path) -> None:
    task_folder(tmp_path / "tasks", "[agent]\ntimeout_sec = 2000\n[verifier]\ntimeout_sec = 50")

    def limits(**options: Any) -> tuple[float, float]:
        plan = plan_of(RolloutOptions.model_validate({"task": tmp_path / "tasks", "agent": "true", **options}))
        return plan.timeout_s(plan.tasks[0]), plan.episode_s(plan.tasks[0])

    assert limits() == (2000.0, 2650.0)
    assert limits(timeout_s=100) == (100.0, 750.0)
    assert limits(timeout_s=3000) == (2000.0, 2650.0)
    shutil.rmtree(tmp_path / "tasks")
    task_folder(tmp_path / "tasks", "[verifier]\ntimeout_sec = 50")
    assert (limits(), limits(timeout_s=3000)) == ((1800.0, 2450.0), (3000.0, 3650.0)), "it names no limit of its own"


@pytest.mark.parametrize(
    "test",
    [
        "exit 1",
        "kill -9 $$",
        "python3 -c 'raise KeyError(1)'",
        "echo good > /logs/verifier/reward.txt",
        "echo '[1]' > /logs/verifier/reward.json",
        "echo nan > /logs/verifier/reward.txt",
    ],
)
async def test_a_verifier_that_crashes_is_a_failure_of_the_grader_and_no_zero(
    tmp_path: Path, served: GatewayHive, client: AsyncSwarmClient, test: str
) -> None:
    task_folder(tmp_path / "tasks/one", test=test)
    rollout = rolled(tmp_path, client)
    await rollout.run()
    (result,) = rollout.heard.results
    assert isinstance(result, LostEpisode)
    assert result.failure == FailureKind.GRADER
    await served.until(lambda engine: not engine.open)
    assert served.engine.counters.aborted_by == {FailureKind.GRADER: 1}
    assert (served.engine.counters.ended, served.engine.pool) == (0, {})
