"""Beside the right solution of each task stand wrong ones that look like it: none of them is paid as done."""

import pytest

pytest.importorskip("ministack")
pytest.importorskip("awscli")

from bombus.environments.backends.process import ministack
from bombus.environments.kinds import EnvironmentLost
from bombus.sdk.types import Task
from bombus.tasks.aws.catalogue import TASKS
from bombus.tasks.aws.environment import AwsEnvironment

READ_ONLY, ADMIN = "arn:aws:iam::aws:policy/ReadOnlyAccess", "arn:aws:iam::aws:policy/AdministratorAccess"
LAMBDA = '"Principal":{"Service":"lambda.amazonaws.com"},"Action":"sts:AssumeRole"'
ALLOWED, DENIED = (f'{{"Effect":"{effect}",{LAMBDA}}}' for effect in ("Allow", "Deny"))
ANYBODY = '{"Effect":"Allow","Principal":"*","Action":"sts:AssumeRole"}'
EC2_TOO = (
    '{"Effect":"Allow","Principal":{"Service":["lambda.amazonaws.com","ec2.amazonaws.com"]},"Action":"sts:AssumeRole"}'
)
ALL_POWER = '\'{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}\''
BLOCK = "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true"
TOPIC, QUEUE = "arn:aws:sns:us-east-1:000000000000:", "arn:aws:sqs:us-east-1:000000000000:"
ITEM = '\'{"sku":{"S":"A1"},"name":{"S":"bolt"}}\''
ON_DEMAND = "--billing-mode PAY_PER_REQUEST"
PROVISIONED = "--provisioned-throughput ReadCapacityUnits=5,WriteCapacityUnits=5"


def role(name: str, *statements: str) -> str:
    document = f'{{"Version":"2012-10-17","Statement":[{",".join(statements)}]}}'
    return f"iam create-role --role-name {name} --assume-role-policy-document '{document}'"


def table(name: str, key: str, kind: str = "S", billed: str = ON_DEMAND) -> str:
    return (
        f"dynamodb create-table --table-name {name} --attribute-definitions AttributeName={key},AttributeType={kind} "
        f"--key-schema AttributeName={key},KeyType=HASH {billed}"
    )


def blocked(bucket: str, what: str = BLOCK) -> str:
    return f"s3api put-public-access-block --bucket {bucket} --public-access-block-configuration {what}"


def versioned(bucket: str, status: str = "Enabled") -> str:
    return f"s3api put-bucket-versioning --bucket {bucket} --versioning-configuration Status={status}"


def expiring(attribute: str) -> str:
    return (
        "dynamodb update-time-to-live --table-name sessions --time-to-live-specification "
        f"Enabled=true,AttributeName={attribute}"
    )


def attached(name: str, policy: str = READ_ONLY) -> str:
    return f"iam attach-role-policy --role-name {name} --policy-arn {policy}"


def subscribed(endpoint: str, protocol: str = "sqs") -> str:
    return f"sns subscribe --topic-arn {TOPIC}orders --protocol {protocol} --notification-endpoint {endpoint}"


def render(attributes: str) -> str:
    return f"sqs set-queue-attributes --queue-url {{endpoint}}/000000000000/render --attributes {attributes}"


