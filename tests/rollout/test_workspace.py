"""Copies of a workspace."""

import asyncio
import os
import random
import resource
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bombus.errors import Refused
from bombus.rollout.workspace import check_out, check_scratch, check_workspace, episode_folder, remove_folder
from bombus.sdk.errors import InfraError
from tests.effort import effort

NOBODY = 65534


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "run.sh").write_text("echo hi\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("run.sh")
    (folder / "dangling").symlink_to("nowhere")
    return folder


async def test_an_episode_gets_a_copy_with_the_name_of_the_original_and_nothing_of_it_is_left(
    tmp_path: Path, repository: Path
) -> None:
    path = tmp_path / "scratch" / "0"
    path.parent.mkdir()
    async with episode_folder(path, repository) as folder:
        copy = folder.workspace
        assert (copy.name, copy.is_relative_to(path)) == ("repo", True)
        assert (copy / ".git" / "HEAD").read_text() == "ref: refs/heads/main\n"
        assert os.access(copy / "run.sh", os.X_OK)
        assert os.readlink(copy / "link") == "run.sh"
        assert os.readlink(copy / "dangling") == "nowhere"
        assert folder.home.is_dir()
        assert folder.temporary.is_dir()
        (copy / "run.sh").write_text("changed\n")
    assert not path.exists()
    assert (repository / "run.sh").read_text() == "echo hi\n"


@pytest.mark.parametrize("name", ["home", "tmp", "copy"])
async def test_a_workspace_of_any_name_is_apart_from_the_other_folders(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    async with episode_folder(tmp_path / "0", tmp_path / name) as folder:
        assert folder.workspace.name == name
        for other in (folder.home, folder.temporary):
            assert not other.is_relative_to(folder.workspace)
            assert not folder.workspace.is_relative_to(other)


async def test_without_a_workspace_the_folder_is_empty(tmp_path: Path) -> None:
    async with episode_folder(tmp_path / "0", None) as folder:
        assert list(folder.workspace.iterdir()) == []


async def test_a_workspace_that_cannot_be_copied_is_an_infrastructure_failure(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match=r"could not be copied: cp: .*No such file"):
        async with episode_folder(tmp_path / "0", tmp_path / "gone"):
            pass
    assert not (tmp_path / "0").exists()


async def test_an_episode_that_is_cancelled_while_its_workspace_is_copied_is_cancelled(
    tmp_path: Path, repository: Path
) -> None:
    pick = random.Random(1)

    async def copied(number: int, delay_s: float) -> None:
        async def play() -> None:
            async with episode_folder(tmp_path / str(number), repository):
                await asyncio.Event().wait()

        playing = asyncio.create_task(play())
        await asyncio.sleep(delay_s)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):  # also when it comes just when the copy is made
            await playing
        assert not (tmp_path / str(number)).exists()

    for batch in range(effort(3, long=12)):
        await asyncio.gather(*(copied(8 * batch + slot, pick.uniform(0.0, 0.2)) for slot in range(8)))


async def test_files_that_were_there_before_never_come_into_an_episode(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "0").mkdir()
    with pytest.raises(FileExistsError):
        async with episode_folder(tmp_path / "0", repository):
            pass
    assert (tmp_path / "0").exists()


async def test_what_programs_print_is_kept_beside_the_folder_of_the_episode(tmp_path: Path) -> None:
    async with episode_folder(tmp_path / "0", None) as folder:
        assert folder.outputs.stat().st_mode & 0o777 == 0o700
        assert not folder.outputs.is_relative_to(folder.path)
    assert not folder.outputs.exists()


def test_a_folder_that_an_agent_made_read_only_is_removed(tmp_path: Path) -> None:
    inner = tmp_path / "cache" / "module" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    for each in (inner / "file", inner, inner.parent):
        each.chmod(0o555)
    remove_folder(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_folder_with_thousands_of_folders_in_each_other_is_removed(tmp_path: Path) -> None:
    subprocess.run(
        ("python3", "-c", "import os\nfor _ in range(3000): os.mkdir('deeper'); os.chdir('deeper')"),
        cwd=tmp_path,
        check=True,
    )
    remove_folder(tmp_path / "deeper")
    assert not (tmp_path / "deeper").exists()


def test_a_folder_may_be_removed_twice_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for number in range(100):
            copy = tmp_path / str(number)
            (copy / "inner" / "deep").mkdir(parents=True)
            list(pool.map(remove_folder, [copy] * 4))
            assert not copy.exists()


def test_a_folder_that_agents_would_write_through_is_refused(tmp_path: Path, repository: Path) -> None:
    assert check_workspace(repository, tmp_path) == repository
    with pytest.raises(Refused, match="is not a folder"):
        check_workspace(tmp_path / "none", tmp_path)
    with pytest.raises(Refused, match="each copy would contain the earlier ones"):
        check_workspace(repository, repository / "scratch")
    worktree = tmp_path / "worktree"
    worktree.mkdir()
    (worktree / ".git").write_text("gitdir: ../repo/.git/worktrees/x\n")
    with pytest.raises(Refused, match="agents would commit to the original"):
        check_workspace(worktree, tmp_path)


@pytest.mark.parametrize("inner", ["", "vendor/lib"])
def test_a_repository_that_is_kept_elsewhere_is_refused_at_any_depth(
    tmp_path: Path, repository: Path, inner: str
) -> None:
    workspace = tmp_path / "work"
    (workspace / inner).mkdir(parents=True)
    git = workspace / inner / ".git"
    git.symlink_to(repository / ".git")
    with pytest.raises(Refused, match="agents would commit to the original"):
        check_workspace(workspace, tmp_path)
    git.unlink()
    git.write_text(f"gitdir: {workspace}/modules\n")
    with pytest.raises(Refused, match="agents would commit to the original"):
        check_workspace(workspace, tmp_path)


def test_a_submodule_whose_repository_is_in_the_workspace_is_copied_with_it(tmp_path: Path, repository: Path) -> None:
    (repository / "vendor" / "lib").mkdir(parents=True)
    (repository / "vendor" / "lib" / ".git").write_text("gitdir: ../../.git/modules/lib\n")
    assert check_workspace(repository, tmp_path) == repository


@pytest.mark.parametrize(
    ("work_tree", "is_refused"), [("{repository}", True), ("../../outside", True), ("..", False), ("../inner", False)]
)
def test_a_repository_whose_files_are_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work_tree: str, is_refused: bool
) -> None:
    repository = tmp_path / "real"
    subprocess.run(["git", "init", "-q", repository], check=True)
    subprocess.run(
        ["git", "-C", repository, "config", "core.worktree", work_tree.format(repository=repository)], check=True
    )
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))
    if is_refused:
        with pytest.raises(Refused, match=r"which points to a git repository or working tree outside"):
            check_workspace(repository, tmp_path)
    else:
        assert check_workspace(repository, tmp_path) == repository


