"""The engine: requests in, frames out, one forward pass per step. Synchronous, and used by one thread at a time."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bombus.architectures.logits import LogitsForm
from bombus.architectures.probing import context_of, refusing, sequence_limit
from bombus.architectures.shapes import layer_shapes
from bombus.errors import Code, EngineFault, Refused
from bombus.hive.events import CanaryCheck
from bombus.hive.generation import Fault, Frame, Generate
from bombus.weights.canary import CanaryFailed, Expected
from bombus_inference.backends.adapter_store import AdapterStore
from bombus_inference.backends.limits import CHOICES_MAX, Limits
from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.adapters.own import LowRank, check_adapter
from bombus_inference.backends.torch.adapters.serving import BASE_VERSION, ServedAdapters, tensors_of
from bombus_inference.backends.torch.attention import PLAN, ForwardPlan, plan_pass
from bombus_inference.backends.torch.cache import Blocks
from bombus_inference.backends.torch.checking import check_model
from bombus_inference.backends.torch.patching import TensorPatch, apply_patches, fitting_patches
from bombus_inference.backends.torch.pool import KvPool
from bombus_inference.backends.torch.prompt_scores import rows_at_once, score
from bombus_inference.backends.torch.rows import Rows
from bombus_inference.backends.torch.sampling import Drawn, draw
from bombus_inference.backends.torch.scheduler import ScheduledChunks, Scheduler
from bombus_inference.backends.torch.sequences import SequenceState
from bombus_inference.settings import ComputeSettings

log = logging.getLogger(__name__)

NO_ADAPTER: Mapping[str, LowRank] = {}


@dataclass(frozen=True, slots=True)
class Output:
    """The frames that one step produced for one request. If `done` is true, they are the last for this ticket."""

    ticket: int
    frames: list[Frame]
    done: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since the engine was created, and its current load."""

    steps: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    preemptions: int
    swaps: int
    running: int
    waiting: int
    blocks: int
    blocks_held: int
    adapters: int = 0
    adapter_bytes: int = 0
    adapter_evictions: int = 0


@dataclass(frozen=True, slots=True)
class _Computed:
    """The results of one pass: sequences that are ready for a token, their logits, and tickets with NaN scores."""

    ready: list[SequenceState]
    logits_RV: Tensor | None
    broken: set[int]