READS = (attached("reporter"), f"iam detach-role-policy --role-name reporter --policy-arn {ADMIN}")
PROTECTED = (blocked("contracts"), versioned("contracts"))
HOST = "ssm put-parameter --name /prod/db/host --value db7.prod.internal --overwrite --type "
FAN_OUT = ("sns create-topic --name orders", "sqs create-queue --queue-name billing")
TAG_PARAMETER = "ssm add-tags-to-resource --resource-type Parameter"
CORS = '{"CORSRules":[{"AllowedMethods":["GET"],"AllowedOrigins":["*"]}]}'
AES = '{"Rules":[{"ApplyServerSideEncryptionByDefault":{"SSEAlgorithm":"AES256"}}]}'
DELETED = (
    "s3api put-bucket-lifecycle-configuration --bucket invoices --lifecycle-configuration "
    '\'{"Rules":[{"ID":"x","Status":"Enabled","Filter":{"Prefix":""},"Expiration":{"Days":1}}]}\''
)
WEBSITE = '{"IndexDocument":{"Suffix":"index.html"}}'
OWNED = '{"Rules":[{"ObjectOwnership":"ObjectWriter"}]}'
LOGGED = '{"LoggingEnabled":{"TargetBucket":"invoices","TargetPrefix":"x"}}'
TAGGED = "s3api put-bucket-tagging --bucket payroll --tagging TagSet=[{Key=team,Value=finance}]"
REPORTS = "sns create-topic --name reports"
NIGHTLY = "events put-rule --name nightly --schedule-expression"
WRONG: dict[str, tuple[tuple[str, ...], ...]] = {
    "bucket": (
        ("s3 mb s3://team-logs-1",),
        ("s3 mb s3://team-logs", "s3 mb s3://team-log"),
        ("s3 mb s3://team-logs --region eu-west-1",),
    ),
    "queue": (
        ("sqs create-queue --queue-name jobs", "sqs create-queue --queue-name other"),
        ("sqs create-queue --queue-name my-jobs",),
        ("--region eu-west-1 sqs create-queue --queue-name jobs",),
    ),
    "topic": (("sns create-topic --name News",), ("sns create-topic --name news", "sns create-topic --name new")),
    "parameter": (
        ("ssm put-parameter --name /app/color --value blue --type SecureString",),
        ("ssm put-parameter --name /app/color --value Blue --type String",),
        ("ssm put-parameter --name /app/colour --value blue --type String",),
        (
            "ssm put-parameter --name /app/color --value blue --type String",
            "ssm put-parameter --name /app/colour --value blue --type String",
        ),
    ),
    "log-group": (("logs create-log-group --log-group-name app/web",),),
    "table": (
        (table("users", "user_id", "N"),),
        (table("users", "user_id", billed=PROVISIONED),),
        (table("users", "id"),),
        (table("users", "user_id"), table("user", "user_id")),
    ),
    "secret": (
        ("secretsmanager create-secret --name db-password --secret-string S3same",),
        ("secretsmanager create-secret --name db_password --secret-string s3same",),
        tuple(
            f"secretsmanager create-secret --name {name} --secret-string s3same"
            for name in ("db-password", "db_password")
        ),
    ),
    "retention": (
        ("logs create-log-group --log-group-name /app/api",),
        (
            "logs create-log-group --log-group-name /app/api",
            "logs put-retention-policy --log-group-name /app/api --retention-in-days 14",
        ),
    ),
    "versioning": (
        ("s3 mb s3://documents",),
        ("s3 mb s3://documents", versioned("documents", "Suspended")),
        ("s3 mb s3://documents --region eu-west-1", versioned("documents")),
    ),
    "role": (
        (role("worker", DENIED),),
        (role("worker", ALLOWED, ANYBODY),),
        (role("worker", EC2_TOO),),
        (role("worker", ANYBODY),),
        (role("worker", ALLOWED), role("workers", ALLOWED)),
    ),
    "item": (
        (table("stock", "sku", billed=PROVISIONED), f"dynamodb put-item --table-name stock --item {ITEM}"),
        (table("stock", "sku"), f"dynamodb put-item --table-name stock --item {ITEM.replace('bolt', 'nut')}"),
        (
            table("stock", "sku"),
            'dynamodb put-item --table-name stock --item \'{"sku":{"S":"A1"},"name":{"S":"bolt"},"x":{"N":"1"}}\'',
        ),
        (table("stock", "sku"), f"dynamodb put-item --table-name stock --item {ITEM}", table("stocks", "sku")),
    ),
    "role-with-policy": (
        (role("auditor", ALLOWED, ANYBODY), attached("auditor")),
        (role("auditor", DENIED), attached("auditor")),
        (role("auditor", ALLOWED), attached("auditor"), role("auditors", ALLOWED)),
        (role("auditor", ALLOWED), attached("auditor"), attached("auditor", ADMIN)),
        (
            role("auditor", ALLOWED),
            attached("auditor"),
            f"iam put-role-policy --role-name auditor --policy-name x --policy-document {ALL_POWER}",
        ),
    ),
    "slow-queue": (
        ("sqs create-queue --queue-name slow-jobs",),
        ("sqs create-queue --queue-name slow-jobs --attributes VisibilityTimeout=12",),
    ),
    "nightly": (
        (REPORTS, f"{NIGHTLY} 'rate(1 day)' --state DISABLED"),
        (REPORTS, f"{NIGHTLY} 'rate(1 hour)'"),
        (f"{NIGHTLY} 'rate(1 day)'",),
    ),
    "fan-out": (
        (*FAN_OUT, subscribed(f"{QUEUE}billing", "email")),
        FAN_OUT,
        (*FAN_OUT, "sqs create-queue --queue-name bills", subscribed(f"{QUEUE}bills")),
    ),
    "private-bucket": (
        (
            "s3 mb s3://payroll",
            blocked("payroll", "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true"),
            versioned("payroll"),
            TAGGED,
        ),
        (
            "s3 mb s3://payroll",
            blocked("payroll"),
            versioned("payroll"),
            "s3api put-bucket-tagging --bucket payroll --tagging TagSet=[{Key=Team,Value=finance}]",
        ),
        *(
            (*made, blocked("payroll"), versioned("payroll"), TAGGED)
            for made in (("s3 mb s3://payroll --region eu-west-1",), ("s3 mb s3://payroll", "s3 mb s3://payrolls"))
        ),
    ),
    "expiry": (
        (table("sessions", "id", "N"), expiring("expires_at")),
        (table("sessions", "id", billed=PROVISIONED), expiring("expires_at")),
        (table("sessions", "id"), expiring("expires")),
        (table("sessions", "id"), expiring("expires_at"), table("session", "id")),
    ),
    "clean-up": (
        ("s3 rb s3://tmp-a", "s3 rb s3://tmp-b", "s3 rb s3://archive-tmp", "s3 mb s3://archive-tmp"),
        ("s3 rb s3://tmp-a", "s3 rb s3://tmp-b", "s3 mb s3://another"),
        ("s3 rb s3://tmp-a",),
    ),
    "too-much-power": (
        (*READS, f"iam put-role-policy --role-name reporter --policy-name x --policy-document {ALL_POWER}"),
        (*READS, attached("deployer")),
        (*READS, f"iam put-role-policy --role-name deployer --policy-name x --policy-document {ALL_POWER}"),
        (attached("reporter"),),
    ),
    "open-bucket": (
        (*PROTECTED, blocked("web-assets"), blocked("invoices")),
        (*PROTECTED, versioned("invoices")),
        (*PROTECTED, "s3api delete-bucket-tagging --bucket web-assets"),
        (*PROTECTED, "s3api put-object --bucket invoices --key x"),
        (*PROTECTED, f"s3api put-bucket-cors --bucket web-assets --cors-configuration '{CORS}'"),
        (*PROTECTED, f"s3api put-bucket-encryption --bucket invoices --server-side-encryption-configuration '{AES}'"),
        (*PROTECTED, DELETED),
        (*PROTECTED, f"s3api put-bucket-website --bucket web-assets --website-configuration '{WEBSITE}'"),
        (*PROTECTED, f"s3api put-bucket-ownership-controls --bucket invoices --ownership-controls '{OWNED}'"),
        (*PROTECTED, f"s3api put-bucket-logging --bucket web-assets --bucket-logging-status '{LOGGED}'"),
        (
            *PROTECTED,
            f"s3api put-bucket-ownership-controls --bucket invoices --ownership-controls '{OWNED}'",
            "s3api put-bucket-acl --bucket invoices --acl public-read-write",
            "s3api delete-bucket-ownership-controls --bucket invoices",
        ),
        (blocked("invoices"), versioned("invoices")),
    ),
    "lost-messages": (
        (render("VisibilityTimeout=360"),),
        (render("VisibilityTimeout=300,MessageRetentionPeriod=1209600"),),
        (render("VisibilityTimeout=360,MessageRetentionPeriod=1209600,DelaySeconds=60"),),
        (
            "sqs delete-queue --queue-url {endpoint}/000000000000/render",
            "sqs create-queue --queue-name render --attributes VisibilityTimeout=360,MessageRetentionPeriod=1209600",
        ),
        (render("VisibilityTimeout=360,MessageRetentionPeriod=1209600"), "sqs create-queue --queue-name other"),
    ),
    "wrong-setting": (
        (f"{HOST} SecureString",),
        (f"{HOST} String", f"{HOST.replace('/prod', '/staging')} String"),
        (f"{HOST} String", "secretsmanager put-secret-value --secret-id prod-database --secret-string x"),
        (f"{HOST} String", "ssm put-parameter --name /prod/db/host2 --value x --type String"),
        (f"{HOST} String", "secretsmanager tag-resource --secret-id prod-database --tags Key=a,Value=b"),
        (f"{HOST} String", "secretsmanager update-secret --secret-id prod-database --description x"),
        (
            f"{HOST} String",
            f"secretsmanager put-resource-policy --secret-id prod-database --resource-policy {ALL_POWER}",
        ),
        *(
            (f"{HOST} String", f"{TAG_PARAMETER} --resource-id /{stage}/db/host --tags Key=a,Value=b")
            for stage in ("prod", "staging")
        ),
    ),
}


