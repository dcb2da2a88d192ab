"""Executes vLLM's steps on the emulated device: what a model runner would have computed, and when
it would have been ready."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)

from vllm_semantic_sched.lab.bench.workload import ANSWER_FIELD
from vllm_semantic_sched.lab.device.answers import Answer, make_answer
from vllm_semantic_sched.lab.device.clocks import Clock, StepTime, Timeline
from vllm_semantic_sched.lab.device.grammar import allowed_tokens
from vllm_semantic_sched.lab.device.sanitizer import Chain, DeviceError, Group, Sanitizer, Table
from vllm_semantic_sched.lab.device.settings import DeviceSettings
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile


@dataclass(frozen=True)
class Limits:
    """The engine settings that the device relies on."""

    sequences: int
    tokens: int  # in a step
    length: int  # of a request
    vocabulary: int
    end_token: int
    adapters: int = 0  # in a step
    drafts: int = 0  # for a request, in a step
    drafts_vary: bool = False  # from none to `drafts`
    ahead: bool = False  # steps are scheduled before the last one's tokens are known
    vector: int = 0  # numbers of an embedding


@dataclass(eq=False)
class Running:
    """A request as the device knows it."""

    tokens: list[int]
    prompt: int  # tokens
    chain: Chain
    table: Table
    answer: Answer
    pooled: bool = False  # its answer is a vector, after the prompt's last token
    adapter: int = 0
    images: list[tuple[int, int, str]] = field(default_factory=list)  # first, after last, hash
    structured: bool = False
    drafts: list[int] = field(default_factory=list)  # guesses of the tokens after the last one
    rejected: int = 0  # drafts, when it was last sampled
    sampled: int = 0  # step in which it was
    ahead: int = 0  # of these, those that the scheduler takes for accepted in this step
    unmasked: int | None = None  # tokens before one that was sampled without its grammar's mask

    @property
    def name(self) -> str:
        """Its id at the scheduler."""
        return self.table.request


@dataclass
class Pending:
    """A step that was submitted and not sampled yet."""

    order: list[str]
    sampling: list[Running | None]  # those that sample tokens
    drafts: dict[str, list[int]]  # that are verified
    time: StepTime


class Runner:
    """Executes steps in the order in which they are submitted.

    Attributes:
        sanitizer: checks each block that a step reads or writes.
        timeline: the device's queues.
        encoded: names of the images whose encodings the device holds.
        accepted: drafts, so far.
        finished_step: called with the time of each step once it is sampled.
    """

    def __init__(
        self,
        profile: EngineProfile,
        groups: Sequence[Group],
        blocks: int,
        limits: Limits,
        clock: Clock,
        settings: DeviceSettings,
    ) -> None:
        self.profile = profile
        self.limits = limits
        self.clock = clock
        self.settings = settings
        self.sanitizer = Sanitizer(groups, blocks)
        self.timeline = Timeline()
        self.finished_step: Callable[[StepTime], None] = lambda time: None
        self.requests: dict[str, Running] = {}
        self.number = 0  # of the last step
        self.host_seconds = 0.0  # that pass before a step is submitted, on a virtual clock
        self.loads_failed = False  # tokens that followed a failed load are sampled again
        self.accepted = 0
        self._drafted: list[Running] = []  # in the last step
        self.fetched = clock.now()  # when the last output was
        self._begun = 0.0
        self.encoded: set[str] = set()
        self._adapters: dict[int, None] = {}  # on the device, the latest used last
        self._pending: Pending | None = None
        self._random = random.Random(settings.seed)

    @property
    def adapters(self) -> set[int]:
        """LoRA adapters on the device."""
        return set(self._adapters)

    # Submitting a step

    def begin(self, output: SchedulerOutput) -> None:
        """Take note of a step's requests, before its copies are queued."""
        if self._pending is not None:
            raise DeviceError("a step is submitted before the last one was sampled")
        if self.host_seconds:
            self.clock.wait_until(self.clock.now() + self.host_seconds)
        self._begun = self.clock.now()
        self.number += 1
        self.sanitizer.step = self.number
        for name in output.finished_req_ids:
            ended = self.requests.pop(name, None)
            if ended is not None:
                self.sanitizer.drop(ended.table)
        self.encoded.difference_update(output.free_encoder_mm_hashes)
        for new in output.scheduled_new_reqs:
            self._admit(new)
        self._go_on(output.scheduled_cached_reqs)

    def submit(self, output: SchedulerOutput) -> None:
        """Compute a step that has begun. Raises DeviceError."""
        now = self.clock.now()
        self.sanitizer.begin_step(self.number, self.timeline.next_begin(now))
        self._check_limits(output)
        self.sanitizer.clear(output.new_block_ids_to_zero or ())
        for copy in output.kv_cache_block_copies or ():
            self.sanitizer.duplicate(copy.src_block_id, copy.dst_block_id)
        loading = self._load_adapters(output) + self._encode(output.scheduled_encoder_inputs)
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        given = output.scheduled_spec_decode_tokens
        drafts: dict[str, list[int]] = {}
        batch = Batch()
        sampling = []
        for name, count in output.num_scheduled_tokens.items():
            if name not in starts or name not in self.requests:
                raise DeviceError("runs, and was not sent to the device", name, self.number)
            request = self.requests[name]
            start = starts[name] - request.ahead
            drafts[name] = self._drafts(request, start + count, given.get(name, ()))
            sampling.append(self._compute(request, start, start + count, batch, drafts[name]))
        noise = math.exp(self._random.gauss(0.0, self.settings.noise))
        seconds = (self.profile.step(batch) + loading) * noise
        time = self.timeline.step(now, seconds, self.number, batch)
        time.host = self._begun - self.fetched
        self._pending = Pending(list(output.num_scheduled_tokens), sampling, drafts, time)

    def idle_step(self) -> None:
        """Wait as long as the device decodes one token, which belongs to no request."""
        self.clock.wait_until(self.clock.now() + self.profile.step(Batch(decodes=1)))

    def sample(self, grammar: GrammarOutput | None) -> tuple[list[str], list[list[int]], StepTime]:
        """The requests of the step that was submitted, the tokens of each (or the numbers of its
        vector), and its time."""
        pending = self._pending
        self._pending = None
        if pending is None:
            raise DeviceError("no step was submitted")
        masks = self._masks(grammar, pending)
        tokens = [
            [] if request is None else self._sample(request, pending, masks)
            for request in pending.sampling
        ]
        self._drafted = [request for request in pending.sampling if request is not None]
        if not any(request.pooled for request in self._drafted):
            pending.time.sampled = sum(map(len, tokens))
        self.finished_step(pending.time)
        return pending.order, tokens, pending.time

    def take_drafts(self) -> tuple[list[str], list[list[int]]]:
        """The requests of the last step, and what was drafted for each."""
        names = [request.name for request in self._drafted]
        return names, [list(request.drafts) for request in self._drafted]

    # A request of a step

    def _admit(self, new: NewRequestData) -> None:
        name = new.req_id
        prompt = new.prompt_token_ids
        if prompt is None:
            raise DeviceError("has no token ids; the device cannot embed", name, self.number)
        known = self.requests.pop(name, None)
        if known is not None:  # a session goes on
            self.sanitizer.drop(known.table)
        tokens = list(new.prefill_token_ids or prompt)
        images = []
        for feature in new.mm_features:
            place = feature.mm_position
            images.append((place.offset, place.offset + place.length, feature.identifier))
        adapter = new.lora_request.lora_int_id if new.lora_request else 0
        hashes = {first: hash_of(key) for first, _, key in images}
        chain = Chain(tokens, adapter, hashes)
        params = new.sampling_params or new.pooling_params
        if params is None:
            raise DeviceError("neither samples nor pools", name, self.number)
        structured = isinstance(params, SamplingParams) and params.structured_outputs is not None
        self.requests[name] = Running(
            tokens=tokens,
            prompt=len(prompt),
            chain=chain,
            table=self.sanitizer.table(name, chain, new.block_ids),
            answer=self.answer(prompt, params),
            pooled=isinstance(params, PoolingParams),
            adapter=adapter,
            images=images,
            structured=structured,
        )

    def answer(self, prompt: list[int], params: SamplingParams | PoolingParams) -> Answer:
        """What the device answers to a prompt."""
        limits = self.limits
        if isinstance(params, PoolingParams):
            width = {ANSWER_FIELD: [limits.vector, limits.end_token]} | (params.extra_kwargs or {})
            return make_answer(prompt, limits.vocabulary, limits.end_token, extra_args=width)
        return make_answer(
            prompt,
            limits.vocabulary,
            limits.end_token,
            extra_args=params.extra_args,
            stop_tokens=params.all_stop_token_ids,
            min_tokens=params.min_tokens,
        )

    def _go_on(self, cached: CachedRequestData) -> None:
        for name, blocks, outputs in zip(
            cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True
        ):
            request = self.requests.get(name)
            if request is None:
                raise DeviceError("goes on, and was never begun", name, self.number)
            count = request.prompt + outputs
            request.ahead = self._ahead(request, count)
            self._agree(request, count - request.ahead, cached.all_token_ids.get(name))
            if request.unmasked is not None and request.unmasked < len(request.tokens):
                raise DeviceError("goes on after a token without a mask", name, self.number)
            if name in cached.resumed_req_ids:
                self.sanitizer.drop(request.table)
                request.table = self.sanitizer.table(name, request.chain, blocks or ())
            elif blocks is not None:
                self.sanitizer.extend(request.table, blocks)

    def _ahead(self, request: Running, count: int) -> int:
        """Tokens that the scheduler counts and that do not exist. Asynchronously, it does not know
        yet which drafts of the last step were rejected, and takes them all for accepted."""
        ahead = count - len(request.tokens)
        unknown = self.limits.ahead and request.sampled == self.number - 1
        return ahead if unknown and ahead == request.rejected else 0

    def _drafts(self, request: Running, end: int, given: Sequence[int]) -> list[int]:
        """The drafts that a step verifies which ends before token `end`. `given`: by the scheduler,
        -1 for those that only the device knows, or that a grammar forbids."""
        if not given:
            return []
        known = len(request.tokens)
        count = len(given)
        drafts = (request.drafts + [-1] * count)[:count]
        if count > self.limits.drafts:
            problem = f"verifies {count} drafts, over {self.limits.drafts}"
        elif end - count != known:
            problem = f"verifies drafts of token {end - count}, and {known} are known"
        elif any(token not in (-1, draft) for token, draft in zip(given, drafts, strict=True)):
            problem = f"verifies other drafts than were made for token {known}"
        else:
            return drafts
        raise DeviceError(problem, request.name, self.number)

    def _sample(
        self, request: Running, pending: Pending, masks: dict[str, list[Sequence[int]]]
    ) -> list[int]:
        """The drafts of a request that are right, and the token after them."""
        answer = request.answer
        drafts = pending.drafts[request.name]
        if request.pooled:
            return answer.tokens()
        known = len(request.tokens) - len(drafts)
        request.chain.truncate(known)
        allowed = masks.get(request.name)
        if request.structured and allowed is None:
            request.unmasked = known
        tokens = []
        for place in range(len(drafts) + 1):
            allowed_here = None if allowed is None else allowed[place]
            token = answer.token(known - request.prompt + place, allowed_here)
            tokens.append(token)
            if place < len(drafts) and drafts[place] != token:
                break
        request.sampled = self.number
        request.rejected = len(drafts) + 1 - len(tokens)
        self.accepted += len(tokens) - 1
        request.tokens += tokens
        self.sanitizer.forget(request.table, len(request.tokens) - 1)
        first = len(request.tokens) - request.prompt
        request.drafts = answer.drafts(
            first, self.limits.drafts, self.settings.acceptance, self.limits.drafts_vary
        )
        return tokens

    def _agree(self, request: Running, count: int, tokens: list[int] | None) -> None:
        """Compare the tokens of a request with those that the scheduler has seen, all of them
        (`tokens`) if the request was not in the last step: then later ones may be sampled again."""
        known = len(request.tokens)
        if count > known:
            problem = f"has {known} tokens, and the scheduler counts {count}"
            raise DeviceError(problem, request.name, self.number)
        if count < known:
            if tokens is None and not self.loads_failed:
                problem = f"samples token {count} again, of {known}"
                raise DeviceError(problem, request.name, self.number)
            request.chain.truncate(count)
            request.drafts = []
        if tokens is not None and tokens != request.tokens[: len(tokens)]:
            problem = "has other tokens at the scheduler than were sampled"
            raise DeviceError(problem, request.name, self.number)

    def _compute(
        self, request: Running, start: int, end: int, batch: Batch, drafts: list[int]
    ) -> Running | None:
        """Compute tokens `start` to `end`, the last of which are drafts; the request, if it then
        samples."""
        known = len(request.tokens)
        if end - len(drafts) > known:
            problem = f"computes token {end - 1}, and only {known} are known"
            raise DeviceError(problem, request.name, self.number)
        if end > self.limits.length:
            problem = f"has more than {self.limits.length} tokens"
            raise DeviceError(problem, request.name, self.number)
        for first, after, key in request.images:
            if first < end and start < after and key not in self.encoded:
                raise DeviceError(f"uses image {key}, not encoded", request.name, self.number)
        request.tokens += drafts  # until they are verified: their KV is written
        self.sanitizer.compute(request.table, start, end)
        if end - start - len(drafts) == 1:
            batch.add_decode(end)
            batch.prefill_tokens += len(drafts)
        else:
            batch.add_prefill(start, end)
        return request if end == known + len(drafts) else None

    # Checks of the step

    def _check_limits(self, output: SchedulerOutput) -> None:
        counts = output.num_scheduled_tokens
        limits = self.limits
        total = sum(counts.values())
        adapters = {self.requests[name].adapter for name in counts if name in self.requests} - {0}
        problems = (
            (min(counts.values(), default=1) < 1, "a request without tokens"),
            (total != output.total_num_scheduled_tokens, f"{total} tokens, not as stated"),
            (len(counts) > limits.sequences, f"{len(counts)} sequences, over {limits.sequences}"),
            (total > limits.tokens, f"{total} tokens, over {limits.tokens}"),
            (len(adapters) > limits.adapters, f"{len(adapters)} adapters, over {limits.adapters}"),
        )
        for wrong, problem in problems:
            if wrong:
                raise DeviceError(problem, next(iter(counts), None), self.number)

    def _load_adapters(self, output: SchedulerOutput) -> float:
        """Seconds that it takes to load the adapters of a step; the longest unused ones make
        room."""
        seconds = 0.0
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or not request.adapter:
                continue
            if request.adapter not in self._adapters:
                seconds += self.settings.adapter_seconds
            self._adapters.pop(request.adapter, None)
            self._adapters[request.adapter] = None
        for unused in list(self._adapters)[: -self.limits.adapters or None]:
            del self._adapters[unused]
        return seconds

    def _encode(self, inputs: dict[str, list[int]]) -> float:
        """Encode images; the seconds that it takes."""
        tokens = 0
        for name, indices in inputs.items():
            for index in indices:
                first, after, key = self.requests[name].images[index]
                self.encoded.add(key)
                tokens += after - first
        return tokens * self.settings.image_token_seconds

    def _masks(
        self, grammar: GrammarOutput | None, pending: Pending
    ) -> dict[str, list[Sequence[int]]]:
        """Tokens that the grammars allow, by request: at the place of each draft, and after it. One
        that has ended at the scheduler, which the device does not know yet, has none."""
        structured = {
            request.name
            for request in pending.sampling
            if request is not None and request.structured
        }
        named = [] if grammar is None else grammar.structured_output_request_ids
        for name in named:
            if name not in structured:
                raise DeviceError("has a mask, and samples by no grammar", name, self.number)
        if grammar is None:
            return {}
        masks = grammar.grammar_bitmask
        counts = [1 + len(pending.drafts[name]) for name in named]
        if len(masks) != sum(counts):
            problem = f"{len(masks)} masks for {sum(counts)} tokens"
            raise DeviceError(problem, next(iter(named), None), self.number)
        # Behind the last draft that a grammar allows, masks allow everything.
        right = getattr(grammar, "num_acceptable_drafts", None) or [0] * len(named)
        for name, count in zip(named, right, strict=True):
            drafts = pending.drafts[name]
            drafts[count:] = [-1] * len(drafts[count:])
        rows = iter(masks)
        allowed = {}
        for name, count in zip(named, counts, strict=True):
            own_rows = itertools.islice(rows, count)
            allowed[name] = [allowed_tokens(row, self.limits.vocabulary) for row in own_rows]
        return allowed


def hash_of(text: str) -> int:
    """The same for a text in each process, unlike `hash`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
