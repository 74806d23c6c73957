"""The lists beside the real command line: what is on them exists, and names no file, no address and no stream."""

from collections.abc import Iterator

import pytest

pytest.importorskip("awscli")

from awscli.clidriver import ServiceOperation, create_clidriver

from bombus.tasks.aws.commands import GLOBAL_FLAGS, GLOBAL_VALUES
from bombus.tasks.aws.operations import S3_COMMANDS, S3_FLAGS, S3_VALUES, SERVICES

DRIVER = create_clidriver()
COMMANDS = DRIVER.create_help_command().command_table
PLAIN = {"CLIArgument", "ListArgument", "BooleanArgument", "PageArgument", "CliInputJSONArgument"}


def _operations() -> Iterator[tuple[str, str, ServiceOperation]]:
    for service, listed in SERVICES.items():
        there = COMMANDS[service].create_help_command().command_table
        for operation in sorted(listed.operations):
            yield service, operation, there[operation]


def test_each_operation_is_a_plain_call_of_the_api_without_streams_and_addresses_of_its_own() -> None:
    for service, name, operation in _operations():
        assert isinstance(operation, ServiceOperation), (service, name)
        model = operation.create_help_command().obj
        assert model.endpoint is None, f"{service} {name} puts a value in front of the endpoint's host"
        assert [model.has_streaming_output, model.has_event_stream_output] == [False, False], (service, name)


def test_no_option_of_the_lists_takes_a_blob_or_a_file_and_each_is_one_that_an_operation_has() -> None:
    known: dict[str, set[str]] = {}
    for service, name, operation in _operations():
        for option, argument in operation.arg_table.items():
            if f"--{option}" not in SERVICES[service].options:
                continue
            known.setdefault(service, set()).add(f"--{option}")
            assert type(argument).__name__ in PLAIN, (service, name, option)
            assert argument.cli_type_name != "blob", (service, name, option)
            assert not argument.positional_arg, (service, name, option)
            assert option not in ("cli-input-json", "generate-cli-skeleton")
    paged = {"--max-items", "--page-size", "--starting-token", "--next-token", "--max-results"}
    for service, listed in SERVICES.items():
        assert listed.options - paged <= known.get(service, set()), service


def test_no_option_of_the_lists_is_an_abbreviation_of_one_that_is_not() -> None:
    of_all = {f"--{name}" for name in DRIVER.create_help_command().arg_table}
    assert of_all | {"--no-cli-pager"} >= GLOBAL_VALUES | GLOBAL_FLAGS
    listed = set().union(*(service.options for service in SERVICES.values()), S3_FLAGS, S3_VALUES)
    for _, _, operation in _operations():
        of_all |= {
            f"--{name}"
            for name, argument in operation.arg_table.items()
            if argument.cli_type_name == "blob" or name in ("cli-input-json", "generate-cli-skeleton")
        }
    assert {"--body", "--endpoint-url", "--cli-input-json"} <= of_all
    assert not {(option, other) for option in listed for other in of_all if other.startswith(option)}


def test_the_commands_of_s3_have_the_options_of_the_lists() -> None:
    there = COMMANDS["s3"].create_help_command().command_table
    assert set(S3_COMMANDS) <= set(there)
    arguments = {
        f"--{name}": argument for command in S3_COMMANDS for name, argument in there[command].arg_table.items()
    }
    added_when_it_is_parsed = {"--delete"}  # of sync
    assert {arguments[option].cli_type_name for option in S3_FLAGS - added_when_it_is_parsed} == {"boolean"}
    assert {arguments[option].cli_type_name for option in S3_VALUES} <= {"string", "integer"}