def test_there_are_wrong_solutions_of_every_task() -> None:
    assert set(WRONG) == {task.name for task in TASKS}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_solution_is_not_paid_as_done(name: str) -> None:
    simulator = ministack(0, 0)
    await simulator.start()
    try:
        for lines in WRONG[name]:
            await simulator.scrub()
            environment = AwsEnvironment(simulator)
            await environment.reset(Task(metadata={"aws": name}))
            for line in lines:
                shown = await environment.aws(f"aws {line.replace('{endpoint}', simulator.address)}")
                assert "exit code" not in shown, (line, shown)
            assert await environment.progress() < 1.0, lines
            assert not await environment.is_done(), lines
            await environment.close()
    finally:
        await simulator.stop()


async def test_what_was_to_stay_and_changed_costs_all() -> None:
    environment = AwsEnvironment()
    try:
        await environment.reset(Task(metadata={"aws": "open-bucket"}))
        await environment.aws(f"aws {PROTECTED[0]}")
        assert await environment.progress() == 0.4
        await environment.aws(f"aws {versioned('invoices')}")
        assert await environment.progress() == 0.0
    finally:
        await environment.close()


async def test_an_account_whose_simulator_is_gone_has_no_score() -> None:
    simulator = ministack(0, 0)
    await simulator.start()
    environment = AwsEnvironment(simulator)
    await environment.reset(Task(metadata={"aws": "bucket"}))
    await simulator.stop()
    with pytest.raises(EnvironmentLost, match="no longer answers"):
        await environment.progress()
    await environment.close()
