"""What a curriculum's file keeps when programs are killed, disks are full and lines are broken."""

import copy
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bombus.curriculum.curriculum import Curriculum
from bombus.curriculum.events import AnyCurriculumEvent, ResultRecorded, TaskGraduated, TierReached
from bombus.curriculum.journal import CurriculumJournal
from bombus.curriculum.plan import CurriculumPlan, CurriculumTier
from bombus.curriculum.progress import CurriculumProgress
from bombus.errors import LogCorrupted, Refused

PLAN = CurriculumPlan(
    tiers=(CurriculumTier(name="warmup", tasks=("a", "b")), CurriculumTier(name="beginner", tasks=("c",)))
)
RECORDS = """
import sys, itertools
from bombus.curriculum.curriculum import Curriculum
from bombus.curriculum.plan import CurriculumPlan, CurriculumTier
tiers = (CurriculumTier(name="warmup", tasks=("a", "b")), CurriculumTier(name="beginner", tasks=("c",)))
plan = CurriculumPlan(tiers=tiers)
with Curriculum(plan, sys.argv[1]) as curriculum:
    for number in itertools.count():
        curriculum.record_result("abc"[number % 3], number % 5 > 0, number / 7)
        print(number, flush=True)
"""


def seen(curriculum: Curriculum) -> dict[str, object]:
    return copy.deepcopy({name: value for name, value in vars(curriculum.progress).items() if name != "plan"})


def test_progress_is_the_same_when_a_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "curriculum.jsonl"
    with Curriculum(PLAN, path) as curriculum:
        for number in range(30):
            curriculum.record_result("abc"[number % 3], number % 4 > 0, number / 3, group=f"g{number}")
        before = seen(curriculum)
    assert path.stat().st_mode & 0o777 == 0o600
    with Curriculum(PLAN, path) as again:
        assert seen(again) == before
        assert again.record_result("a", True, 1.0, group="g29") == []


