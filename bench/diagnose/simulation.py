"""A run as the events that its hive would have written, and the answers of its sampled calls, from one seed."""

from collections.abc import Callable, Iterator
from math import exp, log
from random import Random

import msgspec

from bench.diagnose.recipes import Recipe, StepPlan
from bombus.config.job import RunConfig
from bombus.hive import events as ev
from bombus.hive.events import AbortReason, DropReason, EpisodeType
from bombus.replay.diagnosis.answers import SampledAnswer, figures_of
from bombus.replay.diagnosis.steps import SAMPLED_GROUPS, RunSeries

ENGINE, RUN = "main", 1
SECOND = 1_000_000_000
ENDS_TOGETHER = 16  # episodes of a client that one event ends
VOCABULARY = 5000
ANSWER_TOKENS = 40  # of long answers, that are drawn
OPENING = tuple(range(1, 13))  # how all long answers begin
PHRASE = tuple(range(6001, 6013))
CONSTANT = tuple(range(7001, 7031))
Change = Callable[[StepPlan, int, float], None]  # a fault: changes the plan of a step, given its age and strength


def job_of(recipe: Recipe) -> RunConfig:
    trainer = {"loss_aggregation": "token", **recipe.trainer}
    collection = {"batch_size": recipe.groups, **recipe.collection}
    rollout = {"num_repeat": recipe.repeat}
    return RunConfig.model_validate({"trainer": trainer, "collection": collection, "rollout": rollout})


