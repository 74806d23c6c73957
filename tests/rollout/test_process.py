"""Programs in groups of their own."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bombus.rollout.process import OUTPUT_BYTES_MAX, CannotStart, OutputFile, Program, StopReason, run_program
from tests.patience import PATIENCE_S


@pytest.fixture
def output(tmp_path: Path) -> Iterator[OutputFile]:
    with OutputFile(tmp_path / "out.txt") as output:
        yield output


def program(folder: Path, script: str, output: OutputFile, errors: OutputFile | None = None) -> Program:
    return Program(
        words=["sh", "-c", script],
        folder=folder,
        variables={"PATH": os.environ["PATH"], "GREETING": "hello"},
        output=output,
        errors=errors,
    )


async def test_a_program_runs_in_its_folder_with_its_variables_alone(tmp_path: Path, output: OutputFile) -> None:
    ended = await run_program(program(tmp_path, "pwd; echo $GREETING $HOME; echo oh >&2; exit 3", output), 30)
    assert (ended.exit_code, ended.stopped) == (3, None)
    assert output.tail().split() == [str(tmp_path), "hello", "oh"]


async def test_errors_may_have_a_file_of_their_own(tmp_path: Path, output: OutputFile) -> None:
    with OutputFile(tmp_path / "errors.txt") as errors:
        await run_program(program(tmp_path, "echo 0.5; echo oh >&2", output, errors), 30)
        assert (output.tail(), errors.tail()) == ("0.5\n", "oh\n")


def test_a_file_for_output_is_new_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("dear")
    (tmp_path / "out.txt").symlink_to("mine")
    with OutputFile(tmp_path / "out.txt") as output:
        os.write(output.fileno(), b"hello")
        assert output.tail(2) == "lo"
    assert (tmp_path / "mine").read_text() == "dear"


async def test_what_a_program_puts_in_the_place_of_its_output_is_never_read(tmp_path: Path, output: OutputFile) -> None:
    ended = await run_program(program(tmp_path, "echo hi; rm out.txt; mkfifo out.txt; sleep 1.5", output), 30)
    assert (ended.exit_code, output.tail()) == (0, "hi\n")


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8])
async def test_a_program_that_is_cancelled_while_it_starts_leaves_nothing(
    tmp_path: Path, output: OutputFile, turns: int
) -> None:
    script = f"(while :; do sleep 0.05; done; echo {tmp_path}) & wait"
    running = asyncio.create_task(run_program(program(tmp_path, script, output), 30))
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    await asyncio.sleep(0.2)  # for what would be started after all
    left = [process.pid for process in psutil.process_iter(["cmdline"]) if script in (process.info["cmdline"] or ())]
    assert not left


async def test_a_program_that_is_over_its_time_is_asked_to_end(tmp_path: Path, output: OutputFile) -> None:
    ended = await run_program(
        program(tmp_path, "trap 'echo bye; exit 7' TERM; while :; do sleep 0.05; done", output), 1.0
    )
    assert (ended.exit_code, ended.stopped) == (7, StopReason.TIMEOUT)
    assert output.tail().endswith("bye\n")


def is_alive(number: int) -> bool:
    stat = Path(f"/proc/{number}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_what_a_program_leaves_behind_is_killed(tmp_path: Path, output: OutputFile) -> None:
    await run_program(program(tmp_path, "(trap '' TERM HUP; sleep 1000 & echo $!; wait) & sleep 0.2", output), 30)
    left = int(output.tail())
    async with asyncio.timeout(PATIENCE_S):
        while is_alive(left):
            await asyncio.sleep(0.01)


async def test_a_program_is_stopped_for_the_given_reason(tmp_path: Path, output: OutputFile) -> None:
    stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.2, stop.set_result, StopReason.TURNS)
    ended = await run_program(program(tmp_path, "sleep 1000", output), 30, stop)
    assert (ended.exit_code, ended.stopped) == (-15, StopReason.TURNS)
    assert ended.seconds < 20


async def test_a_program_that_fills_the_disk_is_stopped(tmp_path: Path, output: OutputFile) -> None:
    ended = await run_program(program(tmp_path, f"truncate -s {OUTPUT_BYTES_MAX + 1} out.txt; sleep 1000", output), 30)
    assert ended.stopped == StopReason.OUTPUT


async def test_a_program_that_is_cancelled_has_ended_before_the_cancellation_goes_on(
    tmp_path: Path, output: OutputFile
) -> None:
    running = asyncio.create_task(run_program(program(tmp_path, "echo $$; exec sleep 1000", output), 30))
    async with asyncio.timeout(PATIENCE_S):
        while not output.tail():
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_alive(int(output.tail()))


async def test_a_program_that_does_not_exist_or_may_not_run_cannot_start(tmp_path: Path, output: OutputFile) -> None:
    (tmp_path / "text").write_text("hello")
    for word, why in (("./none", "No such file"), ("./text", "Permission denied")):
        wrong = Program(words=[word], folder=tmp_path, variables={}, output=output)
        with pytest.raises(CannotStart, match=f"{word} cannot be started: {why}"):
            await run_program(wrong, 30)
