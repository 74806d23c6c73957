"""The names of message headers: our own, and those of the server that we set."""

EPOCH = "Bombus-Epoch"  # on events: the epoch of the coordinator that wrote it (R4)
INBOX = "Bombus-Inbox"  # on events: the inbox sequence that it answers (R2)
REPLY = "Bombus-Reply"  # on commands: the core NATS subject for the answer
TRACEPARENT = "traceparent"  # W3C trace context

MSG_ID = "Nats-Msg-Id"
EXPECTED_LAST = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_OF_SUBJECT = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_FILTER = "Nats-Expected-Last-Subject-Sequence-Subject"
BATCH_ID = "Nats-Batch-Id"
BATCH_SEQUENCE = "Nats-Batch-Sequence"
BATCH_COMMIT = "Nats-Batch-Commit"
ROLLUP = "Nats-Rollup"
TTL = "Nats-TTL"
