"""Which command lines are carried out, and in which form they come to the command line of AWS."""

import pytest

from bombus.tasks.aws.catalogue import TASKS
from bombus.tasks.aws.commands import words_of_command
from bombus.tasks.aws.line import CommandRefused

REGION = "--region=us-east-1"


def test_every_command_of_every_task_is_one_that_is_carried_out() -> None:
    for task in TASKS:
        for line in (*task.before, *task.gold, *(check.command for check in task.checks)):
            assert words_of_command(f"aws {line}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("aws s3 ls", [REGION, "s3", "ls"]),
        ("aws --output text s3 ls --no-cli-pager s3://logs/a/", [REGION, "--output=text", "s3", "ls", "s3://logs/a/"]),
        ("aws s3 rm --exclude '*' s3://logs --include=a* --recursive",
         [REGION, "s3", "rm", "s3://logs", "--exclude=*", "--include=a*", "--recursive"]),
        ("aws s3 cp s3://logs/a -", [REGION, "s3", "cp", "s3://logs/a", "-"]),
        ("aws s3 sync s3://logs s3://copies --delete", [REGION, "s3", "sync", "s3://logs", "s3://copies", "--delete"]),
        ("aws ssm get-parameter --name /app/color --query Parameter.Value --region eu-west-1",
         ["--query=Parameter.Value", "--region=eu-west-1", "ssm", "get-parameter", "--name", "/app/color"]),
        ("aws sqs get-queue-attributes --queue-url http://x/1/jobs --attribute-names A B --color off",
         [REGION, "sqs", "get-queue-attributes", "--queue-url", "http://x/1/jobs", "--attribute-names", "A", "B"]),
        ("aws sqs send-message --queue-url=u --message-body=--profile",
         [REGION, "sqs", "send-message", "--queue-url=u", "--message-body=--profile"]),
        ("aws sns publish --topic-arn t --subject '|' --message=help;",
         [REGION, "sns", "publish", "--topic-arn", "t", "--subject", "|", "--message=help"]),
        ("aws sqs create-queue \\\n  --queue-name jobs \\\n  --attributes VisibilityTimeout=120",
         [REGION, "sqs", "create-queue", "--queue-name", "jobs", "--attributes", "VisibilityTimeout=120"]),
        ("aws dynamodb query --limit -1 --no-consistent-read",
         [REGION, "dynamodb", "query", "--limit", "-1", "--no-consistent-read"]),
    ],
)  # fmt: skip
def test_options_of_every_command_come_first_and_the_region_is_always_said(line: str, words: list[str]) -> None:
    given, expected = words_of_command(line), words
    assert (sorted(given), given[-2:]) == (sorted(expected), expected[-2:])
    assert given.index("--region=eu-west-1" if "eu-west-1" in line else REGION) < 3


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ls", "only commands of aws are carried out"),
        ("", "only commands of aws are carried out"),
        ("AWS s3 ls", "only commands of aws are carried out"),
        ("/usr/bin/aws s3 ls", "only commands of aws are carried out"),
        ("aws s3 ls | wc -l", "there is no shell"),
        ("aws s3 ls && aws s3 ls", "there is no shell"),
        ("aws s3 ls '", "cannot be split into words"),
        ("aws s3 ls\naws s3 ls", "give one command at a time"),
        ("aws s3 ls; aws s3 ls", "give one command at a time"),
        ("aws s3 ls s3://logs aws s3 ls", "aws s3 ls takes 1 of the form s3://bucket/key, not 4"),
        ("aws sqs list-queues aws s3 ls", "aws does not belong to an option"),
        ("aws ssm put-parameter --value help", "write the value help as --name=help"),
        ("aws s3 ls " + "x" * 20_000, "over 20000 characters"),
        ("aws s3 ls s3://\ud800", "is not text"),
        ("aws s3 ls s3://a\0", "is not text"),
        ("aws", "must name a service and an operation"),
        ("aws s3", "must name a service and an operation"),
    ],
)
def test_what_is_not_one_command_of_aws_is_refused(line: str, why: str) -> None:
    with pytest.raises(CommandRefused, match=why):
        words_of_command(line)