def test_what_agents_have_printed_is_not_kept_where_others_read_it(tmp_path: Path, repository: Path) -> None:
    with pytest.raises(Refused, match="agents could read the output of other agents"):
        check_workspace(repository, tmp_path, repository / "out")


def test_folders_that_cannot_be_written_are_refused_before_anything_is_played(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"--scratch .*none is not a folder"):
        check_scratch(tmp_path / "none")
    with pytest.raises(Refused, match=r"--out .*/deep cannot be made: .*/file is not a folder"):
        check_out(tmp_path / "file" / "deep")
    check_out(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
    with full_disk(), pytest.raises(Refused, match=r"--scratch .* cannot be written: File too large"):
        check_scratch(tmp_path)


def test_folders_in_each_other_that_an_agent_has_locked_are_removed() -> None:
    """A root user may enter them all the same, so that this is another user's."""
    with TemporaryDirectory() as temporary, another_user(Path(temporary)):
        outer = Path(temporary, "outer")
        (outer / "inner" / "deep").mkdir(parents=True)
        (outer / "link").symlink_to("/")
        for each in (outer / "inner" / "deep", outer / "inner", outer):
            each.chmod(0)
        remove_folder(outer)
        assert not outer.exists()


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process become longer than a kilobyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Act as a user without privileges, who owns the folder."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
