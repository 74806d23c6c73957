"""The tasks themselves, and which command lines are carried out."""

from collections import Counter

import pytest

from bombus.tasks.aws.catalogue import TASKS, TIERS
from bombus.tasks.aws.commands import CommandRefused, words_of_command


def test_there_are_at_least_twenty_tasks_in_five_tiers() -> None:
    assert len(TASKS) >= 20
    assert set(Counter(task.tier for task in TASKS)) == set(TIERS)
    assert len({task.name for task in TASKS}) == len(TASKS)
    assert all(task.checks and task.gold for task in TASKS)


def test_every_gold_command_is_one_that_is_carried_out() -> None:
    for task in TASKS:
        for line in task.gold:
            assert words_of_command(f"aws {line}")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ls", "only commands of aws are carried out"),
        ("", "only commands of aws are carried out"),
        ("aws s3 ls | wc -l", "there is no shell"),
        ("aws s3 ls && aws s3 ls", "there is no shell"),
        ("aws s3 ls '", "cannot be split into words"),
        ("aws --endpoint-url http://elsewhere s3 ls", "--endpoint-url is not for you"),
        ("aws s3 ls --endpoint-url=http://elsewhere", "--endpoint-url is not for you"),
        ("aws s3 ls --profile prod", "--profile is not for you"),
        ("aws iam create-role --assume-role-policy-document file:///etc/passwd", "there are no files here"),
        ("aws lambda create-function --zip-file fileb://x", "there are no files here"),
        ("aws s3 cp /etc/passwd s3://a", "/etc/passwd is outside"),
        ("aws s3 cp ../x s3://a", "../x is outside"),
        ("aws s3api put-object --bucket a --key b --body /etc/passwd", "/etc/passwd is outside"),
        ("aws s3 help", "aws s3 help is not carried out"),
        ("aws configure", "aws configure is not carried out"),
        ("aws s3 ls " + "x" * 20_000, "over 20000 characters"),
    ],
)
def test_a_command_line_that_leaves_the_simulator_is_refused(line: str, why: str) -> None:
    with pytest.raises(CommandRefused, match=why):
        words_of_command(line)


def test_names_with_slashes_are_no_paths_where_a_service_has_no_files() -> None:
    assert words_of_command("aws ssm get-parameter --name /app/color") == [
        "ssm",
        "get-parameter",
        "--name",
        "/app/color",
    ]
    assert words_of_command("aws sqs purge-queue --queue-url http://x/1/jobs")[-1] == "http://x/1/jobs"