@pytest.mark.parametrize(
    "option",
    [
        "--endpoint-url http://x", "--endpoint-url=http://x", "--endpoint http://x", "--e http://x", "--end=http://x",
        "--profile prod", "--prof prod", "--p=prod", "--ca-bundle /etc/passwd", "--ca /etc/passwd", "--debug",
        "--debu", "--no-verify-ssl", "--no-v", "--no-sign-request", "--version", "--vers", "--v2-debug",
        "--cli-read-timeout 0", "--cli-connect-timeout=0", "--cli-input-json {}", "--cli-input-yaml x", "--cli-inp {}",
        "--generate-cli-skeleton", "--generate output", "--cli-auto-prompt", "--cli-binary-format raw-in-base64-out",
        "--reg us-east-1", "--outpu json", "--quer x", "--no-pag", "--QUERY x", "-e", "-x", "--", "--=x", "---",
        "'--endpoint-url=http://x y'", "'--endpoint-url http://x'",
    ],
)  # fmt: skip
def test_options_that_are_not_on_the_list_are_refused_wherever_they_stand_and_however_they_are_written(
    option: str,
) -> None:
    for line in (
        f"aws {option} s3 ls", f"aws --output json {option} s3 ls", f"aws s3 {option} ls", f"aws s3 ls {option}",
        f"aws s3 {option} ls s3://logs", f"aws s3 mb s3://logs {option}", f"aws sqs {option} list-queues",
        f"aws sqs list-queues {option}", f"aws sqs list-queues --queue-name-prefix j {option}",
        f"aws sqs list-queues --queue-name-prefix {option}", f"aws --region us-east-1 sqs list-queues {option}",
        f"aws --region {option} sqs list-queues",
    ):  # fmt: skip
        with pytest.raises(CommandRefused):
            words_of_command(line)


@pytest.mark.parametrize(
    "line",
    [
        "configure", "configure set default.region x", "--region us-east-1 --output json configure set a b",
        "cloudformation package --template-file /t.yaml --s3-bucket b", "cloudformation deploy --template-file t",
        "cloudformation create-stack --stack-name s --template-body {}", "deploy push --application-name a --source /d",
        "lambda create-function --function-name f --code S3Bucket=b,S3Key=k", "lambda invoke --function-name f out",
        "ecs execute-command --task t --command sh", "ecs run-task --task-definition t",
        "eks update-kubeconfig --name x",
        "eks get-token --cluster-name x", "ec2-instance-connect ssh --instance-id i", "ec2 run-instances",
        "ssm start-session --target i", "ssm send-command --document-name d", "codeartifact login --tool pip",
        "ecr get-login-password", "emr ssh --cluster-id x", "emr put --src /etc/passwd", "history show", "history list",
        "opsworks register --stack-id s", "codecommit credential-helper get", "cloudtrail validate-logs",
        "cloudfront sign --private-key /etc/passwd", "datapipeline put-pipeline-definition", "gamelift upload-build",
        "rds generate-db-auth-token", "servicecatalog generate", "s3control create-job", "apigateway get-export out",
        "stepfunctions create-state-machine", "kinesis get-records", "glacier upload-archive --body /etc/passwd",
        "iam create-virtual-mfa-device --outfile /tmp/x", "iam upload-server-certificate",
        "logs tail /app/web --follow",
        "logs start-live-tail", "dynamodb wait table-exists --table-name t", "dynamodb wizard new-table",
        "events create-api-destination --name a", "events create-connection --name c", "events put-events --entries x",
        "secretsmanager rotate-secret --secret-id s", "s3api get-object --bucket bbb --key k /tmp/out",
        "s3api select-object-content --bucket bbb", "s3api upload-part --bucket bbb", "s3api wait bucket-exists",
        "s3api create-multipart-upload --bucket bbb --key k", "s3 website s3://bbb", "s3 presign s3://bbb/k",
        "s3 help", "help", "s3api help", "s3api list-buckets help", "ssm put-parameter --overwrite help", "alias x",
        "s3:// ls", "\u2013region us-east-1 s3 ls", "\u2014endpoint-url http://x s3 ls", "S3 ls", "s3 LS", "s3 ls>x",
    ],
)  # fmt: skip
def test_services_and_operations_that_are_not_on_the_list_are_refused(line: str) -> None:
    with pytest.raises(CommandRefused):
        words_of_command(f"aws {line}")


