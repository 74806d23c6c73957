"""The engine: requests in, frames out, one forward pass per step. Synchronous, and used by one thread at a time."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bombus.architectures.logits import LogitsForm
from bombus.architectures.probing import context_of, refusing, sequence_limit
from bombus.architectures.shapes import layer_shapes
from bombus.errors import Code, EngineFault, Refused
from bombus.hive.generation import Fault, Frame, Generate
from bombus.weights.models import persistent_buffers
from bombus_inference.backends.limits import CHOICES_MAX, Limits
from bombus_inference.backends.torch.adapted import LowRank, check_adapter, set_adapter
from bombus_inference.backends.torch.attention import PLAN, plan_pass
from bombus_inference.backends.torch.cache import Blocks
from bombus_inference.backends.torch.patching import TensorPatch, apply_patches
from bombus_inference.backends.torch.pool import KvPool
from bombus_inference.backends.torch.rows import Rows
from bombus_inference.backends.torch.sampling import Drawn, draw
from bombus_inference.backends.torch.scheduler import ScheduledChunks, Scheduler
from bombus_inference.backends.torch.sequences import SequenceState
from bombus_inference.settings import ComputeSettings

log = logging.getLogger(__name__)

NO_ADAPTER: Mapping[str, LowRank] = {}


@dataclass(frozen=True, slots=True)
class Output:
    """The frames that one step made for one request. After `done` nothing more comes for this ticket."""

    ticket: int
    frames: list[Frame]
    done: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since the engine was made, and its current load."""

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


