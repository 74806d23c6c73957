"""`bombus diagnose`: says in plain words what is wrong with the learning of a run, and what to try."""

import argparse
import asyncio
from contextlib import aclosing

import msgspec

from bombus.config.algorithms import Aggregation, Estimator, named
from bombus.config.job import RunConfig
from bombus.config.trainer import FULL_LR, LORA_LR
from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive.diagnosis.answers import SampledAnswer
from bombus.hive.diagnosis.diagnose import diagnose
from bombus.hive.diagnosis.findings import RunFinding
from bombus.hive.diagnosis.run import JobSettings, ReadableCall, RunSeries
from bombus.hive.records import CallRecord, unpack_tokens
from bombus.replay.logged_run import is_trained_elsewhere
from bombus.replay.opening import add_source_arguments, open_source
from bombus.replay.running import BadUsage, reported
from bombus.replay.source import NotOnLog, Source, check_position
from bombus.terminal import say, say_json

ANSWERS_READ = 512  # newest steps whose answers are read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("--engine", metavar="NAME", help="which engine, if the hive has several")
    parser.add_argument("--run", type=int, metavar="N", help="which run of the engine (default: the newest)")
    parser.add_argument("--at", type=int, metavar="SEQ", help="as it was at this event (default: the newest)")
    parser.add_argument("--no-answers", action="store_true", help="read only events, not the tokens of calls: faster")
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    found: list[RunFinding] = []
    code = reported("bombus diagnose", lambda: found.extend(asyncio.run(_diagnose(arguments))))
    return code or int(bool(found))


async def _diagnose(arguments: argparse.Namespace) -> list[RunFinding]:
    async with open_source(arguments) as source:
        if arguments.at is not None:
            await check_position(source, arguments.at)
        series = await read_series(source, arguments.engine, arguments.run, arguments.at)
        if not arguments.no_answers:
            await read_answers(source, series)
        findings = diagnose(series.steps, series.settings)
        if arguments.json:
            say_json(as_json(series, findings))
        else:
            say(*lines(series, findings, source.title))
    return findings


# ---- reading ------------------------------------------------------------------------------------------------------


async def read_series(source: Source, engine: str | None, run: int | None, at: int | None = None) -> RunSeries:
    """Read the steps of a run: by default the newest, of the only engine. Raises `NotOnLog`, `LogCorrupted`."""
    hive, position = await source.base()
    configured = {name: state.configured for name, state in hive.engines.items()}
    found = {
        (name, state.run): RunSeries(name, state.run, settings_of(state.active.config))
        for name, state in hive.engines.items()
        if state.active is not None and run in (None, state.run)
    }
    async with aclosing(source.events(position, at)) as entries:
        async for entry in entries:
            event = entry.event
            if isinstance(event, ev.EngineConfigured):
                configured[event.engine] = event
            elif isinstance(event, ev.EngineStarted):
                config = configured.get(event.engine)
                if config is None or event.base or is_trained_elsewhere(event) or run not in (None, event.run):
                    continue
                for older in [each for each in found if each[0] == event.engine]:
                    del found[older]
                found[event.engine, event.run] = RunSeries(event.engine, event.run, settings_of(config.config))
            else:
                for series in found.values():
                    series.note(entry.seq, event)
    chosen = [series for (name, _), series in found.items() if engine in (None, name)]
    if len(chosen) > 1:
        raise BadUsage(f"{source.title} has several engines: choose one of {', '.join(sorted(e for e, _ in found))}")
    if not chosen:
        raise NotOnLog(
            f"{source.title} has no such run with a job that our trainer trains: see `bombus replay timeline`"
        )
    return chosen[0]


def settings_of(config: str) -> JobSettings:
    """Return what rules need of a job. Raises `Refused`."""
    job = RunConfig.from_json(config)
    trainer, rollout = job.trainer, job.rollout
    estimator = named(Estimator, trainer.adv_estimator)
    return JobSettings(
        num_repeat=rollout.num_repeat,
        max_staleness=job.collection.max_staleness,
        max_response_length=rollout.max_response_length,
        compares_over_batch=estimator is not None and estimator.over_batch,
        lr=trainer.lr,
        usual_lr=LORA_LR if trainer.lora_rank else FULL_LR,
        warmup_steps=trainer.warmup_steps,
        grad_clip=trainer.grad_clip,
        sums_gradients=trainer.loss_aggregation in (Aggregation.EPISODE_SUM, Aggregation.TOKEN_SUM),
        kl_coef=trainer.kl_coef,
        entropy_coef=trainer.entropy_coef,
    )


async def read_answers(source: Source, series: RunSeries) -> None:
    """Read the sampled answers of the newest steps. Steps whose calls are no longer kept stay without."""
    for figures in series.steps[-ANSWERS_READ:]:
        try:
            records = await source.records([each.call for each in figures.sampled])
        except LogCorrupted:  # they were purged, or are not in this archive
            continue
        series.note_answers(figures, map(answer_of, figures.sampled, records))


def answer_of(episode: ReadableCall, record: CallRecord) -> SampledAnswer:
    prompt, tokens = unpack_tokens(record.prompt_tail), record.choices[0].token_ids() if record.choices else []
    return SampledAnswer(episode.task, episode.reward, prompt, tokens)


# ---- printing -----------------------------------------------------------------------------------------------------


def lines(series: RunSeries, findings: list[RunFinding], title: str) -> list[str]:
    steps = f"steps {series.steps[0].step} to {series.steps[-1].step}" if series.steps else "no step yet"
    shown = [f"{title}: run {series.run} of engine {series.engine}, {steps}"]
    if not findings:
        return [*shown, "", "Nothing was found. docs/diagnose.md says what is looked for, and how often it is missed."]
    for finding in findings:
        shown += ["", f"{finding.kind.replace('_', ' ')}: {finding.figure}"]
        shown.append(f"  from step {finding.step} (event {finding.seq}), last seen at step {finding.until}")
        shown.append(f"  try: {finding.advice}")
        if finding.consequences:
            followed = (f"{each.kind.replace('_', ' ')} (step {each.step})" for each in finding.consequences)
            shown.append(f"  this explains: {', '.join(followed)}")
    return shown


def as_json(series: RunSeries, findings: list[RunFinding]) -> dict[str, object]:
    return {
        "engine": series.engine,
        "run": series.run,
        "steps": len(series.steps),
        "findings": msgspec.to_builtins(findings),
    }
