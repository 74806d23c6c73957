"""What is read of the hardware of a machine."""

from pathlib import Path

from bombus.machine.hardware import memory_bytes

MIB = 1 << 20


def test_a_containers_free_memory_is_what_its_limit_leaves_and_the_files_that_it_has_read(tmp_path: Path) -> None:
    tmp_path.joinpath("memory.max").write_text(f"{64 * MIB}\n")
    tmp_path.joinpath("memory.current").write_text(f"{60 * MIB}\n")
    assert memory_bytes(tmp_path) == (64 * MIB, 4 * MIB)
    stat = f"anon {20 * MIB}\nfile {40 * MIB}\ninactive_file {30 * MIB}\nactive_file {8 * MIB}\n"
    tmp_path.joinpath("memory.stat").write_text(stat)
    assert memory_bytes(tmp_path) == (64 * MIB, 42 * MIB)


def test_without_a_containers_limit_it_is_the_machines(tmp_path: Path) -> None:
    tmp_path.joinpath("memory.max").write_text("max\n")
    total, free = memory_bytes(tmp_path)
    assert 0 < free <= total