class Engine:
    """Serves one policy version at a time. `model` must have been loaded with the attention `attention.NAME`.

    A sequence ends at the least of the model's limit, `job_tokens` and the settings' `max_model_len`. Without a
    `max_model_len` it also ends at the size of the cache, since a longer one would preempt itself for ever. Raises
    `EngineFault` for a model that is not supported, or for a cache that cannot hold a sequence of `max_model_len`.
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
        self._head = model.get_output_embeddings()
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
        )
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
        )

    def add(self, ticket: int, request: Generate) -> None:
        """Queue a request under a ticket that the caller chose. Raises `Refused` for one that cannot be served."""
        prompt = self.limits.check(request, self.run)
        if len(self._scheduler.waiting) + request.n > self.settings.max_waiting:
            raise Refused(Code.OVERLOADED, f"{len(self._scheduler.waiting)} sequences wait already; ask again later")
        tokens_max = self.limits.tokens_max(request, prompt)
        sequences = [SequenceState(ticket, request, choice, prompt, tokens_max) for choice in range(request.n)]
        self._open[ticket] = sequences
        self._scheduler.waiting.extend(sequences)

    def abort(self, ticket: int) -> None:
        """Forget a request. It is not an error if it is over or was never added."""
        self._scheduler.drop(self._open.pop(ticket, ()))

    def step(self) -> list[Output]:
        """Run one forward pass, and draw one token for every sequence whose prompt has been computed."""
        work = self._scheduler.next_work()
        if not work:
            return []
        self._steps += 1
        ready, drawn, sane = self._compute(work)
        finished: list[SequenceState] = []
        broken: set[int] = set()
        for sequence, token, logprob, top in zip(ready, drawn.tokens, drawn.logprobs, drawn.tops):
            if math.isfinite(logprob):
                sequence.accept(token, logprob, top, self.version)
                if sequence.finish is not None:
                    finished.append(sequence)
            else:
                broken.add(sequence.ticket)
        self._scheduler.drop(finished)
        outputs = self._outputs(ready, broken)
        if not sane:
            self._wipe()
        return outputs

    @torch.no_grad()
    def swap_weights(
        self, state: Mapping[str, Tensor] | None, version: int, run: int, adapter: Mapping[str, LowRank] = NO_ADAPTER
    ) -> None:
        """Serve other weights from the next step on. `state` has tensors by the model's parameter names.

        Without a `state` the model stays, and only its `adapter` is another, by the names of the layers that it is on.
        Running sequences keep their tokens and compute keys and values again; their next tokens are of the new version.
        Raises `EngineFault`, having changed nothing, when names or shapes are not the model's.
        """
        check_adapter(self._model, adapter)
        if state is not None:
            self._replace_tensors(state)
        set_adapter(self._model, adapter)
        self._changed(version, run)

    def _replace_tensors(self, state: Mapping[str, Tensor]) -> None:
        own = self._tensors()
        missing = [name for name in own if name not in state]
        if missing:
            raise EngineFault(f"the new weights lack {len(missing)} tensors, such as {missing[0]}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise EngineFault(f"{name} is {list(state[name].shape)}, the model wants {list(tensor.shape)}")
        for name, tensor in own.items():
            if isinstance(tensor, nn.Parameter):
                tensor.data = state[name].to(device=tensor.device, dtype=tensor.dtype)
            else:
                tensor.copy_(state[name])

    def patch_weights(self, patches: Mapping[str, TensorPatch], version: int, run: int) -> None:
        """Like `swap_weights`, for the elements in `patches` alone. Raises `EngineFault`, having changed nothing."""
        apply_patches(self._tensors(), patches)
        self._changed(version, run)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of each tensor of a version: of some models a few stay in float32 in an engine in half precision."""
        return {name: tensor.dtype for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Return all that the weights of a version replace: parameters, and buffers that belong to them."""
        return dict(self._model.named_parameters()) | persistent_buffers(self._model)

    def _changed(self, version: int, run: int) -> None:
        self._scheduler.weights_changed()
        self.version = version
        self.run = run
        self._swaps += 1

    def _compute(self, work: ScheduledChunks) -> tuple[list[SequenceState], Drawn, bool]:
        """Run the forward pass, and draw a token for each sequence whose keys and values are then complete.

        Also return whether the logits that a token was drawn from are numbers. Where they are, and the token's logprob
        is not, the fault is the request's.
        """
        with torch.inference_mode():
            plan = plan_pass(self._pool, self._rows, [chunk for _, chunk in work], self._heads)
            hidden_1TD = self._decoder(
                input_ids=plan.tokens_1T, position_ids=plan.positions_1T, use_cache=False, kv_plan=plan
            ).last_hidden_state
            ready: list[SequenceState] = []
            rows: list[int] = []
            at = -1
            for number in plan.order:
                sequence, chunk = work[number]
                at += len(chunk.tokens)
                if sequence.started and len(chunk.tokens) == 1:
                    self._decode_tokens += 1
                else:
                    self._prefill_tokens += len(chunk.tokens)
                if sequence.missing == 0:
                    ready.append(sequence)
                    rows.append(at)
            if not ready:
                return ready, Drawn([], [], []), True
            hidden_TD = hidden_1TD[0]
            if len(rows) < hidden_TD.shape[0]:
                hidden_TD = hidden_TD[torch.tensor(rows, device=hidden_TD.device)]
            logits_RV = self._form(self._head(hidden_TD))
            drawn = draw(logits_RV, [sequence.draw() for sequence in ready])
            sane = all(map(math.isfinite, drawn.logprobs)) or bool(logits_RV.isfinite().all())
            return ready, drawn, sane

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
                del self._open[ticket]
            outputs.append(Output(ticket, made, done))
        return outputs

    def _wipe(self) -> None:
        """Zero all free blocks. Masked positions are read too, and NaN times zero is NaN, so no NaN may stay there."""
        self.blocks.forget_all()
        self._pool.wipe([block for block in range(self.blocks.count) if not self.blocks.holders(block)])
        if self._rows is not None:
            self._rows.clear()

    def _sequence_tokens_max(self, wanted: int, count: int, block_bytes: int) -> int:
        """Return how many of the `wanted` tokens one sequence may have when there are `count` blocks."""
        size = self.settings.block_tokens
        holds, needed = count * size - 1, wanted // size + 1
        if wanted <= holds:
            return wanted
        if self.settings.max_model_len is not None or holds < 2:
            raise EngineFault(
                f"kv_cache_bytes is {self.settings.cache_bytes}, of which {count * block_bytes} are for blocks; one "
                f"sequence of {wanted} tokens takes {needed * block_bytes}: raise it, or lower max_model_len"
            )
        log.warning(
            "sequences end at %d tokens and not at the job's %d: the KV cache of %d MiB cannot hold a longer one; give "
            "the replica more with --kv-cache-mb",
            *(holds, wanted, self.settings.cache_bytes >> 20),
            extra={"run": self.run},
        )
        return holds
