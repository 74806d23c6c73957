"""Accounts for every sampled token, every rollout group and every training operation on a log. Pure.

The audit keeps its own books beside the fold, from the same events: what was sampled, and what became of it. A
difference is a place where the log contradicts itself: a step that does not account for what its episodes sampled, an
episode that is trained on twice, a version that sampled before its weights were published, or a fold whose state
disagrees with the books.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from math import inf, isclose

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.events import EpisodeType, Event, NotedCall
from bombus.hive.fates import Fate, StepTokens
from bombus.hive.fold.evolve import evolve
from bombus.hive.records import CallStatus
from bombus.hive.state import EngineState, Hive, Phase
from bombus.replay.audit.books import Account, AuditedEpisode, AuditedGroup, AuditedStep, Books
from bombus.replay.audit.operations import Operations, folded_waiting
from bombus.replay.audit.report import AuditReport, Difference, SourceTokens, TrainedStep, VersionTokens

DIFFERENCES_KEPT = 100
CALLS_KEPT = 1_000_000  # among so many calls of an engine, the newest, a call that is noted twice is found
NOT_REPORTED = "trained or masked: an older trainer did not report which"
DELIVERED = "delivered to an outside trainer"
TO_CLIENT = "sampled for a training client"


class Audit:
    """Reads the events of a log in order: call `read` for each, then `report`."""

    def __init__(self, hive: Hive | None = None, seq: int = 0) -> None:
        self.hive = Hive() if hive is None else hive
        self._seq = seq
        self._books: dict[str, Books] = {}
        self._accounts: dict[tuple[str, int, str], Account] = {}
        self._groups: Counter[str] = Counter()
        self._operations: Counter[str] = Counter()
        self._steps: dict[tuple[str, int, int], TrainedStep] = {}
        self._differences: list[Difference] = []
        self._count = 0
        for engine in self.hive.engines.values():
            self._take_over(engine)

    def read(self, event: Event, seq: int) -> None:
        """Enter an event into the books, and fold it."""
        self._seq = seq
        kind = type(event)
        handle = _HANDLERS.get(kind)
        if handle is not None:
            if kind in _OF_THE_RUN:
                self._check_run(event)
            handle(self, self._of(event.engine), event)
        evolve(self.hive, event)
        if kind is ev.EngineStarted:  # the new run may continue the figures of the previous run
            self._of(event.engine).counted = self.hive.engines[event.engine].counters.completion_tokens

    def _check_run(self, event: Event) -> None:
        engine, run = self.hive.engines.get(event.engine), getattr(event, "run", 0)
        if run != (current := 0 if engine is None else engine.run):
            self._differ(
                event.engine, "", f"{event.__struct_config__.tag} is of run {run}, but the current run is {current}"
            )

    # ---- episodes and their calls -------------------------------------------------------------------------------

    def claimed(self, books: Books, event: ev.EpisodeClaimed) -> None:
        account = self._account_of(event.engine, event.run, event.client)
        for name in event.episodes:
            if name in books.open or name in books.pool:
                self._differ(event.engine, name, "was claimed twice")
            books.open[name] = AuditedEpisode(account, kind=event.type, version=event.version)

    def noted(self, books: Books, event: ev.CallsNoted) -> None:
        for call in event.calls:
            name, call_id, count = call.episode, call.ref.id, call.completion_tokens
            episode = books.open.get(name)
            if call_id in books.calls:
                if episode is not None or books.calls[call_id] not in (None, name):
                    self._differ(event.engine, name, f"call {call_id} was noted twice")
                continue  # its message was repeated after the episode had ended: the tokens were not sampled again
            books.calls[call_id] = name
            books.counted += count
            account = self._account_of(event.engine, event.run, call.holder) if episode is None else episode.account
            account.sampled += count
            weights = call.sampler or books.published.get(call.newest, "")
            books.versions[event.run, call.oldest, call.newest, weights] += count
            if call.sampler or call.newest not in books.published or call.oldest > call.newest:
                self._check_sampler(books, event.engine, call)
            if name and call.late == (episode is not None):
                when, state = ("as late", "open") if call.late else ("in time", "not open")
                self._differ(event.engine, name, f"call {call_id} was noted {when}, but it is {state}")
            if not name:
                account.fates[TO_CLIENT] += count
            elif call.late or episode is None:
                account.fates[Fate.DROPPED_LATE] += count
            elif call.status != CallStatus.COMPLETE:
                account.fates[Fate.DROPPED_CUT_OFF] += count
            else:
                episode.add(call)
        trim(books.calls, CALLS_KEPT)

    def _check_sampler(self, books: Books, engine: str, call: NotedCall) -> None:
        """Check that the versions, or the adapter, that sampled a call were there."""
        is_there = call.newest < books.earlier or call.newest in books.published
        if books.published and call.completion_tokens and not is_there:
            self._differ(engine, call.episode, f"was sampled by version {call.newest}, which is not in the log")
        if call.sampler and call.sampler not in books.adapters:
            self._differ(engine, call.episode, f"was sampled by adapter {call.sampler}, which nobody saved")
        if call.oldest > call.newest:
            why = f"call {call.ref.id} was sampled by versions {call.oldest} to {call.newest}"
            self._differ(engine, call.episode, why)

    def ended(self, books: Books, event: ev.EpisodeEnded) -> None:
        for outcome in event.outcomes:
            episode = books.open.pop(outcome.episode, None)
            if episode is None:
                if outcome.episode in books.pool:  # an episode may end again after this: the last end counts
                    books.pool[outcome.episode].end(outcome)
                else:
                    self._differ(event.engine, outcome.episode, "ended, but was not open")
                continue
            episode.end(outcome)
            if event.type != episode.kind:
                why = f"was claimed as an episode to {episode.kind}, but ended as one to {event.type}"
                self._differ(event.engine, outcome.episode, why)
            complete = episode.tokens + episode.auxiliary
            if episode.account.client != event.client:
                why = f"was ended by client {event.client}, but claimed by {episode.account.client}"
                self._differ(event.engine, outcome.episode, why)
            if outcome.completion_tokens != complete and not outcome.calls:  # older versions listed the calls instead
                why = f"ended with {outcome.completion_tokens} tokens, but {complete} were noted"
                self._differ(event.engine, outcome.episode, why)
            oldest = episode.version if episode.oldest is None else episode.oldest
            if outcome.oldest != oldest and not outcome.calls:
                why = f"ended with tokens of version {outcome.oldest}, but version {oldest} was noted as the oldest"
                self._differ(event.engine, outcome.episode, why)
            if event.type == EpisodeType.EVAL:
                episode.settle(Fate.EVALUATION)
            else:
                episode.account.fates[Fate.MASKED_AUXILIARY] += episode.auxiliary
                episode.auxiliary = 0
                books.pool[outcome.episode] = episode

    def aborted(self, books: Books, event: ev.EpisodeAborted) -> None:
        kind = event.failed_by
        fate = "dropped: episode aborted by its client" if kind is None else f"dropped: episode failed ({kind})"
        for name in event.episodes:
            episode = books.open.pop(name, None)
            if episode is None:
                self._differ(event.engine, name, "was aborted, but was not open")
            else:
                episode.settle(fate)

    def dropped(self, books: Books, event: ev.GroupDropped) -> None:
        self._leave_pool(books, event, event.episodes, f"dropped: {event.reason.replace('_', ' ')}")

    def taken(self, books: Books, event: ev.EpisodesTaken) -> None:
        self._leave_pool(books, event, event.episodes, Fate.TAKEN)

    def cleared(self, books: Books, event: ev.PoolCleared) -> None:
        if event.episodes != len(books.pool):
            why = f"the pool was cleared of {event.episodes} episodes, but had {len(books.pool)}"
            self._differ(event.engine, "", why)
        self._leave_pool(books, event, list(books.pool), f"dropped: {event.reason.replace('_', ' ')}")

    def _leave_pool(self, books: Books, event: Event, names: Iterable[str], fate: str) -> None:
        for episode in self._from_pool(books, event, names).values():
            episode.settle(fate)

    def _from_pool(self, books: Books, event: Event, names: Iterable[str]) -> dict[str, AuditedEpisode]:
        found: dict[str, AuditedEpisode] = {}
        for name in names:
            episode = books.pool.pop(name, None)
            if episode is None:
                self._differ(event.engine, name, f"is in {event.__struct_config__.tag}, but was not in the pool")
            else:
                found[name] = episode
        return found

    # ---- batches and steps --------------------------------------------------------------------------------------

    def sealed(self, books: Books, event: ev.BatchReady) -> None:
        if books.batch is not None:
            self._differ(
                event.engine, "", f"the batch of step {event.step} was sealed before step {books.batch.number} ended"
            )
            self._abandon(books, Fate.DROPPED_RUN_OVER)
        step = self.hive.engine(event.engine).step
        if event.step != step + 1:
            self._differ(event.engine, "", f"the batch of step {event.step} was sealed after step {step}")
        names = [episode.episode for group in event.groups for episode in group.episodes]
        groups = {number: books.queue.pop(number) for number in event.taken if number in books.queue}
        for number in event.taken:
            if number not in groups:
                self._differ(
                    event.engine, "", f"rollout group {number} is in the batch of step {event.step}, but was not queued"
                )
        books.batch = AuditedStep(event.step, self._from_pool(books, event, names), groups)
        self._check_batch(books.batch, event)

    def _check_batch(self, batch: AuditedStep, event: ev.BatchReady) -> None:
        """Compare the episodes of a batch with their ends, and with what the state will give to the trainer."""
        engine = self.hive.engine(event.engine)
        bound = engine.collection.max_staleness
        for group in event.groups:
            for each in group.episodes:
                episode, pooled = batch.episodes.get(each.episode), engine.pool.get(each.episode)
                if episode is None:
                    continue
                if (group.task, each.reward) != (episode.task, episode.reward):
                    why = f"ended as task {episode.task} with reward {episode.reward:g}"
                    why = f"{why}, but is in the batch as {group.task} with {each.reward:g}"
                    self._differ(event.engine, each.episode, why)
                if episode.known and pooled is not None and {call.id for call in pooled.calls} != episode.calls:
                    self._differ(event.engine, each.episode, "has other calls in the state than were noted")
                if bound and episode.oldest is not None and (age := event.step - 1 - episode.oldest) > bound:
                    why = f"is {age} versions old in the batch of step {event.step}, over collection.max_staleness"
                    self._differ(event.engine, each.episode, f"{why} ({bound})")

    def completed(self, books: Books, event: ev.StepCompleted) -> None:
        batch, books.batch = books.batch, None
        if batch is None or batch.number != event.step:
            self._differ(event.engine, "", f"step {event.step} was completed without its batch")
            batch = batch or AuditedStep(event.step, {}, {})
        given = event.tokens or StepTokens()
        for name, episode in batch.episodes.items():
            self._account(event, name, episode, event.tokens)
        for name in given.episodes.keys() & given.left_out.keys():
            self._differ(event.engine, name, f"step {event.step} both accounts for it and leaves it out")
        for name in given.episodes.keys() | given.left_out.keys():
            if batch.episodes and name not in batch.episodes:
                self._differ(event.engine, name, f"step {event.step} accounts for it, but that step's batch lacks it")
        for group in batch.groups.values():
            what = "trained" if group.tokens else "empty"
            self._end_groups([group], what, "trained or masked: as part of a rollout group")
        trained = sum(
            count
            for row in given.episodes.values()
            for fate, count in zip(given.fates, row, strict=False)
            if fate == Fate.TRAINED
        )
        self._check_step(event, given, trained)
        step = TrainedStep(engine=event.engine, run=event.run, step=event.step, tokens=trained, data=given.data.hex())
        self._steps[event.engine, event.run, event.step] = step

    def _check_step(self, event: ev.StepCompleted, given: StepTokens, trained: int) -> None:
        """Check the weights and the data of a step that trained on so many tokens."""
        for name in given.weights.keys() - given.episodes.keys():
            self._differ(event.engine, name, f"step {event.step} gives it a weight, but does not account for it")
        if event.metrics.get("updates") == 1.0 and not _is_even(given):
            why = "in one update, but neither all its episodes nor all its tokens have the same weight"
            self._differ(event.engine, "", f"step {event.step} was trained {why}")
        if trained and not given.data:
            self._differ(event.engine, "", f"step {event.step} does not say which data it was trained on")

    def _account(self, event: ev.StepCompleted, name: str, episode: AuditedEpisode, given: StepTokens | None) -> None:
        if given is None:
            episode.settle(NOT_REPORTED)
        elif name in given.left_out:
            episode.settle(given.left_out[name])
        elif name not in given.episodes:
            self._differ(event.engine, name, f"step {event.step} does not account for it")
        else:
            counts = given.episodes[name]
            row: Counter[Fate] = Counter()
            for fate, count in zip(given.fates, counts, strict=False):
                row[fate] += count
            if len(counts) != len(given.fates) or min(counts, default=0) < 0:
                why = f"step {event.step} accounts for it with {counts} of {len(given.fates)} fates"
                self._differ(event.engine, name, why)
            weight, counts_in_loss = given.weights.get(name), row[Fate.TRAINED] > 0
            if (weight is not None) != counts_in_loss or not 0.0 <= (weight or 0.0) < inf:
                why = f"step {event.step} has trained {row[Fate.TRAINED]} tokens of it"
                self._differ(event.engine, name, f"{why}, with a weight of {weight} in the loss")
            if not episode.known:
                episode.tokens = sum(row.values())
                episode.account.sampled += episode.tokens
            total, parts = sum(row.values()), [f"{count} {fate}" for fate, count in row.items() if count]
            if total != episode.tokens:
                why = f"sampled {episode.tokens} tokens, but step {event.step} accounts for {total}"
                self._differ(event.engine, name, f"{why}: {', '.join(parts)}" if parts else why)
            for fate, count in row.items():
                episode.account.fates[fate] += count

    # ---- runs and versions --------------------------------------------------------------------------------------

    def started(self, books: Books, event: ev.EngineStarted) -> None:
        """Begin a run: what the last run has left will no longer be trained on."""
        self._abandon(books, Fate.DROPPED_RUN_OVER)
        for episode in (*books.open.values(), *books.pool.values()):
            episode.settle(Fate.DROPPED_RUN_OVER)
        books.open, books.pool, books.published, books.earlier = {}, {}, {}, 0

    def published(self, books: Books, event: ev.WeightsReady) -> None:
        engine = self.hive.engine(event.engine)
        if event.version > max(engine.begun, 0 if engine.step_done is None else engine.step_done.step):
            self._differ(event.engine, "", f"version {event.version} is ready, but its step was not completed")
        if event.version in books.published:
            self._differ(event.engine, "", f"version {event.version} was published twice")
        books.published[event.version] = event.weights.sha256
        key = event.engine, event.run, event.version
        if key in self._steps:
            self._steps[key] = msgspec.structs.replace(self._steps[key], weights=event.weights.sha256)

    def loaded(self, books: Books, event: ev.WeightsLoaded) -> None:
        if books.published and event.version >= books.earlier and event.version not in books.published:
            why = f"replica {event.replica} has loaded version {event.version}, which is not in the log"
            self._differ(event.engine, "", why)

    def over(self, books: Books, event: ev.EngineStopped | ev.EngineFailed) -> None:
        books.operations.close_all()
        if self.hive.engines[event.engine].queues_groups:  # otherwise groups wait for a run that has a queue
            self._end_groups(books.take_groups(), Fate.DROPPED_RUN_OVER, Fate.DROPPED_RUN_OVER)

    def _abandon(self, books: Books, fate: str) -> None:
        batch, books.batch = books.batch, None
        if batch is not None:
            self._groups[fate] += len(batch.groups)
            for episode in batch.all_episodes():
                episode.settle(fate)

    # ---- rollout groups -----------------------------------------------------------------------------------------

    def pushed(self, books: Books, event: ev.GroupsPushed) -> None:
        episodes = tuple(self._from_pool(books, event, event.episodes).values())
        for group in event.groups:
            books.arrived += 1
            books.queue[books.arrived] = AuditedGroup(group.tokens, episodes)
            episodes = ()
        self._groups["pushed"] += len(event.groups)

    def handed_out(self, books: Books, event: ev.BatchHandedOut) -> None:
        combined = self.hive.engines[event.engine].trajectories.queue.combined
        numbers = {*event.groups, *(member for number in event.groups for member in combined.get(number, ()))}
        for number in sorted(numbers - books.queue.keys()):
            self._differ(event.engine, "", f"rollout group {number} was handed out, but was not queued")
        books.handed[event.number] = {number: books.queue.pop(number) for number in numbers if number in books.queue}

    def delivered(self, books: Books, event: ev.BatchDelivered) -> None:
        if event.number not in books.handed:
            self._differ(event.engine, "", f"batch {event.number} was delivered, but was not handed out")
        self._end_groups(books.handed.pop(event.number, {}).values(), DELIVERED, DELIVERED)

    def given_up(self, books: Books, event: ev.GroupsGivenUp) -> None:
        places = [books.queue, *books.handed.values(), *([] if books.batch is None else [books.batch.groups])]
        for number in event.groups:
            found = next((place.pop(number) for place in places if number in place), None)
            if found is None:
                self._differ(
                    event.engine, "", f"rollout group {number} was given up, but was neither queued nor in a batch"
                )
                continue
            self._end_groups([found], "dropped: given up", "dropped: rollout group given up")
        for number, group in books.handed.pop(event.number, {}).items():
            books.queue[number] = group

    def reset(self, books: Books, event: ev.GroupsReset) -> None:
        self._end_groups(books.take_groups(), "dropped: reset", "dropped: rollout group reset")

    def _end_groups(self, groups: Iterable[AuditedGroup], what: str, fate: str) -> None:
        """Count groups as `what`, and the tokens of their episodes as `fate`."""
        for group in groups:
            self._groups[what] += 1
            for episode in group.episodes:
                episode.settle(fate)

    # ---- training clients ---------------------------------------------------------------------------------------

    def saved(self, books: Books, event: ev.WeightsKept) -> None:
        books.adapters.add(event.saved.address)

    def accepted(self, books: Books, event: ev.OperationAccepted) -> None:
        books.operations.accepted(event)

    def executed(self, books: Books, event: ev.OperationCompleted) -> None:
        books.operations.executed(event)

    def closed(self, books: Books, event: ev.ModelClosed) -> None:
        books.operations.close(event.model)

    # ---- the report ---------------------------------------------------------------------------------------------

    def report(self) -> AuditReport:
        """Compare the books with the fold, and return what was found. Call it once, after the last event."""
        for name, books in self._books.items():
            self._compare(name, books)
            self._close_books(name, books)
        for account in self._accounts.values():
            if (accounted := account.fates.total()) != account.sampled:
                why = f"client {account.client or '-'} sampled {account.sampled} tokens in run {account.run}, but "
                self._differ(account.engine, "", f"{why}{accounted} are accounted for")
        tokens = sum((account.fates for account in self._accounts.values()), Counter[str]())
        return AuditReport(
            sampled=sum(account.sampled for account in self._accounts.values()),
            tokens=_by_name(tokens),
            sources=[
                SourceTokens(
                    engine=account.engine,
                    run=account.run,
                    client=account.client,
                    sampled=account.sampled,
                    tokens=_by_name(account.fates),
                )
                for account in self._accounts.values()
            ],
            versions=[
                VersionTokens(engine=engine, run=run, oldest=oldest, newest=newest, tokens=count, weights=weights)
                for engine, books in self._books.items()
                for (run, oldest, newest, weights), count in books.versions.items()
            ],
            steps=list(self._steps.values()),
            groups=dict(+self._groups),
            operations=dict(+self._operations),
            differences=self._differences,
            differences_count=self._count,
        )

    def _close_books(self, name: str, books: Books) -> None:
        """Count what is still outstanding. If the run is over, nothing more will be trained on."""
        over = self.hive.engines[name].phase == Phase.OFFLINE
        in_queue = [episode for group in books.queue.values() for episode in group.episodes]
        in_batch = [] if books.batch is None else books.batch.all_episodes()
        in_batch += [episode for group in books.handed_groups() for episode in group.episodes]
        for episodes, fate in (
            (books.open.values(), Fate.OPEN),
            ((*books.pool.values(), *in_queue), Fate.DROPPED_RUN_OVER if over else Fate.QUEUED),
            (in_batch, Fate.DROPPED_RUN_OVER if over else Fate.OPEN),
        ):
            for episode in episodes:
                episode.settle(fate)
        self._groups["queued"] += len(books.queue)
        self._groups["in a batch"] += len(books.handed_groups())
        self._groups["in a batch"] += 0 if books.batch is None else len(books.batch.groups)
        books.operations.count_waiting()

    def _compare(self, name: str, books: Books) -> None:
        """Note where the fold's state differs from the books."""
        engine = self.hive.engines[name]
        self._same(name, "open", books.open, engine.open)
        self._same(name, "in the pool", books.pool, engine.pool)
        groups = () if engine.batch is None else engine.batch.groups
        sealed = [episode.episode for group in groups for episode in group.episodes]
        self._same(name, "in the batch", {} if books.batch is None else books.batch.episodes, sealed)
        if books.counted != (counted := engine.counters.completion_tokens):
            self._differ(name, "", f"has {counted} sampled tokens of this run in the state, but {books.counted} noted")
        if books.published and (newest := max(books.published)) != engine.version:
            self._differ(name, "", f"has version {engine.version} in the state, but {newest} is the newest")
        elif (
            books.published and engine.weights is not None and engine.weights.weights.sha256 != books.published[newest]
        ):
            self._differ(name, "", f"has other weights of version {newest} in the state than were published")
        self._same(name, "queued", map(str, books.queue), map(str, engine.trajectories.queue.groups))
        self._same(name, "waiting", books.operations.waiting(), folded_waiting(engine))
        for episode in books.open.keys() & engine.open.keys():
            ours = books.open[episode]
            folded = sum(call.completion_tokens for call in engine.open[episode].complete_calls())
            if ours.tokens + ours.auxiliary != folded:
                self._differ(
                    name, episode, f"has {folded} tokens in the state, but {ours.tokens + ours.auxiliary} were noted"
                )

    def _same(self, engine: str, where: str, ours: Iterable[str], folded: Iterable[str]) -> None:
        for episode in sorted(set(ours) ^ set(folded)):
            which = "the state" if episode in folded else "the log's events"
            self._differ(engine, episode, f"is {where} according to {which} alone")

    # ---- entries ------------------------------------------------------------------------------------------------

    def _of(self, engine: str) -> Books:
        books = self._books.get(engine)
        if books is None:
            operations = Operations(self._operations, partial(self._differ, engine, ""))
            books = self._books[engine] = Books(operations)
        return books

    def _account_of(self, engine: str, run: int, client: str) -> Account:
        key = engine, run, client
        return self._accounts.get(key) or self._accounts.setdefault(key, Account(engine, run, client))

    def _take_over(self, engine: EngineState) -> None:
        """Begin with what was outstanding when a log was compacted. How many tokens were settled before that is
        unknown."""
        books = self._of(engine.name)
        books.arrived, books.counted = engine.trajectories.queue.arrived, engine.counters.completion_tokens
        books.operations.take_over(engine)
        for ready in (engine.weights_before, engine.weights):
            if ready is not None and ready.run == engine.run:
                books.published[ready.version] = ready.weights.sha256
        books.earlier = min(books.published, default=0)
        books.calls = dict.fromkeys(engine.noted)
        books.adapters = {kept.noted.saved.address for kept in engine.clients.kept.values()}
        books.adapters |= {each.sampler.address for each in engine.open.values() if each.sampler is not None}
        for name, episode in engine.open.items():
            account = self._account_of(engine.name, engine.run, episode.client)
            entry = books.open[name] = AuditedEpisode(account, kind=episode.type, version=episode.version)
            for call in episode.complete_calls():
                books.calls[call.ref.id] = name
                entry.add(call)
            account.sampled += entry.tokens + entry.auxiliary
        for name, completed in engine.pool.items():
            account = self._account_of(engine.name, engine.run, completed.client)
            entry = books.pool[name] = AuditedEpisode(account, known=False)
            entry.task, entry.reward, entry.oldest = completed.task, completed.reward, completed.oldest
        if engine.batch is not None:
            names = [episode.episode for group in engine.batch.groups for episode in group.episodes]
            account = self._account_of(engine.name, engine.run, "")
            taken = zip(engine.batch.taken, engine.batch.rollout_groups, strict=False)
            groups = {number: AuditedGroup(group.tokens, ()) for number, group in taken}
            books.batch = AuditedStep(
                engine.batch.step, {name: AuditedEpisode(account, known=False) for name in names}, groups
            )
        if (handed := engine.trajectories.batch) is not None and not handed.delivered:
            taken = zip(handed.numbers, handed.groups, strict=False)
            books.handed[handed.number] = {number: AuditedGroup(group.tokens, ()) for number, group in taken}
        for number, group in engine.trajectories.queue.groups.items():
            books.queue[number] = AuditedGroup(group.tokens, ())

    def _differ(self, engine: str, episode: str, why: str) -> None:
        self._count += 1
        if len(self._differences) < DIFFERENCES_KEPT:
            self._differences.append(Difference(self._seq, engine, episode, why))


