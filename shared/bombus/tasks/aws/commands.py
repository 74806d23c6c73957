"""Decides which command lines are carried out: one `aws` command at a time, on the simulator, without files. Pure.

The words are parsed here, and anything that is not listed in `operations.py` is refused: the AWS command line itself
accepts options at any position and in abbreviated form, and reads files named by values.
"""

import re
from collections.abc import Mapping, Sequence

from bombus.tasks.aws.line import CommandRefused, words_of_line
from bombus.tasks.aws.operations import PROTOCOLS, S3_COMMANDS, S3_FLAGS, S3_REPEATED, S3_VALUES, SERVICES, AwsService

WAIT_S_MAX = 20  # longest wait for an SQS message
REGION = "us-east-1"
OUTPUTS = ("json", "text", "table")
GLOBAL_VALUES = frozenset({"--region", "--output", "--query", "--color"})
GLOBAL_FLAGS = frozenset({"--no-paginate", "--no-cli-pager"})
WITHOUT_EFFECT = frozenset({"--color", "--no-cli-pager"})  # version 1 of the command line lacks some of these
GLOBALS = "--region, --output, --query, --no-paginate, --no-cli-pager and --color"
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_SECONDS = re.compile(r"[0-9]{1,2}")


def words_of_command(line: str) -> list[str]:
    """Return the words after `aws`, beginning with the global options, which always include the region.

    Raises `CommandRefused` if the command is not allowed.
    """
    general, words = _general_options(_words_after_aws(line))
    service, operation, arguments = _service_and_operation(words)
    if service == "s3":
        arguments = _s3_arguments(operation, arguments)
    else:
        _check_arguments(service, operation, arguments)
    return [*general, service, operation, *arguments]


def _words_after_aws(line: str) -> list[str]:
    words = words_of_line(line)
    if words[:1] != ["aws"]:
        raise CommandRefused("only commands of aws are carried out, such as: aws s3 ls")
    if any("file://" in word.lower() or "fileb://" in word.lower() for word in words):
        raise CommandRefused("there are no files here: write the value itself into the command")
    return words[1:]


def _general_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the validated global options, and the other words. Global options may be at any position."""
    given: dict[str, str] = {}
    others: list[str] = []
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        name, equals, value = word.partition("=")
        if name not in GLOBAL_VALUES | GLOBAL_FLAGS:
            others.append(word)
            continue
        if name in given:
            raise CommandRefused(f"{name} is given twice")
        if name in GLOBAL_VALUES and not equals:
            value = _next_value(name, waiting)
        elif name in GLOBAL_FLAGS and equals:
            raise CommandRefused(f"{name} takes no value")
        given[name] = value
    if not _REGION.fullmatch(given.setdefault("--region", REGION)):
        raise CommandRefused(f"{given['--region']} is not a region: the account is in {REGION}")
    if given.get("--output", OUTPUTS[0]) not in OUTPUTS:
        raise CommandRefused(f"--output must be one of {', '.join(OUTPUTS)}")
    return [
        f"{name}={value}" if name in GLOBAL_VALUES else name
        for name, value in given.items()
        if name not in WITHOUT_EFFECT
    ], others


def _service_and_operation(words: Sequence[str]) -> tuple[str, str, list[str]]:
    if "help" in words:
        raise CommandRefused(
            "help is not available here: give a command that does something, or write the value help as --name=help"
        )
    for word in words[:2]:
        if word.startswith("-"):
            raise CommandRefused(
                f"{_named(word)} is not carried out: the global options are {GLOBALS}, written in full"
            )
    if len(words) < 2:
        raise CommandRefused("a command must name a service and an operation, such as: aws s3 ls")
    service, operation, *arguments = words
    operations = S3_COMMANDS if service == "s3" else SERVICES[service].operations if service in SERVICES else ()
    if not operations:
        raise CommandRefused(f"aws {service} is not carried out here: the services are s3, {', '.join(SERVICES)}")
    if operation not in operations:
        raise CommandRefused(
            f"aws {service} {operation} is not carried out here: there are {', '.join(sorted(operations))}"
        )
    return service, operation, arguments


def _check_arguments(service: str, operation: str, arguments: Sequence[str]) -> None:
    options = _options(service, SERVICES[service], arguments)
    for bucket in options.get("--bucket", ()):
        _check_bucket(bucket)
    for key in options.get("--key", ()) if service == "s3api" else ():
        _check_key(key)
    for seconds in options.get("--wait-time-seconds", ()):
        if not _SECONDS.fullmatch(seconds) or int(seconds) > WAIT_S_MAX:
            raise CommandRefused(f"--wait-time-seconds must be from 0 to {WAIT_S_MAX}")
    if not set(options.get("--protocol", ())) <= PROTOCOLS:
        raise CommandRefused(f"aws sns {operation}: the available protocols are {', '.join(sorted(PROTOCOLS))}")


def _options(name: str, service: AwsService, arguments: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the values of each option. Every word must belong to one of the service's options."""
    options: dict[str, list[str]] = {}
    option, is_complete = "", True
    for word in arguments:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            option, equals, value = word.partition("=")
            if option not in service.options:
                raise _no_option(name, option)
            if option in options:
                raise CommandRefused(f"{option} is given twice")
            options[option] = [value] if equals else []
            is_complete = bool(equals)
        elif is_complete:
            raise CommandRefused(
                f"{word} does not belong to an option: give one command, with options such as --name x"
            )
        else:
            options[option].append(word)
    return options