@pytest.mark.parametrize(
    "line",
    [
        "s3 cp /etc/passwd s3://logs/x", "s3 cp s3://logs/x /tmp/x", "s3 cp s3://logs/x .", "s3 cp config s3://logs/x",
        "s3 cp s3://logs/x name", "s3 cp ../x s3://logs", "s3 cp ~/x s3://logs", "s3 cp - s3://logs/x", "s3 cp - -",
        "s3 mv s3://logs/x -", "s3 mv /etc/passwd s3://logs/x", "s3 sync . s3://logs", "s3 sync s3://logs .",
        "s3 sync s3://logs -", "s3 rm /tmp/x", "s3 rb /tmp", "s3 mb x", "s3 ls /tmp", "s3 ls -", "s3 cp s3://logs/x",
        "s3 cp --recursive s3://logs /tmp", "s3 cp s3://logs/a s3://logs/b -", "s3 cp S3://logs/a -",
        "s3 cp --sse-c-key /x s3://logs/a s3://logs/b", "s3 cp s3://logs/x - --follow-symlinks", "s3 rb --force=yes x",
        "s3 cp --source-region --endpoint-url s3://logs/a s3://logs/b", "s3 rm s3://logs --exclude --recursive",
        "s3api put-object --bucket bbb --key k --body /etc/passwd", "s3api put-object --bucket bbb --key k --bod /x",
        "s3api list-buckets /etc/passwd", "s3api put-object --bucket=bbb /etc/passwd --key k",
        "ssm put-parameter --name a --value file:///etc/passwd", "ssm put-parameter --name a --value=file:///etc/passwd",
        "ssm put-parameter --name a --value FILE:///etc/passwd", "ssm put-parameter --name a --value fileb:///x",
        "--query file:///etc/passwd s3 ls", "dynamodb put-item --table-name t --item a@=file:///etc/passwd",
        "s3api put-bucket-tagging --bucket bbb --tagging TagSet@=fileb:///etc/passwd",
        "secretsmanager create-secret --name s --secret-binary x",
    ],
)  # fmt: skip
def test_a_command_that_names_a_file_is_refused(line: str) -> None:
    with pytest.raises(CommandRefused):
        words_of_command(f"aws {line}")


@pytest.mark.parametrize(
    "line",
    [
        "s3 mb s3://_ministack", "s3 cp s3://_ministack/config -", "s3api put-object --bucket _ministack --key reset",
        "s3api put-object --bucket bbb --key ../_ministack/reset", "s3 cp s3://bbb/../_ministack/health -",
        "s3 mv s3://bbb/./a s3://bbb/b", "s3api head-object --bucket=../x --key a", "s3api head-bucket --bucket a/b",
        "s3api list-objects --bucket arn:aws:s3:us-east-1:123456789012:accesspoint/x", "s3 ls s3://arn:aws:s3::1:x",
        "s3 mb s3://", "s3 mb s3://AB", "s3 mb s3://a",
        "sns subscribe --topic-arn t --protocol http --notification-endpoint http://169.254.169.254/",
        "sns subscribe --topic-arn t --protocol=https --notification-endpoint https://x",
        "sns subscribe --topic-arn t --protocol sqs --protocol http", "sns subscribe --protocol sqs http",
        "sns subscribe --topic-arn t --proto http", "--region http://x/ s3 ls", "--region us-east-1.evil.com s3 ls",
        "--output yaml s3 ls", "--region us-east-1 --region eu-west-1 s3 ls", "s3 ls --region", "--no-paginate=x s3 ls",
        "sqs receive-message --queue-url u --wait-time-seconds 1000", "sqs receive-message --wait-time-seconds x",
    ],
)  # fmt: skip
def test_a_command_that_would_make_the_simulator_reach_out_or_reset_itself_or_hang_is_refused(line: str) -> None:
    with pytest.raises(CommandRefused):
        words_of_command(f"aws {line}")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("aws --endpoint http://x s3 ls", "--endpoint is not carried out: the global options are"),
        ("aws s3 ls --profile prod", "--profile is not carried out with aws s3: options must be written in full"),
        ("aws lambda list-functions", "aws lambda is not carried out here: the services are s3, s3api, sqs"),
        ("aws sts assume-role", "aws sts assume-role is not carried out here: there are get-caller-identity"),
        ("aws s3 cp /etc/passwd s3://logs", "/etc/passwd is not of the form s3://bucket/key: there are no files"),
        ("aws sns subscribe --protocol http", "the available protocols are email, email-json, sms, sqs"),
    ],
)
def test_a_refusal_says_what_there_is_instead(line: str, why: str) -> None:
    with pytest.raises(CommandRefused, match=why):
        words_of_command(line)