def _by_name(fates: Counter[str]) -> dict[str, int]:
    """Return the counts that are not 0, by the plain names of the fates."""
    return {str(fate): count for fate, count in fates.items() if count}


def _is_even(given: StepTokens) -> bool:
    """Return whether all episodes in the loss have the same weight, or all of their tokens do. Every way of aggregating
    the loss ensures one or the other."""
    in_loss = {Fate.TRAINED, Fate.MASKED_OFF_POLICY}
    shares: list[tuple[float, float]] = []  # of each episode: a token's weight, and that of all its tokens
    for name, weight in given.weights.items():
        row = zip(given.fates, given.episodes.get(name, ()), strict=False)
        shares.append((weight, weight * sum(count for fate, count in row if fate in in_loss)))
    return not shares or any(isclose(min(each), max(each), rel_tol=1e-4) for each in zip(*shares, strict=True))


_OF_THE_RUN = {
    ev.EpisodeClaimed,
    ev.CallsNoted,
    ev.EpisodeEnded,
    ev.EpisodeAborted,
    ev.GroupDropped,
    ev.PoolCleared,
    ev.BatchReady,
    ev.StepCompleted,
    ev.WeightsReady,
    ev.WeightsLoaded,
}
_HANDLERS: dict[type, Callable[..., None]] = {
    ev.EpisodeClaimed: Audit.claimed,
    ev.CallsNoted: Audit.noted,
    ev.EpisodeEnded: Audit.ended,
    ev.EpisodeAborted: Audit.aborted,
    ev.GroupDropped: Audit.dropped,
    ev.EpisodesTaken: Audit.taken,
    ev.PoolCleared: Audit.cleared,
    ev.BatchReady: Audit.sealed,
    ev.StepCompleted: Audit.completed,
    ev.EngineStarted: Audit.started,
    ev.EngineStopped: Audit.over,
    ev.EngineFailed: Audit.over,
    ev.WeightsReady: Audit.published,
    ev.WeightsLoaded: Audit.loaded,
    ev.GroupsPushed: Audit.pushed,
    ev.BatchHandedOut: Audit.handed_out,
    ev.BatchDelivered: Audit.delivered,
    ev.GroupsGivenUp: Audit.given_up,
    ev.GroupsReset: Audit.reset,
    ev.OperationAccepted: Audit.accepted,
    ev.OperationCompleted: Audit.executed,
    ev.ModelClosed: Audit.closed,
    ev.WeightsKept: Audit.saved,
}
