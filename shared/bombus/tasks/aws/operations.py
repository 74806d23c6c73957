"""The part of the AWS command line that is carried out: services, their operations and options. Pure.

Anything not listed here is refused. A new entry must not name files, must not reach any address but the simulator's,
and must finish quickly. This excludes operations that run code (lambda, cloudformation, ecs), stream or wait, and
options whose values are blobs or addresses.
"""

import msgspec


class AwsService(msgspec.Struct, frozen=True):
    """A service's operations, and the options of all of them together.

    The AWS command line itself knows which operation takes which options.
    """

    operations: frozenset[str]
    options: frozenset[str]


def _service(operations: str, options: str) -> AwsService:
    return AwsService(frozenset(operations.split()), _options(options + _PAGES))


def _options(names: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in names.split())


_PAGES = " max-items page-size starting-token next-token max-results"

SERVICES = {
    "s3api": _service(
        """
        create-bucket delete-bucket head-bucket list-buckets get-bucket-location
        get-bucket-policy put-bucket-policy delete-bucket-policy get-bucket-policy-status
        get-bucket-tagging put-bucket-tagging delete-bucket-tagging
        get-bucket-lifecycle-configuration put-bucket-lifecycle-configuration delete-bucket-lifecycle
        get-bucket-cors put-bucket-cors delete-bucket-cors
        get-bucket-encryption put-bucket-encryption delete-bucket-encryption
        get-bucket-website put-bucket-website delete-bucket-website
        get-bucket-ownership-controls put-bucket-ownership-controls delete-bucket-ownership-controls
        get-bucket-acl put-bucket-acl get-bucket-logging put-bucket-logging
        get-bucket-versioning put-bucket-versioning
        get-public-access-block put-public-access-block delete-public-access-block
        put-object copy-object head-object delete-object delete-objects
        list-objects list-objects-v2 list-object-versions
        get-object-tagging put-object-tagging delete-object-tagging get-object-acl put-object-acl
        """,
        """
        access-control-policy acl bucket bucket-key-enabled no-bucket-key-enabled bucket-logging-status cache-control
        content-disposition content-encoding content-language content-type continuation-token copy-source
        cors-configuration create-bucket-configuration delete delimiter encoding-type expires fetch-owner
        no-fetch-owner grant-full-control grant-read grant-read-acp grant-write grant-write-acp key key-marker
        lifecycle-configuration marker max-buckets max-keys metadata metadata-directive object-lock-enabled-for-bucket
        no-object-lock-enabled-for-bucket object-ownership ownership-controls policy prefix
        public-access-block-configuration server-side-encryption server-side-encryption-configuration start-after
        storage-class tagging tagging-directive version-id version-id-marker versioning-configuration
        website-configuration
        """,
    ),
    "sqs": _service(
        """
        create-queue delete-queue get-queue-url list-queues get-queue-attributes set-queue-attributes
        send-message send-message-batch receive-message delete-message delete-message-batch
        change-message-visibility change-message-visibility-batch purge-queue
        tag-queue untag-queue list-queue-tags list-dead-letter-source-queues add-permission remove-permission
        """,
        """
        actions attribute-names attributes aws-account-ids delay-seconds entries label max-number-of-messages
        message-attribute-names message-attributes message-body message-deduplication-id message-group-id
        message-system-attribute-names message-system-attributes queue-name queue-name-prefix
        queue-owner-aws-account-id queue-url receipt-handle receive-request-attempt-id tag-keys tags
        visibility-timeout wait-time-seconds
        """,
    ),
    "sns": _service(
        """
        create-topic delete-topic list-topics get-topic-attributes set-topic-attributes
        subscribe unsubscribe list-subscriptions list-subscriptions-by-topic
        get-subscription-attributes set-subscription-attributes publish publish-batch
        tag-resource untag-resource list-tags-for-resource add-permission remove-permission
        """,
        """
        action-name attribute-name attribute-value attributes aws-account-id label message message-attributes
        message-deduplication-id message-group-id message-structure name no-return-subscription-arn
        notification-endpoint phone-number protocol publish-batch-request-entries resource-arn return-subscription-arn
        subject subscription-arn tag-keys tags target-arn topic-arn
        """,
    ),
    "ssm": _service(
        """
        put-parameter get-parameter get-parameters get-parameters-by-path get-parameter-history describe-parameters
        delete-parameter delete-parameters label-parameter-version unlabel-parameter-version
        add-tags-to-resource remove-tags-from-resource list-tags-for-resource
        """,
        """
        allowed-pattern data-type description filters key-id labels name names no-overwrite no-recursive
        no-with-decryption overwrite parameter-filters parameter-version path policies recursive resource-id
        resource-type tag-keys tags tier type value with-decryption
        """,
    ),
    "logs": _service(
        """
        create-log-group delete-log-group describe-log-groups put-retention-policy delete-retention-policy
        create-log-stream delete-log-stream describe-log-streams put-log-events get-log-events filter-log-events
        put-metric-filter delete-metric-filter describe-metric-filters
        tag-log-group untag-log-group list-tags-log-group tag-resource untag-resource list-tags-for-resource
        """,
        """
        descending no-descending end-time filter-name filter-name-prefix filter-pattern interleaved no-interleaved
        kms-key-id limit log-events log-group-class log-group-identifier log-group-name log-group-name-pattern
        log-group-name-prefix log-stream-name log-stream-name-prefix log-stream-names metric-name metric-namespace
        metric-transformations no-start-from-head order-by resource-arn retention-in-days sequence-token
        start-from-head start-time tag-keys tags
        """,
    ),
    "dynamodb": _service(
        """
        create-table delete-table describe-table update-table list-tables put-item get-item update-item delete-item
        batch-get-item batch-write-item transact-get-items transact-write-items execute-statement query scan
        update-time-to-live describe-time-to-live update-continuous-backups describe-continuous-backups
        tag-resource untag-resource list-tags-of-resource
        """,
        """
        attribute-definitions attribute-updates attributes-to-get billing-mode client-request-token
        condition-expression conditional-operator consistent-read no-consistent-read deletion-protection-enabled
        no-deletion-protection-enabled exclusive-start-key exclusive-start-table-name expected
        expression-attribute-names expression-attribute-values filter-expression global-secondary-index-updates
        global-secondary-indexes index-name item key key-condition-expression key-conditions key-schema limit
        local-secondary-indexes on-demand-throughput parameters point-in-time-recovery-specification
        projection-expression provisioned-throughput query-filter request-items resource-arn resource-policy
        return-consumed-capacity return-item-collection-metrics return-values scan-filter scan-index-forward
        no-scan-index-forward segment select sse-specification statement stream-specification table-class table-name
        tag-keys tags time-to-live-specification total-segments transact-items update-expression
        """,
    ),
    "secretsmanager": _service(
        """
        create-secret get-secret-value batch-get-secret-value describe-secret list-secrets list-secret-version-ids
        put-secret-value update-secret update-secret-version-stage delete-secret restore-secret
        tag-resource untag-resource get-resource-policy put-resource-policy delete-resource-policy get-random-password
        """,
        """
        block-public-policy no-block-public-policy client-request-token description exclude-characters
        exclude-lowercase exclude-numbers exclude-punctuation exclude-uppercase filters
        force-delete-without-recovery no-force-delete-without-recovery include-planned-deletion
        no-include-planned-deletion include-deprecated include-space kms-key-id move-to-version-id name
        password-length recovery-window-in-days remove-from-version-id require-each-included-type resource-policy
        secret-id secret-id-list secret-string sort-order tag-keys tags version-id version-stage version-stages
        """,
    ),
    "iam": _service(
        """
        create-role get-role list-roles update-role update-role-description update-assume-role-policy delete-role
        tag-role untag-role list-role-tags put-role-policy get-role-policy list-role-policies delete-role-policy
        attach-role-policy detach-role-policy list-attached-role-policies
        put-role-permissions-boundary delete-role-permissions-boundary
        create-policy get-policy list-policies delete-policy create-policy-version get-policy-version
        list-policy-versions set-default-policy-version delete-policy-version list-entities-for-policy
        create-user get-user list-users update-user delete-user put-user-policy get-user-policy list-user-policies
        delete-user-policy attach-user-policy detach-user-policy list-attached-user-policies
        create-access-key list-access-keys update-access-key delete-access-key
        create-group get-group list-groups delete-group add-user-to-group remove-user-from-group list-groups-for-user
        put-group-policy get-group-policy list-group-policies delete-group-policy
        attach-group-policy detach-group-policy list-attached-group-policies
        create-instance-profile get-instance-profile list-instance-profiles list-instance-profiles-for-role
        delete-instance-profile add-role-to-instance-profile remove-role-from-instance-profile get-account-summary
        """,
        """
        access-key-id assume-role-policy-document description entity-filter group-name instance-profile-name marker
        max-session-duration new-path new-user-name no-only-attached no-set-as-default only-attached path path-prefix
        permissions-boundary policy-arn policy-document policy-name policy-usage-filter role-name scope
        set-as-default status tag-keys tags user-name version-id
        """,
    ),
    "events": _service(
        """
        put-rule describe-rule list-rules enable-rule disable-rule delete-rule
        put-targets list-targets-by-rule list-rule-names-by-target remove-targets
        create-event-bus describe-event-bus list-event-buses delete-event-bus
        tag-resource untag-resource list-tags-for-resource test-event-pattern
        """,
        """
        description event event-bus-name event-pattern force no-force ids limit name name-prefix resource-arn role-arn
        rule schedule-expression state tag-keys tags target-arn targets
        """,
    ),
    "sts": _service("get-caller-identity", ""),
}

# The `s3` commands, with the minimum and the maximum number of locations for each, then their options without and with
# a value.
S3_COMMANDS = {"ls": (0, 1), "mb": (1, 1), "rb": (1, 1), "rm": (1, 1), "cp": (2, 2), "mv": (2, 2), "sync": (2, 2)}
S3_FLAGS = _options(
    "delete dryrun force human-readable no-progress only-show-errors quiet recursive summarize",
)
S3_VALUES = _options(
    "acl cache-control content-type exclude include metadata-directive page-size sse storage-class",
)
S3_REPEATED = _options("exclude include")  # their order matters
PROTOCOLS = frozenset({"sqs", "email", "email-json", "sms"})  # for `sns subscribe`; http would leave the simulator
