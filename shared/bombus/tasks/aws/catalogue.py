"""The tasks: the prompt, the commands that set up the state, the checks at the end, and a solution. Pure."""

from typing import Any

import msgspec

TIERS = ("warmup", "beginner", "intermediate", "advanced", "expert")
ENDPOINT = "{endpoint}"  # replaced in commands by the simulator's address


class StateCheck(msgspec.Struct, frozen=True):
    """A read-only command and its expected output as JSON. `None` means no output.

    `alone` is another check that must succeed too. It does not count as a separate achievement.
    """

    command: str
    expected: Any
    alone: "StateCheck | None" = None


class AwsTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `before` contains the commands that set up its initial state, and `gold` the commands that solve it.

    `unchanged` contains read-only commands whose output must be the same at the end as at the beginning.
    """

    name: str
    tier: str
    prompt: str
    gold: tuple[str, ...]
    checks: tuple[StateCheck, ...]
    before: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()


def _table(name: str, key: str) -> StateCheck:
    """Return the check for a table that is the only one, has one string as its key, and is billed on demand."""
    return StateCheck(
        f"dynamodb describe-table --table-name {name} --query "
        "Table.[KeySchema,AttributeDefinitions,BillingModeSummary.BillingMode]",
        [
            [{"AttributeName": key, "KeyType": "HASH"}],
            [{"AttributeName": key, "AttributeType": "S"}],
            "PAY_PER_REQUEST",
        ],
        alone=StateCheck("dynamodb list-tables --query TableNames", [name]),
    )


def _assumed_by_lambda(role: str) -> StateCheck:
    """Return the check for a role that is the only one, and that only Lambda may assume."""
    return StateCheck(
        f'iam get-role --role-name {role} --query "to_array(Role.AssumeRolePolicyDocument.Statement)[].'
        '[Effect,keys(Principal),to_array(Principal.Service),to_array(Action),Condition]"',
        [["Allow", ["Service"], ["lambda.amazonaws.com"], ["sts:AssumeRole"], None]],
        alone=StateCheck("iam list-roles --query Roles[].RoleName", [role]),
    )


# The requested resource must be the only one of its kind. If there were others, it would be unclear which one was
# meant.


def _only_bucket(name: str) -> StateCheck:
    """Return the check for a bucket that is the only one, counting the buckets of all regions, and is in the account's
    region."""
    return StateCheck("s3api list-buckets --query Buckets[].[Name,BucketRegion]", [[name, "us-east-1"]])


def _only_queue(name: str) -> StateCheck:
    return StateCheck(
        f"sqs list-queues --query \"[length(QueueUrls),length(QueueUrls[?ends_with(@,'/{name}')])]\"", [1, 1]
    )


_TABLE = (
    "dynamodb create-table --table-name {0} --attribute-definitions AttributeName={1},AttributeType=S "
    "--key-schema AttributeName={1},KeyType=HASH --billing-mode PAY_PER_REQUEST"
)
_TRUST = (
    '\'{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"Service":"lambda.amazonaws.com"},'
    '"Action":"sts:AssumeRole"}]}\''
)
_QUEUE = "{endpoint}/000000000000/"
_MESSAGES = (  # includes messages that have already been received
    "sum([to_number(Attributes.ApproximateNumberOfMessages),"
    "to_number(Attributes.ApproximateNumberOfMessagesNotVisible)])"
)
_TOPIC = "arn:aws:sns:us-east-1:000000000000:"
_QUEUE_ARN = "arn:aws:sqs:us-east-1:000000000000:"
_BLOCK = "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true"
_BLOCKED = "s3api get-public-access-block --bucket {0} --query PublicAccessBlockConfiguration"
_ALL_BLOCKED = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}
_READ_ONLY, _ADMIN = "arn:aws:iam::aws:policy/ReadOnlyAccess", "arn:aws:iam::aws:policy/AdministratorAccess"
_INLINE = "iam list-role-policies --role-name {0} --query PolicyNames"
_ATTACHED = "iam list-attached-role-policies --role-name {0} --query sort(AttachedPolicies[].PolicyArn)"

TASKS = (
    AwsTask(
        name="bucket",
        tier="warmup",
        prompt="Create an S3 bucket named team-logs.",
        gold=("s3 mb s3://team-logs",),
        checks=(_only_bucket("team-logs"),),
    ),
    AwsTask(
        name="queue",
        tier="warmup",
        prompt="Create an SQS queue named jobs.",
        gold=("sqs create-queue --queue-name jobs",),
        checks=(_only_queue("jobs"),),
    ),
    AwsTask(
        name="topic",
        tier="warmup",
        prompt="Create an SNS topic named news.",
        gold=("sns create-topic --name news",),
        checks=(StateCheck("sns list-topics --query Topics[].TopicArn", [f"{_TOPIC}news"]),),
    ),
    AwsTask(
        name="parameter",
        tier="warmup",
        prompt="Store the text blue in a parameter of SSM named /app/color, of type String.",
        gold=("ssm put-parameter --name /app/color --value blue --type String",),
        checks=(
            StateCheck(
                "ssm get-parameter --name /app/color --query Parameter.[Type,Value]",
                ["String", "blue"],
                alone=StateCheck("ssm describe-parameters --query Parameters[].Name", ["/app/color"]),
            ),
        ),
    ),
    AwsTask(
        name="log-group",
        tier="warmup",
        prompt="Create a log group of CloudWatch Logs named /app/web.",
        gold=("logs create-log-group --log-group-name /app/web",),
        checks=(StateCheck("logs describe-log-groups --query logGroups[].logGroupName", ["/app/web"]),),
    ),
    AwsTask(
        name="table",
        tier="beginner",
        prompt="Create a DynamoDB table named users whose partition key is the string user_id, billed on demand.",
        gold=(_TABLE.format("users", "user_id"),),
        checks=(_table("users", "user_id"),),
    ),
    AwsTask(
        name="secret",
        tier="beginner",
        prompt="Store the text s3same in Secrets Manager as the secret db-password.",
        gold=("secretsmanager create-secret --name db-password --secret-string s3same",),
        checks=(
            StateCheck(
                "secretsmanager get-secret-value --secret-id db-password --query SecretString",
                "s3same",
                alone=StateCheck("secretsmanager list-secrets --query SecretList[].Name", ["db-password"]),
            ),
        ),
    ),
    AwsTask(
        name="retention",
        tier="beginner",
        prompt="Create a log group named /app/api that keeps its logs for 7 days.",
        gold=(
            "logs create-log-group --log-group-name /app/api",
            "logs put-retention-policy --log-group-name /app/api --retention-in-days 7",
        ),
        checks=(
            StateCheck("logs describe-log-groups --query logGroups[].logGroupName", ["/app/api"]),
            StateCheck("logs describe-log-groups --query logGroups[].retentionInDays", [7]),
        ),
    ),
    AwsTask(
        name="versioning",
        tier="beginner",
        prompt="Create an S3 bucket named documents, and turn its versioning on.",
        gold=(
            "s3 mb s3://documents",
            "s3api put-bucket-versioning --bucket documents --versioning-configuration Status=Enabled",
        ),
        checks=(
            _only_bucket("documents"),
            StateCheck("s3api get-bucket-versioning --bucket documents --query Status", "Enabled"),
        ),
    ),
    AwsTask(
        name="role",
        tier="beginner",
        prompt="Create an IAM role named worker that lambda.amazonaws.com may assume.",
        gold=(f"iam create-role --role-name worker --assume-role-policy-document {_TRUST}",),
        checks=(_assumed_by_lambda("worker"),),
    ),
    AwsTask(
        name="item",
        tier="intermediate",
        prompt=(
            "Create a DynamoDB table named stock whose partition key is the string sku, billed on demand, and put an "
            "item into it with the sku A1 and the string attribute name of the value bolt."
        ),
        gold=(
            _TABLE.format("stock", "sku"),
            'dynamodb put-item --table-name stock --item \'{"sku":{"S":"A1"},"name":{"S":"bolt"}}\'',
        ),
        checks=(
            _table("stock", "sku"),
            StateCheck("dynamodb scan --table-name stock --query Items", [{"sku": {"S": "A1"}, "name": {"S": "bolt"}}]),
        ),
    ),
    AwsTask(
        name="role-with-policy",
        tier="intermediate",
        prompt=(
            "Create an IAM role named auditor that lambda.amazonaws.com may assume, and attach to it the managed "
            f"policy {_READ_ONLY}."
        ),
        gold=(
            f"iam create-role --role-name auditor --assume-role-policy-document {_TRUST}",
            f"iam attach-role-policy --role-name auditor --policy-arn {_READ_ONLY}",
        ),
        checks=(
            _assumed_by_lambda("auditor"),
            StateCheck(_ATTACHED.format("auditor"), [_READ_ONLY]),
            StateCheck(_INLINE.format("auditor"), []),
        ),
    ),
    AwsTask(
        name="slow-queue",
        tier="intermediate",
        prompt="Create an SQS queue named slow-jobs with a visibility timeout of 120 seconds.",
        gold=("sqs create-queue --queue-name slow-jobs --attributes VisibilityTimeout=120",),
        checks=(
            _only_queue("slow-jobs"),
            StateCheck(
                f"sqs get-queue-attributes --queue-url {_QUEUE}slow-jobs --attribute-names VisibilityTimeout "
                "--query Attributes.VisibilityTimeout",
                "120",
            ),
        ),
    ),
    AwsTask(
        name="nightly",
        tier="intermediate",
        prompt=(
            "Create an SNS topic named reports, and a rule of EventBridge named nightly that runs once a day "
            "(rate(1 day))."
        ),
        gold=("sns create-topic --name reports", "events put-rule --name nightly --schedule-expression 'rate(1 day)'"),
        checks=(
            StateCheck("sns list-topics --query Topics[].TopicArn", [f"{_TOPIC}reports"]),
            StateCheck(
                "events list-rules --query Rules[].[Name,ScheduleExpression,EventPattern,State]",
                [["nightly", "rate(1 day)", None, "ENABLED"]],
            ),
        ),
    ),
    AwsTask(
        name="fan-out",
        tier="advanced",
        prompt="Create an SNS topic named orders and an SQS queue named billing, and subscribe the queue to the topic.",
        gold=(
            "sns create-topic --name orders",
            "sqs create-queue --queue-name billing",
            f"sns subscribe --topic-arn {_TOPIC}orders --protocol sqs --notification-endpoint {_QUEUE_ARN}billing",
        ),
        checks=(
            StateCheck("sns list-topics --query Topics[].TopicArn", [f"{_TOPIC}orders"]),
            _only_queue("billing"),
            StateCheck(
                "sns list-subscriptions --query Subscriptions[].[TopicArn,Protocol,Endpoint]",
                [[f"{_TOPIC}orders", "sqs", f"{_QUEUE_ARN}billing"]],
            ),
        ),
    ),
    AwsTask(
        name="private-bucket",
        tier="advanced",
        prompt=(
            "Create an S3 bucket named payroll. Block all public access to it (all four settings), turn its versioning "
            "on, and tag it with team=finance."
        ),
        gold=(
            "s3 mb s3://payroll",
            f"s3api put-public-access-block --bucket payroll --public-access-block-configuration {_BLOCK}",
            "s3api put-bucket-versioning --bucket payroll --versioning-configuration Status=Enabled",
            "s3api put-bucket-tagging --bucket payroll --tagging TagSet=[{Key=team,Value=finance}]",
        ),
        checks=(
            StateCheck(_BLOCKED.format("payroll"), _ALL_BLOCKED, alone=_only_bucket("payroll")),
            StateCheck("s3api get-bucket-versioning --bucket payroll --query Status", "Enabled"),
            StateCheck(
                "s3api get-bucket-tagging --bucket payroll --query TagSet", [{"Key": "team", "Value": "finance"}]
            ),
        ),
    ),
    AwsTask(
        name="expiry",
        tier="advanced",
        prompt=(
            "Create a DynamoDB table named sessions whose partition key is the string id, billed on demand. Items are "
            "to expire by the attribute expires_at."
        ),
        gold=(
            _TABLE.format("sessions", "id"),
            "dynamodb update-time-to-live --table-name sessions --time-to-live-specification "
            "Enabled=true,AttributeName=expires_at",
        ),
        checks=(
            _table("sessions", "id"),
            StateCheck(
                "dynamodb describe-time-to-live --table-name sessions --query "
                "TimeToLiveDescription.[TimeToLiveStatus,AttributeName]",
                ["ENABLED", "expires_at"],
            ),
        ),
    ),
    AwsTask(
        name="clean-up",
        tier="advanced",
        prompt="Delete the S3 buckets whose names begin with tmp-, and no other bucket. All of them are empty.",
        before=(
            *(f"s3 mb s3://{name}" for name in ("tmp-a", "tmp-b", "archive-tmp")),
            "s3api put-bucket-tagging --bucket archive-tmp --tagging TagSet=[{Key=class,Value=archive}]",
        ),
        gold=("s3 rb s3://tmp-a", "s3 rb s3://tmp-b"),
        checks=(StateCheck("s3api list-buckets --query \"length(Buckets[?starts_with(Name,'tmp-')])\"", 0),),
        unchanged=(
            "s3api list-buckets --query \"Buckets[?!starts_with(Name,'tmp-')]\"",
            "s3api get-bucket-tagging --bucket archive-tmp",
        ),
    ),
    AwsTask(
        name="too-much-power",
        tier="expert",
        prompt=(
            f"The IAM role reporter has the managed policy {_ADMIN}. It only reads. Give it {_READ_ONLY} in place of "
            "that, and leave the role deployer as it is."
        ),
        before=(
            *(
                f"iam create-role --role-name {name} --assume-role-policy-document {_TRUST}"
                for name in ("reporter", "deployer")
            ),
            *(f"iam attach-role-policy --role-name {name} --policy-arn {_ADMIN}" for name in ("reporter", "deployer")),
        ),
        gold=(
            f"iam attach-role-policy --role-name reporter --policy-arn {_READ_ONLY}",
            f"iam detach-role-policy --role-name reporter --policy-arn {_ADMIN}",
        ),
        checks=(StateCheck(_ATTACHED.format("reporter"), [_READ_ONLY]),),
        unchanged=(
            "iam list-roles --query Roles",
            _ATTACHED.format("deployer"),
            *(_INLINE.format(name) for name in ("reporter", "deployer")),
            *(f"iam get-role --role-name {name}" for name in ("reporter", "deployer")),
        ),
    ),
    AwsTask(
        name="open-bucket",
        tier="expert",
        prompt=(
            "One of the S3 buckets web-assets, invoices and contracts is tagged with class=confidential, and is not "
            "protected. Find it, block all public access to it (all four settings), and turn its versioning on. Change "
            "nothing about the others."
        ),
        before=(
            *(f"s3 mb s3://{name}" for name in ("web-assets", "invoices", "contracts")),
            "s3api put-bucket-tagging --bucket contracts --tagging TagSet=[{Key=class,Value=confidential}]",
            "s3api put-bucket-tagging --bucket web-assets --tagging TagSet=[{Key=class,Value=public}]",
        ),
        gold=(
            f"s3api put-public-access-block --bucket contracts --public-access-block-configuration {_BLOCK}",
            "s3api put-bucket-versioning --bucket contracts --versioning-configuration Status=Enabled",
        ),
        checks=(
            StateCheck(_BLOCKED.format("contracts"), _ALL_BLOCKED),
            StateCheck("s3api get-bucket-versioning --bucket contracts --query Status", "Enabled"),
        ),
        unchanged=(
            "s3api list-buckets --query Buckets",
            "s3api get-bucket-tagging --bucket contracts",
            *(
                f"s3api get-{what} --bucket {name}"
                for name in ("web-assets", "invoices")
                for what in (
                    "bucket-tagging",
                    "bucket-versioning",
                    "public-access-block",
                    "bucket-policy",
                    "bucket-cors",
                    "bucket-encryption",
                    "bucket-lifecycle-configuration",
                    "bucket-website",
                    "bucket-ownership-controls",
                    "bucket-acl",
                    "bucket-logging",
                )
            ),
            *(f"s3api list-objects-v2 --bucket {name} --query Contents[].Key" for name in ("web-assets", "invoices")),
        ),
    ),
    AwsTask(
        name="lost-messages",
        tier="expert",
        prompt=(
            "Workers take up to 5 minutes for a message of the SQS queue render, which is given to another worker "
            "after 30 seconds. Set its visibility timeout to 360 seconds, and have it keep messages for 14 days."
        ),
        before=(
            "sqs create-queue --queue-name render --attributes VisibilityTimeout=30",
            f"sqs send-message --queue-url {_QUEUE}render --message-body frame-1",
        ),
        gold=(
            f"sqs set-queue-attributes --queue-url {_QUEUE}render --attributes "
            "VisibilityTimeout=360,MessageRetentionPeriod=1209600",
        ),
        checks=tuple(
            StateCheck(
                f"sqs get-queue-attributes --queue-url {_QUEUE}render --attribute-names All --query Attributes.{name}",
                value,
            )
            for name, value in (("VisibilityTimeout", "360"), ("MessageRetentionPeriod", "1209600"))
        ),
        unchanged=(
            "sqs list-queues",
            f'sqs get-queue-attributes --queue-url {_QUEUE}render --attribute-names All --query "{_MESSAGES}"',
            f"sqs get-queue-attributes --queue-url {_QUEUE}render --attribute-names All --query "
            "Attributes.[DelaySeconds,MaximumMessageSize,ReceiveMessageWaitTimeSeconds,RedrivePolicy,Policy]",
        ),
    ),
    AwsTask(
        name="wrong-setting",
        tier="expert",
        prompt=(
            "The application reads its database's host from the SSM parameter /prod/db/host, which names a host of the "
            "staging system. The right host is in the secret prod-database. Correct the parameter, and change nothing "
            "else."
        ),
        before=(
            "ssm put-parameter --name /prod/db/host --value db.staging.internal --type String",
            "ssm put-parameter --name /staging/db/host --value db.staging.internal --type String",
            "secretsmanager create-secret --name prod-database --secret-string db7.prod.internal",
        ),
        gold=("ssm put-parameter --name /prod/db/host --value db7.prod.internal --type String --overwrite",),
        checks=(
            StateCheck(
                "ssm get-parameter --name /prod/db/host --query Parameter.[Type,Value]", ["String", "db7.prod.internal"]
            ),
        ),
        unchanged=(
            "ssm describe-parameters --query sort(Parameters[].Name)",
            "ssm get-parameter --name /staging/db/host",
            "secretsmanager get-secret-value --secret-id prod-database",
            "secretsmanager list-secrets --query SecretList[].[Name,Description,KmsKeyId,Tags]",
            "secretsmanager get-resource-policy --secret-id prod-database",
            *(
                f"ssm list-tags-for-resource --resource-type Parameter --resource-id /{stage}/db/host"
                for stage in ("prod", "staging")
            ),
        ),
    ),
)