def _s3_arguments(command: str, arguments: Sequence[str]) -> list[str]:
    """Return the validated arguments of an `s3` command: locations first, and each option in one word."""
    places, options = _s3_words(arguments)
    fewest, most = S3_COMMANDS[command]
    if not fewest <= len(places) <= most:
        raise CommandRefused(f"aws s3 {command} takes {most} of the form s3://bucket/key, not {len(places)}")
    for number, place in enumerate(places):
        if (command, number, place) != ("cp", 1, "-"):  # "-" prints the object
            _check_place(place, command)
    return [*places, *options]


def _s3_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    places: list[str] = []
    options: list[str] = []
    seen: set[str] = set()
    waiting = list(reversed(arguments))
    while waiting:
        word = waiting.pop()
        name, equals, value = word.partition("=")
        if word == "-" or not word.startswith("-"):
            places.append(word)
            continue
        if name in seen - S3_REPEATED:
            raise CommandRefused(f"{name} is given twice")
        if name in S3_VALUES:
            word = f"{name}={value if equals else _next_value(name, waiting)}"
        elif name not in S3_FLAGS or equals:
            raise _no_option("s3", name)
        seen.add(name)
        options.append(word)
    return places, options


def _next_value(option: str, waiting: list[str]) -> str:
    if not waiting or waiting[-1].startswith("-"):
        raise CommandRefused(f"{option} needs a value")
    return waiting.pop()


def _check_place(place: str, command: str) -> None:
    if not place.startswith("s3://"):
        raise CommandRefused(
            f"{place} is not of the form s3://bucket/key: there are no files here (aws s3 cp s3://bucket/key - shows "
            "an object)"
        )
    bucket, _, key = place.removeprefix("s3://").partition("/")
    if bucket or command != "ls":
        _check_bucket(bucket)
    _check_key(key)


def _check_bucket(bucket: str) -> None:
    if not _BUCKET.fullmatch(bucket):
        raise CommandRefused(
            f"{bucket!r} is not the name of a bucket: a name has 3 to 63 characters, each a-z, 0-9, a dot or a hyphen, "
            "and begins and ends with a letter or a digit"
        )


def _check_key(key: str) -> None:
    if {".", ".."} & set(key.split("/")):  # these would be resolved as a path on the way to the simulator
        raise CommandRefused(f"{key} has a part that is '.' or '..', which no object's key here may have")


def _no_option(service: str, name: str) -> CommandRefused:
    return CommandRefused(
        f"{_named(name)} is not carried out with aws {service}: options must be written in full, and may not name a "
        f"file, an address or a profile; every command has {GLOBALS}"
    )


def _named(word: str) -> str:
    return word.partition("=")[0]