def test_a_line_that_was_cut_anywhere_is_as_if_it_had_never_been_written(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with Curriculum(PLAN, path) as curriculum:
        for _ in range(2):
            curriculum.record_result("a", True, 1.0)
        before, kept = seen(curriculum), path.read_bytes()
        curriculum.record_result("a", True, 1.0)  # the task graduates, and the tier is mastered
        after, whole = seen(curriculum), path.read_bytes()
    for length in range(len(kept), len(whole)):
        path.write_bytes(whole[:length])
        with Curriculum(PLAN, path) as cut:
            assert seen(cut) == before
            cut.record_result("a", True, 1.0)
            assert seen(cut) == after
        assert path.read_bytes() == whole


def test_a_program_that_is_killed_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with subprocess.Popen([sys.executable, "-c", RECORDS, str(path)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for _ in range(40):
            newest = int(program.stdout.readline())
        program.send_signal(signal.SIGKILL)
        rest = program.stdout.read().split()
    newest = int(rest[-1]) if rest else newest
    with Curriculum(PLAN, path) as curriculum:
        assert curriculum.progress.results - (newest + 1) in (0, 1)  # one may be recorded and not printed
        expected = Curriculum(PLAN)
        for number in range(curriculum.progress.results):
            expected.record_result("abc"[number % 3], number % 5 > 0, number / 7)
        assert seen(curriculum) == seen(expected)


def test_one_program_at_a_time_writes_a_file(tmp_path: Path) -> None:
    with (
        Curriculum(PLAN, tmp_path / "c.jsonl"),
        pytest.raises(Refused, match=r"another program has the curriculum .* open: stop it"),
    ):
        Curriculum(PLAN, tmp_path / "c.jsonl")
    Curriculum(PLAN, tmp_path / "c.jsonl").close()


FORKS = """
import os, sys
from bombus.curriculum.curriculum import Curriculum
from bombus.curriculum.plan import CurriculumPlan, CurriculumTier
from bombus.errors import Refused
with Curriculum(CurriculumPlan(tiers=(CurriculumTier(name="warmup", tasks=("a",)),)), sys.argv[1]) as curriculum:
    child = os.fork()
    if not child:
        try:
            curriculum.record_result("a", True, 1.0)
        except Refused as error:
            print(error, curriculum.progress.results, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    curriculum.record_result("a", True, 1.0)
"""


def test_a_forked_program_does_not_write_the_file_of_the_one_that_forked_it(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    said = subprocess.run([sys.executable, "-c", FORKS, str(path)], check=True, capture_output=True, text=True).stdout
    assert "was opened before this process was forked: record results in the process that opened it 0" in said
    with Curriculum(PLAN, path) as curriculum:
        assert curriculum.progress.results == 1


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.jsonl")
    with pytest.raises(Refused, match="is not a regular file"):
        Curriculum(PLAN, tmp_path / "c.jsonl")


@pytest.mark.parametrize("line", [b"not json\n", b'{"type":"result.recorded"}\n', b'[{"type":"unknown"}]\n', b"\n"])
def test_a_broken_line_in_the_middle_is_told_and_nothing_is_thrown_away(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "c.jsonl"
    good = msgspec.json.encode([ResultRecorded(task="a", achieved=True, reward=1.0)]) + b"\n"
    path.write_bytes(good + line + good)
    with pytest.raises(LogCorrupted, match=r"line 2 of .*c\.jsonl is not an event of a curriculum"):
        CurriculumJournal(path)
    assert path.read_bytes() == good + line + good


def test_a_result_that_cannot_be_written_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with Curriculum(PLAN, path) as curriculum:
        curriculum.record_result("a", True, 1.0)
        size = path.stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        heed = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        try:
            with pytest.raises(Exception, match=r"full|too large"):
                curriculum.record_result("a", True, 1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, heed)
        assert curriculum.progress.results == 1
        assert path.stat().st_size == size
        curriculum.record_result("a", True, 1.0)
    with Curriculum(PLAN, path) as again:
        assert again.progress.results == 2


def test_a_file_of_today_is_read_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(
        '[{"type":"result.recorded","task":"a","achieved":true,"reward":1.0,"group":"g"},'
        '{"type":"task.graduated","task":"a","interval":3,"due":6}]\n'
        '[{"type":"result.recorded","task":"gone","achieved":false,"reward":0.25,"group":"","later":1}]\n'
        '[{"type":"task.reviewed","task":"a","interval":6,"due":8},{"type":"tier.reached","tier":"beginner","fast":true},'
        '{"type":"task.returned","task":"a"}]\n'
    )
    journal = CurriculumJournal(path)
    assert journal.events[1] == TaskGraduated(task="a", interval=3, due=6)
    journal.close()
    with Curriculum(PLAN, path) as curriculum:  # it keeps what it does not know, and never gives it
        assert curriculum.progress.tier.name == "beginner"
        assert curriculum.progress.of("a").has_returned
        assert curriculum.progress.of("gone").results == 1
        assert curriculum.choose(seed=0, draw=0, taken={"a"}) == "c"


def test_a_group_that_threads_record_at_the_same_time_is_one_result_and_a_tier_is_reached_once(tmp_path: Path) -> None:
    path, threads = tmp_path / "c.jsonl", 8
    together = threading.Barrier(threads)
    followed: list[AnyCurriculumEvent] = []

    def records(number: int) -> None:
        together.wait()
        followed.extend(curriculum.record_result("a", True, 1.0, group="of all"))
        for each in range(4):
            followed.extend(curriculum.record_result("ab"[number % 2], True, 1.0, group=f"{number}/{each}"))

    with Curriculum(PLAN, path) as curriculum:
        workers = [threading.Thread(target=records, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        live = seen(curriculum)
    assert curriculum.progress.results == 1 + 4 * threads
    assert [event for event in followed if isinstance(event, TierReached)] == [TierReached(tier="beginner", fast=True)]
    assert sorted(event.task for event in followed if isinstance(event, TaskGraduated)) == ["a", "b"]
    with Curriculum(PLAN, path) as again:
        assert seen(again) == live


def test_a_thread_decides_by_what_another_has_just_written(tmp_path: Path) -> None:
    class Interrupted(CurriculumProgress):
        def fold(self, events: Iterable[AnyCurriculumEvent]) -> CurriculumProgress:
            if not self.results:
                other.start()
                other.join(0.2)  # it waits for us
            return super().fold(events)

    with Curriculum(PLAN, tmp_path / "c.jsonl") as curriculum:
        other = threading.Thread(target=curriculum.record_result, args=("a", True, 1.0), kwargs={"group": "g"})
        curriculum.progress = Interrupted(PLAN)
        curriculum.record_result("a", True, 1.0, group="g")
        other.join()
    with Curriculum(PLAN, tmp_path / "c.jsonl") as again:
        assert (again.progress.results, curriculum.progress.results) == (1, 1)


def test_a_file_that_is_at_a_tier_which_the_plan_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with Curriculum(PLAN, path) as curriculum:
        for _ in range(3):
            curriculum.record_result("a", True, 1.0)
        assert curriculum.progress.tier.name == "beginner"
    easy, hard = CurriculumTier(name="easy", tasks=("a", "b")), CurriculumTier(name="hard", tasks=("c",))
    kept = path.read_bytes()
    for _ in range(2):  # and it is not held open
        with pytest.raises(Refused, match=r"c\.jsonl is at the tier 'beginner', but the plan has only easy, hard"):
            Curriculum(CurriculumPlan(tiers=(easy, hard)), path)
    assert path.read_bytes() == kept
    with Curriculum(CurriculumPlan(tiers=(easy, PLAN.tiers[1])), path) as renamed:  # one that is over may have any name
        assert renamed.progress.tier.name == "beginner"


def test_closing_twice_does_nothing_and_writing_afterwards_is_an_error(tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    curriculum = Curriculum(PLAN, tmp_path / "c.jsonl")
    curriculum.close()
    curriculum.close()
    assert len(os.listdir("/proc/self/fd")) == open_before
    with pytest.raises(ValueError, match="is closed"):
        curriculum.record_result("a", True, 1.0)


def test_a_reward_is_what_it_is_at_every_api() -> None:
    curriculum = Curriculum(PLAN)
    (recorded, *_) = curriculum.record_result("a", True, np.array([0.5]))  # type: ignore[arg-type]
    assert isinstance(recorded, ResultRecorded)
    assert recorded.reward == 0.5
    for wrong in ("0.5", [0.5]):
        with pytest.raises(Refused, match="the reward of 'a' is not a number: a reward must be a number"):
            curriculum.record_result("a", True, wrong)  # type: ignore[arg-type]