class Engine:
    """Serves one policy version at a time. `model` must have been loaded with the attention `attention.NAME`.

    A sequence ends at the smallest of the model's limit, `job_tokens` and the settings' `max_model_len`. If
    `max_model_len` is not set, a sequence also ends at the size of the cache, since a longer one would preempt itself
    forever. Raises `EngineFault` for an unsupported model, or for a cache that cannot hold a sequence of
    `max_model_len`.

    Requests may also name adapters that were added with `add_adapter`. These apply to the model of version 0, or to the
    model under the policy's own adapter, even if the engine serves other weights later.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ComputeSettings,
        *,
        run: int,
        version: int,
        job_tokens: int | None = None,
    ) -> None:
        text = model.config.get_text_config()
        with refusing(model.config, "served"):
            shapes = layer_shapes(model, PLAN)
        context = context_of(model.config)
        wanted = sequence_limit(model.config, settings.length_within(context, job_tokens or context))
        self.settings = settings
        self.run = run
        self.version = version
        self._model = model
        self._decoder = model.get_decoder()
        self._form = LogitsForm.of(model.config)
        self._heads = int(text.num_attention_heads)
        like = next(model.parameters())
        by_rows = like.device.type == "cpu" and like.dtype == torch.float32
        pool_bytes = settings.cache_bytes // 2 if by_rows else settings.cache_bytes
        block_bytes = KvPool.block_bytes(shapes, settings.block_tokens, like.dtype)
        count = pool_bytes // block_bytes
        self.max_model_len = self._sequence_tokens_max(wanted, count, block_bytes)
        self.limits = Limits(
            max_model_len=self.max_model_len,
            vocabulary=int(text.vocab_size),
            choices_max=CHOICES_MAX,
            waiting_max=settings.max_waiting,
            scores=True,
            adapters=settings.adapters_bytes > 0,
        )
        self._adapters = ServedAdapters(model, settings.adapters_bytes, version)
        self._pool = KvPool(shapes, count, settings.block_tokens, like)
        self._rows = Rows(self._pool, settings.cache_bytes - pool_bytes) if by_rows else None
        self.blocks = Blocks(count, settings.block_tokens)
        self._scheduler = Scheduler(
            self.blocks, max_running=settings.max_running, prefill_tokens_max=settings.prefill_tokens_max
        )
        self._open: dict[int, list[SequenceState]] = {}
        self._steps = self._prefill_tokens = self._decode_tokens = self._swaps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def stats(self) -> Stats:
        return Stats(
            steps=self._steps,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            cached_tokens=self._scheduler.cached_tokens,
            preemptions=self._scheduler.preemptions,
            swaps=self._swaps,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks=self.blocks.count,
            blocks_held=self.blocks.held,
            adapters=len(self._adapters.store),
            adapter_bytes=self._adapters.store.bytes,
            adapter_evictions=self._adapters.store.evictions,
        )

    @property
    def adapters(self) -> AdapterStore[LoadedAdapter]:
        """The loaded adapters."""
        return self._adapters.store

    def add_adapter(self, address: str, adapter: LoadedAdapter) -> bool:
        """Load an adapter, dropping unused adapters if there is no room. Return whether the adapter is new.

        Raises `Refused`, having changed nothing, if the adapter cannot be served.
        """
        dropped = self._adapters.add(address, adapter)
        for each in dropped or ():
            self.blocks.forget_root(each)
        return dropped is not None

    def remove_adapter(self, address: str) -> None:
        """Unload an adapter. Raises `Refused` while requests use it, or if it is not loaded."""
        self._adapters.remove(address)
        self.blocks.forget_root(address)

    def add(self, ticket: int, request: Generate) -> None:
        """Queue a request under a ticket chosen by the caller. Raises `Refused` if the request cannot be served."""
        prompt = self.limits.check(request, self.run)
        if len(self._scheduler.waiting) + request.n > self.settings.max_waiting:
            raise Refused(Code.OVERLOADED, f"{len(self._scheduler.waiting)} sequences are waiting; try again later")
        tokens_max = self.limits.tokens_max(request, prompt)
        if request.adapter:
            self._adapters.store.use(request.adapter)
        sequences = [SequenceState(ticket, request, choice, prompt, tokens_max) for choice in range(request.n)]
        self._open[ticket] = sequences
        self._scheduler.waiting.extend(sequences)

    def abort(self, ticket: int) -> None:
        """Forget a request. Does nothing if it has ended or was never added."""
        self._scheduler.drop(self._forget(ticket))

    def _forget(self, ticket: int) -> list[SequenceState]:
        """Remove a request from the open requests, release its adapter, and return its sequences."""
        sequences = self._open.pop(ticket, [])
        if sequences and sequences[0].request.adapter:
            self._adapters.store.release(sequences[0].request.adapter)
        return sequences

    def step(self) -> list[Output]:
        """Run one forward pass, and draw one token for every sequence whose prompt has been computed."""
        work = self._scheduler.next_work()
        if not work:
            return []
        self._steps += 1
        ready, drawn, broken, sane = self._compute(work)
        finished: list[SequenceState] = []
        for sequence, token, logprob, top in zip(ready, drawn.tokens, drawn.logprobs, drawn.tops):
            if math.isfinite(logprob):
                sequence.accept(token, logprob, top, self._version_of(sequence))
                if sequence.finish is not None:
                    finished.append(sequence)
            else:
                broken.add(sequence.ticket)
        for sequence, _ in work:
            if sequence.missing == 0 and not sequence.generates:
                sequence.end_unsampled()
                ready.append(sequence)
                finished.append(sequence)
        self._scheduler.drop(finished)
        outputs = self._outputs(ready, broken)
        if not sane:
            self._wipe()
        return outputs

    @torch.no_grad()
    def swap_weights(
        self, state: Mapping[str, Tensor] | None, version: int, run: int, adapter: Mapping[str, LowRank] = NO_ADAPTER
    ) -> None:
        """Serve other weights from the next step on. `state` maps the model's parameter names to tensors.

        `adapter` contains the layers of the policy's adapter by name. Without a `state`, only the adapter changes.
        Running sequences keep their tokens and recompute their keys and values; the new version computes their next
        tokens. Raises `EngineFault`, having changed nothing, if names or shapes differ from the model's.
        """
        check_adapter(self._model, adapter)
        if state is not None:
            self._check_tensors(state)
        self._adapters.detach()
        self._adapters.before_change(version, None if state is not None else {})
        if state is not None:
            self._replace_tensors(state)
        self._adapters.set_own(adapter)
        self._changed(version, run)

    def check_canary(self, expected: Expected) -> CanaryCheck | None:
        """Compare what the weights in memory compute, in float64, with what is expected. Raises `CanaryFailed` if the
        two differ.

        Call this right after the weights have changed, when the cache must contain nothing that other weights computed.
        """
        if self.blocks.remembered:
            raise CanaryFailed(
                f"version {expected.version} was loaded, but its prefix cache still has {self.blocks.remembered} "
                "blocks that other weights computed"
            )
        self._adapters.detach()
        return check_model(self._model, self.settings.precision, expected)

    def _check_tensors(self, state: Mapping[str, Tensor]) -> None:
        own = tensors_of(self._model)
        missing = [name for name in own if name not in state]
        if missing:
            raise EngineFault(f"the new weights lack {len(missing)} tensors, such as {missing[0]}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise EngineFault(f"{name} is {list(state[name].shape)}, but the model's is {list(tensor.shape)}")

    def _replace_tensors(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors_of(self._model).items():
            if isinstance(tensor, nn.Parameter):
                tensor.data = state[name].to(device=tensor.device, dtype=tensor.dtype)
            else:
                tensor.copy_(state[name])

    def patch_weights(self, patches: Mapping[str, TensorPatch], version: int, run: int) -> None:
        """Like `swap_weights`, but change only the elements in `patches`. Raises `EngineFault`, having changed nothing,
        if a patch does not fit."""
        self._adapters.detach()
        fitting = fitting_patches(tensors_of(self._model), patches)
        self._adapters.before_change(version, fitting)
        apply_patches(tensors_of(self._model), fitting)
        self._changed(version, run)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of each tensor in a version. Even in a half-precision engine, some models keep a few tensors in
        float32."""
        return {name: tensor.dtype for name, tensor in tensors_of(self._model).items()}

    def _version_of(self, sequence: SequenceState) -> int:
        """Return the version of the weights that compute a sequence. For a sequence with an adapter, this is the base
        version."""
        return BASE_VERSION if sequence.request.adapter else self.version

    def _changed(self, version: int, run: int) -> None:
        self._scheduler.weights_changed()
        self.version = version
        self.run = run
        self._swaps += 1

    def _compute(self, work: ScheduledChunks) -> tuple[list[SequenceState], Drawn, set[int], bool]:
        """Compute the chunks, score prompts, and draw a token for each sequence that is ready for its next token.

        Return these sequences, their drawn tokens, the tickets whose scores are NaN, and a flag that is false if the
        model produced scores or logits that are not finite. If the logits are finite but a drawn token's logprob is
        not, the request is at fault, and the flag stays true.
        """
        ready: list[SequenceState] = []
        logits: list[Tensor] = []
        broken: set[int] = set()
        for part in self._parts(work):
            computed = self._pass(part)
            ready += computed.ready
            broken |= computed.broken
            if computed.logits_RV is not None:
                logits.append(computed.logits_RV)
        if not ready:
            return ready, Drawn([], [], []), broken, not broken
        with torch.inference_mode():
            logits_RV = logits[0] if len(logits) == 1 else torch.cat(logits)
            drawn = draw(logits_RV, [sequence.draw() for sequence in ready])
            sane = all(map(math.isfinite, drawn.logprobs)) or bool(logits_RV.isfinite().all())
        return ready, drawn, broken, sane and not broken

    def _parts(self, work: ScheduledChunks) -> list[ScheduledChunks]:
        """Split the work into passes. A single pass is enough, unless adapters apply to a model other than our own
        policy."""
        if not self._adapters.apart:
            return [work]
        parts: list[ScheduledChunks] = [[], []]
        for sequence, chunk in work:
            parts[bool(sequence.request.adapter)].append((sequence, chunk))
        return [part for part in parts if part]

    def _pass(self, part: ScheduledChunks) -> _Computed:
        """Run one forward pass."""
        adapted = any(sequence.request.adapter for sequence, _ in part)
        with torch.inference_mode():
            rows = None if adapted and self._adapters.apart else self._rows  # only one pass per step can use rows
            plan = plan_pass(self._pool, rows, [chunk for _, chunk in part], self._heads)
        ordered = [part[number] for number in plan.order]
        if not adapted:
            return self._computed(plan, ordered)
        addresses = [sequence.request.adapter for sequence, _ in ordered]
        with self._adapters.computing(addresses, [len(chunk.tokens) for _, chunk in ordered]):
            return self._computed(plan, ordered)

    @torch.inference_mode()
    def _computed(self, plan: ForwardPlan, ordered: ScheduledChunks) -> _Computed:
        """Compute a pass and return its results. `ordered` lists the chunks in the order of their tokens."""
        hidden_TD = self._decoder(
            input_ids=plan.tokens_1T, position_ids=plan.positions_1T, use_cache=False, kv_plan=plan
        ).last_hidden_state[0]
        ready: list[SequenceState] = []
        broken: set[int] = set()
        rows: list[int] = []
        at = 0
        for sequence, chunk in ordered:
            if sequence.scoring is not None and sequence.is_scoring:
                targets = sequence.scoring.targets(chunk.start, chunk.end)
                head = partial(self._logits, hidden_TD)
                piece = score(head, at, targets, sequence.request.top_prompt, rows_at_once(self.limits.vocabulary))
                sequence.scoring.take(chunk.start, piece, self._version_of(sequence))
                if any(map(math.isnan, piece.logprobs)):
                    broken.add(sequence.ticket)
            at += len(chunk.tokens)
            if sequence.started and len(chunk.tokens) == 1:
                self._decode_tokens += 1
            else:
                self._prefill_tokens += len(chunk.tokens)
            if sequence.missing == 0 and sequence.generates:
                ready.append(sequence)
                rows.append(at - 1)
        if not ready:
            return _Computed(ready, None, broken)
        index = slice(None) if len(rows) == at else torch.tensor(rows, device=hidden_TD.device)
        return _Computed(ready, self._logits(hidden_TD, index), broken)

    def _logits(self, hidden_TD: Tensor, index: Tensor | slice) -> Tensor:
        """Return the logits of some rows of a pass."""
        self._adapters.keep_rows(index)
        logits_RV: Tensor = self._form(self._model.get_output_embeddings()(hidden_TD[index]))
        return logits_RV

    def _outputs(self, ready: Iterable[SequenceState], broken: set[int]) -> list[Output]:
        frames: dict[int, list[Frame]] = {}
        for sequence in ready:
            made = sequence.take_frames()
            if made:
                frames.setdefault(sequence.ticket, []).extend(made)
        outputs: list[Output] = []
        for ticket in broken:
            frames.pop(ticket, None)
            self.abort(ticket)
            why = f"the model's logits are not finite at version {self.version}"
            outputs.append(Output(ticket, [Fault(why=why, code=Code.INTERNAL)], done=True))
        for ticket, made in frames.items():
            done = all(sequence.finish is not None for sequence in self._open[ticket])
            if done:
                self._forget(ticket)
            outputs.append(Output(ticket, made, done))
        return outputs

    def _wipe(self) -> None:
        """Zero all free blocks, so that none contains NaN: masked positions are read too, and zero times NaN is NaN."""
        self.blocks.forget_all()
        self._pool.wipe([block for block in range(self.blocks.count) if not self.blocks.holders(block)])
        if self._rows is not None:
            self._rows.clear()

    def _sequence_tokens_max(self, wanted: int, count: int, block_bytes: int) -> int:
        """Return how many of the `wanted` tokens one sequence may have in a cache of `count` blocks."""
        size = self.settings.block_tokens
        holds, needed = count * size - 1, wanted // size + 1
        if wanted <= holds:
            return wanted
        if self.settings.max_model_len is not None or holds < 2:
            raise EngineFault(
                f"kv_cache_bytes is {self.settings.cache_bytes}, of which {count * block_bytes} are for blocks; one "
                f"sequence of {wanted} tokens takes {needed * block_bytes}: raise kv_cache_bytes or lower max_model_len"
            )
        log.warning(
            "sequences end at %d tokens, not at the job's %d: the KV cache of %d MiB cannot hold a longer one; give "
            "the replica more with --kv-cache-mb",
            *(holds, wanted, self.settings.cache_bytes >> 20),
            extra={"run": self.run},
        )
        return holds