class Simulation:
    """Plays a recipe, with a fault from step `onset` on."""

    def __init__(
        self, recipe: Recipe, seed: int, fault: Change | None = None, onset: int = 0, strength: float = 0.0
    ) -> None:
        self.recipe = recipe
        self.chance = Random(f"{recipe.name} {seed}")
        self.series = RunSeries(ENGINE, RUN, job_of(recipe))
        self._fault, self._onset, self._strength = fault, onset, strength
        self._progress = 0.0
        self._seq = 0
        self._episodes = 0
        self._now_ns = SECOND
        self._trained: list[str] = []
        self._held_out = [self.chance.gauss(0.0, recipe.difficulty) for _ in range(recipe.evaluation[1])]

    def play(self) -> RunSeries:
        for step in range(1, self.recipe.steps + 1):
            most = 1.0 if self.recipe.plateau else 1.2
            plan = self.recipe.plan(min(most, max(0.0, self._progress)), self.chance)
            if self._fault is not None and step >= self._onset:
                self._fault(plan, step - self._onset, self._strength)
            self._play_step(step, plan)
            self._progress += plan.pace / (self.recipe.steps - self.recipe.plateau)
        return self.series

    def _note(self, event: ev.AnyEvent) -> None:
        self._seq += 1
        self.series.note(self._seq, event)

    def _play_step(self, step: int, plan: StepPlan) -> None:
        recipe = self.recipe
        self._note(ev.RollingStarted(engine=ENGINE, at_ns=self._now_ns, run=RUN, version=step - 1))
        every, count = recipe.evaluation
        if every and step % every == 1:
            self._evaluate(plan, count, step - 1)
        began_ns = self._now_ns
        groups = [self._group(plan) for _ in range(recipe.groups)]
        members = [member for group in groups for member in group]
        names = tuple(outcome.episode for outcome, _ in members)
        self._note(
            ev.EpisodeClaimed(engine=ENGINE, at_ns=began_ns, run=RUN, claim=f"c{step}", client="", episodes=names)
        )
        self._end(members, plan, began_ns)
        self._now_ns = began_ns + int(plan.collecting_s * SECOND)
        self._lose(plan, len(members))
        sealed = tuple(
            ev.BatchGroup(
                task=group[0][0].task,
                episodes=tuple(ev.BatchEpisode(episode=outcome.episode, reward=outcome.reward) for outcome, _ in group),
            )
            for group in groups
        )
        self._note(
            ev.BatchReady(engine=ENGINE, at_ns=self._now_ns, run=RUN, step=step, groups=sealed, config_digest="")
        )
        self._trained += [group.task for group in sealed]
        self._now_ns += int(plan.training_s * SECOND)
        metrics = self._metrics(plan, members, sealed, step)
        done = ev.StepCompleted(
            engine=ENGINE, at_ns=self._now_ns, run=RUN, step=step, trainer_epoch=1, checkpoint="", checkpoint_digest="",
            metrics=metrics,
        )  # fmt: skip
        self._note(done)
        answers = [self._answer(plan, outcome) for group in groups[:SAMPLED_GROUPS] for outcome, _ in group]
        self.series.steps[-1].answers = figures_of(self._grouped(plan, answers))

    # ---- episodes -------------------------------------------------------------------------------------------------

    def _group(self, plan: StepPlan) -> list[tuple[ev.Outcome, str]]:
        """Draw the episodes of a task, each with its client."""
        recipe, chance = self.recipe, self.chance
        number = chance.randrange(recipe.tasks) if recipe.tasks else chance.getrandbits(40)
        number = number % plan.tasks if plan.tasks else number
        difficulty = chance.gauss(0.0, recipe.difficulty)
        forced = plan.forced if chance.random() < plan.forced_share else None
        (data_set,) = chance.choices(list(plan.data_sets), list(plan.data_sets.values()))
        size = 1 if chance.random() < plan.alone else recipe.repeat
        (client,) = chance.choices(list(plan.clients), list(plan.clients.values()))
        group = [self._episode(plan, f"task-{number}", difficulty, data_set, client) for _ in range(size)]
        no_signal = size > 1 and len({outcome.reward for outcome, _ in group}) == 1
        if no_signal and forced is None and "method" in recipe.collection:
            return self._group(plan)  # another one takes its place
        if forced is not None:
            group = [(_with_reward(outcome, forced), client) for outcome, client in group]
        return group

    def _episode(
        self, plan: StepPlan, task: str, difficulty: float, data_set: str, client: str
    ) -> tuple[ev.Outcome, str]:
        recipe, chance = self.recipe, self.chance
        self._episodes += 1
        tokens = plan.tokens * exp(chance.gauss(0.0, recipe.tokens_noise))
        odds = plan.skill - difficulty + plan.length_pays * log(tokens / plan.tokens) / log(2)
        success = chance.random() < 1 / (1 + exp(-odds))
        metrics: dict[str, float] = {}
        reward = self._reward(plan, odds, success, metrics) * plan.scale
        if plan.inverted or (plan.flipped and chance.random() < plan.flipped):
            reward = 1.0 - reward
        if chance.random() < plan.outliers:
            reward = 50.0 * (reward or 1.0)
        if chance.random() < plan.broken.get(client, 0.0):
            reward, success = 0.0, False
        if recipe.tools:
            calls = max(1, round(chance.gauss(recipe.tools, 2.0)))
            metrics["tool_calls"] = calls
            metrics["tool_failures"] = sum(chance.random() < plan.tool_failures for _ in range(calls))
            metrics["truncated"] = float(chance.random() < plan.truncated)
        if chance.random() < plan.failures:
            reward, tokens, success = 0.0, 0.0, False
        judged = None if recipe.rewards == "score" else success
        outcome = ev.Outcome(
            episode=f"{ENGINE}-{RUN}-{self._episodes}", task=task, reward=reward, digest=b"", is_success=judged,
            log_metrics=metrics, completion_tokens=max(int(tokens > 0), round(tokens)), data_set=data_set,
        )  # fmt: skip
        return outcome, client

    def _reward(self, plan: StepPlan, odds: float, success: bool, metrics: dict[str, float]) -> float:
        chance = self.chance
        match self.recipe.rewards:
            case "binary":
                return float(success)
            case "partial":
                return 1.0 if success else round(chance.choice((0.0, 0.1, 0.2, 0.3)) * (chance.random() < 0.35), 2)
            case "score":
                return round(3.0 * odds + chance.gauss(0.0, 3.0), 1)
            case _:
                metrics["reward/answer"] = float(success)
                for name, probability in plan.parts.items():
                    metrics[name] = float(chance.random() < probability)
                return 0.7 * success + 0.3 * sum(metrics[name] for name in plan.parts) / len(plan.parts)

    def _end(self, members: list[tuple[ev.Outcome, str]], plan: StepPlan, began_ns: int) -> None:
        """End the episodes in the order of their lengths, which is that of their durations."""
        seconds = plan.collecting_s / 3
        by_client: dict[str, list[ev.Outcome]] = {}
        for outcome, client in sorted(members, key=lambda member: member[0].completion_tokens):
            by_client.setdefault(client, []).append(outcome)
        for client, outcomes in by_client.items():
            for start in range(0, len(outcomes), ENDS_TOGETHER):
                part = tuple(outcomes[start : start + ENDS_TOGETHER])
                longest = part[-1].completion_tokens / max(1.0, plan.tokens)
                took = seconds * max(0.2, min(longest, 2.9))
                if start + ENDS_TOGETHER >= len(outcomes):
                    took = max(took, seconds * plan.slowest)
                at_ns = began_ns + int(took * SECOND)
                self._note(ev.EpisodeEnded(engine=ENGINE, at_ns=at_ns, run=RUN, client=client, outcomes=part))

    def _lose(self, plan: StepPlan, batch: int) -> None:
        """Abort and drop episodes beside the batch."""
        for reason, share in plan.aborted.items():
            count = self._binomial(batch, share)
            if count:
                names = tuple(f"{ENGINE}-{RUN}-x{number}" for number in range(count))
                self._note(ev.EpisodeAborted(engine=ENGINE, run=RUN, episodes=names, reason=AbortReason(reason)))
        stale = self._binomial(batch, plan.dropped_stale)
        if stale:
            names = tuple(f"{ENGINE}-{RUN}-y{number}" for number in range(stale))
            self._note(ev.GroupDropped(engine=ENGINE, run=RUN, reason=DropReason.STALE, tasks=(), episodes=names))

    def _binomial(self, number: int, share: float) -> int:
        return sum(self.chance.random() < share for _ in range(number))

    def _evaluate(self, plan: StepPlan, count: int, version: int) -> None:
        outcomes = []
        for number in range(count):
            known = bool(self._trained) and self.chance.random() < plan.evaluated_known
            task = self.chance.choice(self._trained) if known else f"held-out-{number}"
            difficulty = self.chance.gauss(0.0, self.recipe.difficulty) if known else self._held_out[number]
            odds = plan.skill + plan.evaluation - difficulty
            success = self.chance.random() < 1 / (1 + exp(-odds))
            reward = self._reward(plan, odds, success, {})
            outcomes.append(ev.Outcome(episode=f"e{version}-{number}", task=task, reward=reward, digest=b""))
        ended = ev.EpisodeEnded(
            engine=ENGINE, at_ns=self._now_ns, run=RUN, client="evaluator", type=EpisodeType.EVAL, version=version,
            outcomes=tuple(outcomes),
        )  # fmt: skip
        self._note(ended)

    # ---- training and answers -------------------------------------------------------------------------------------

    def _metrics(
        self, plan: StepPlan, members: list[tuple[ev.Outcome, str]], groups: tuple[ev.BatchGroup, ...], step: int
    ) -> dict[str, float]:
        metrics = dict(plan.metrics)
        cut = self._binomial(len(members), min(1.0, metrics.pop("cut_share")))
        silent = sum(len({each.reward for each in group.episodes}) == 1 for group in groups)
        rate = self.series.job.trainer.lr * metrics.pop("lr_times", 1.0)
        if silent == len(groups) and self.recipe.repeat > 1:
            metrics.pop("grad_norm")
        return metrics | {
            "lr": rate,
            "groups": float(len(groups)),
            "groups_without_signal": float(silent),
            "episodes": float(len(members)),
            "episodes_cut": float(cut),
            "seconds_waited": plan.collecting_s,
            "reward_mean": sum(outcome.reward for outcome, _ in members) / len(members),
        }

    def _answer(self, plan: StepPlan, outcome: ev.Outcome) -> SampledAnswer:
        chance = self.chance
        prompt = [chance.randrange(100, VOCABULARY) for _ in range(60)]
        if Random(f"asked {outcome.task}").random() < plan.same_prompt:
            prompt = list(range(60))
        length = min(outcome.completion_tokens, ANSWER_TOKENS)
        tokens = [chance.randrange(100, VOCABULARY) for _ in range(length)]
        if length == ANSWER_TOKENS:
            tokens[: len(OPENING)] = OPENING
        if self.recipe.alike and outcome.is_success:
            right = Random(outcome.task)
            tokens = [right.randrange(100, VOCABULARY) for _ in range(length)]
        if chance.random() < plan.constant:
            tokens = list(CONSTANT)
        elif outcome.is_success and chance.random() < plan.leaked:
            prompt[10 : 10 + len(tokens)] = tokens
        elif outcome.is_success and chance.random() < plan.phrase:
            tokens[12:12] = PHRASE
        return SampledAnswer(outcome.task, outcome.reward, prompt, tokens, opens=True)

    def _grouped(self, plan: StepPlan, answers: list[SampledAnswer]) -> Iterator[SampledAnswer]:
        """Yield answers, some of them with the tokens of the first one of their group."""
        first: dict[str, SampledAnswer] = {}
        for answer in answers:
            leader = first.setdefault(answer.task, answer)
            copied = self.chance.random() < plan.duplicates
            yield msgspec.structs.replace(answer, tokens=leader.tokens if copied else answer.tokens)


def _with_reward(outcome: ev.Outcome, reward: float) -> ev.Outcome:
    return ev.Outcome(
        episode=outcome.episode, task=outcome.task, reward=reward, digest=b"", is_success=reward > 0.5,
        log_metrics=outcome.log_metrics, completion_tokens=outcome.completion_tokens, data_set=outcome.data_set,
    )  # fmt: skip
