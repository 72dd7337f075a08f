"""The engine: each request gets the tokens it gets alone, whatever happens around it.

The oracle is stage 0's generator with one prompt. FR-nn names an entry of the public reports of
faults in comparable systems.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stage0_reference.decoder import Decoder
from stage0_reference.generation import TextGenerator
from stage0_reference.page_allocator import OutOfPages
from stage0_reference.sampling import SamplingParams, sample_token
from stage1_quant.fp8_backend import Fp8CacheBackend
from stage2_pv_pipeline.fp8_pipeline_backend import Fp8PipelineBackend
from stage3_dataflow import engine as engine_module
from stage3_dataflow.engine import (
    Engine,
    RequestFailed,
    StepEvent,
    _greedy_tokens,
    plan_cache,
)
from stage3_dataflow.scheduler import RequestStatus
from tests.model_factory import random_decoder, tiny_config
from tests.stage3.operation_log import TensorOnlyBackend, log_capture

pytestmark = pytest.mark.stage3

# Rows of all products start at multiples of 16 bytes, as in every published model.
CONFIG = tiny_config(num_hidden_layers=2, v_head_dim=12, moe_intermediate_size=16)
VOCABULARY = CONFIG.vocab_size
SHAPE: dict[str, Any] = {"page_size": 4, "prefill_chunk": 8}
ROWS = 3


@functools.cache
def small_decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    """One dense layer and one with experts."""
    return random_decoder(CONFIG, dtype=dtype)


def fresh_decoder() -> Decoder:
    """A copy that a test may break."""
    return random_decoder(CONFIG)


def make_engine(*, decoder=None, backend=None, num_pages=60, max_running=ROWS, **keywords):
    return Engine(
        decoder or small_decoder(),
        backend or Fp8CacheBackend(),
        num_pages=num_pages,
        max_running=max_running,
        **(SHAPE | keywords),
    )


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], str | None]:
    """Tokens and finish reason of a prompt that has a generator to itself."""
    generator = TextGenerator(
        small_decoder(), Fp8CacheBackend(), num_pages=60, decode_rows=ROWS, **SHAPE
    )
    done = generator.generate([prompt], params)[0]
    return done.token_ids, done.finish_reason


def check_ended_well(engine: Engine, *requests) -> None:
    """Check that all got what they get alone, and that nothing is left behind."""
    for request in requests:
        assert request.error is None
        expected = alone(request.prompt_token_ids, request.params)
        assert (request.token_ids, request.finish_reason) == expected
    assert engine.idle
    engine.scheduler.check_invariants()
    assert engine.stats.free_pages == engine.scheduler.allocator.num_pages


# Whatever arrives, ends, fails and is cancelled

# Few tokens, and prompts that are beginnings of one another: prefixes are found often.
STEMS = [random_prompt(30, seed) for seed in (1, 2)]
prompts = st.builds(
    lambda stem, kept, tail: STEMS[stem][:kept] + tail,
    st.integers(0, 1),
    st.integers(0, 30),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
)
# Made into SamplingParams by the tests: its checks of annotations draw random numbers.
sampling = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 9),
        "temperature": st.sampled_from([0.0, 0.8]),
        "seed": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (3, 14, 15, 40, 41, 42)]),
    }
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts, sampling, st.sampled_from([None, None, 1, 3])),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=14,
)


class Listener:
    """Collects a request's events, and raises at the one with number `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.events: list[StepEvent] = []

    def __call__(self, event: StepEvent) -> None:
        self.events.append(event)
        if len(self.events) == self.fails_at:
            raise LookupError("on purpose")


@settings(max_examples=30)
@given(actions=actions, num_pages=st.sampled_from([8, 12, 20, 60]))
def test_every_request_gets_the_tokens_it_gets_alone(actions, num_pages):
    engine = make_engine(num_pages=num_pages)
    requests, listeners = [], []
    seen = []
    for kind, *arguments in actions:
        if kind == "submit":
            prompt, params, fails_at = arguments
            params = SamplingParams(**params)
            listener = Listener(fails_at)
            if len(prompt) + params.max_new_tokens - 1 > 4 * num_pages:
                with pytest.raises(OutOfPages):
                    engine.submit(prompt, params, on_token=listener)
                continue
            requests.append(engine.submit(prompt, params, on_token=listener))
            listeners.append(listener)
        elif kind == "step":
            for _ in range(*arguments):
                events = engine.step()
                assert len({e.request_id for e in events if e.token_id is not None}) == sum(
                    e.token_id is not None for e in events
                )
                seen += events
                engine.scheduler.check_invariants()
        elif arguments[0] < len(requests):
            request = requests[arguments[0]]
            was_live = not request.finished
            assert engine.cancel(request.id) == was_live
            assert not engine.cancel(request.id)
    while not engine.idle:
        seen += engine.step()

    assert engine.stats.free_pages == num_pages
    for request, listener in zip(requests, listeners, strict=True):
        tokens, reason = alone(request.prompt_token_ids, request.params)
        events = [event for event in seen if event.request_id == request.id]
        assert [e.token_id for e in events if e.token_id is not None] == request.token_ids
        assert [e.finish_reason is not None for e in events] == [False] * (len(events) - 1) + [True]
        assert (events[-1].finish_reason, events[-1].error) == (
            request.finish_reason,
            request.error,
        )
        told = len(listener.events)
        if listener.fails_at == told:
            assert request.finish_reason == "error"
            assert request.error == "on_token raised LookupError: on purpose"
            assert [event.token_id for event in events] == [e.token_id for e in listener.events]
        elif request.finish_reason == "cancelled":
            assert listener.events == events[:-1]
        else:
            assert (request.token_ids, request.finish_reason) == (tokens, reason)
            assert listener.events == events
        assert request.token_ids == tokens[: len(request.token_ids)]


@settings(max_examples=8)
@given(requests=st.lists(st.tuples(prompts, sampling), min_size=1, max_size=5))
def test_tokens_do_not_depend_on_the_pool_or_on_what_it_holds(requests):
    """A pool that just fits one request after the other, and one that has served them before."""
    tight, warm = make_engine(num_pages=11), make_engine()
    for _ in range(2):
        submitted = [
            engine.submit(prompt, SamplingParams(**params))
            for engine in (tight, warm)
            for prompt, params in requests
        ]
        tight.run()
        warm.run()
    check_ended_well(tight, *submitted[: len(requests)])
    check_ended_well(warm, *submitted[len(requests) :])


def test_stage_2s_backend_serves_too():
    engine = make_engine(backend=Fp8PipelineBackend())
    generator = TextGenerator(
        small_decoder(), Fp8PipelineBackend(), num_pages=60, decode_rows=ROWS, **SHAPE
    )
    prompt, params = random_prompt(21), SamplingParams(max_new_tokens=9)
    request = engine.submit(prompt, params)
    engine.run()
    assert request.token_ids == generator.generate([prompt], params)[0].token_ids


class WatchedBackend(TensorOnlyBackend):
    """Notes the largest shapes that it was asked to attend."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def attend(self, q_latent, q_rope, cache, block_table, *args, **kwargs):
        self.most = max(self.most, q_latent.shape[0] * q_latent.shape[1] * block_table.shape[1])
        return super().attend(q_latent, q_rope, cache, block_table, *args, **kwargs)


def replaying_engine(monkeypatch, **keywords) -> Engine:
    """Make an engine with a log of operations in the place of its CUDA graph."""
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "graph_obstacle", lambda *_: None)
        patch.setattr(engine_module, "CudaGraphCapture", lambda device: log_capture)
        return make_engine(**keywords)


@pytest.mark.parametrize("max_running", [2, 12])
def test_an_engine_that_replays_gives_the_tokens_of_one_that_does_not(max_running, monkeypatch):
    engine = make_engine(backend=WatchedBackend(), max_running=max_running)
    expected = mixed_requests(engine, 5)
    engine.run()
    backend = WatchedBackend()
    engine = replaying_engine(monkeypatch, backend=backend, max_running=max_running, max_context=52)
    asked_before = backend.most
    requests = mixed_requests(engine, 5)
    engine.run()
    for request, other in zip(requests, expected, strict=True):
        assert (request.token_ids, request.finish_reason) == (other.token_ids, "length")
    stats = engine.stats
    assert stats.graph_replays == stats.times.decode_steps > 0
    assert "decode: CUDA graph" in engine.describe()
    # A workspace that grows with what is attended had its size before the graph was captured.
    assert backend.most == asked_before


def test_a_replay_that_fails_is_repeated_for_one_request_at_a_time(monkeypatch):
    """Every replay leaves its logits in the same memory."""
    expected = make_engine(backend=TensorOnlyBackend())
    wanted = mixed_requests(expected, 3)
    expected.run()
    engine = replaying_engine(monkeypatch, backend=TensorOnlyBackend())
    run = engine._decode_step.run

    def fail_together(live):
        if len(live) > 1:
            raise RuntimeError("on purpose")
        return run(live)

    monkeypatch.setattr(engine._decode_step, "run", fail_together)
    requests = mixed_requests(engine, 3)
    engine.run()
    assert [r.token_ids for r in requests] == [r.token_ids for r in wanted]
    assert engine.stats.graph_replays > engine.stats.times.decode_steps


# The queue and the pool


def test_what_can_never_fit_is_refused_at_once_and_changes_nothing():
    engine = make_engine(num_pages=5)
    running = engine.submit(random_prompt(9), SamplingParams(max_new_tokens=4))
    engine.step()
    before = engine.stats
    with pytest.raises(OutOfPages, match="6 more pages needed, 5 available"):
        engine.submit(random_prompt(17), SamplingParams(max_new_tokens=5))
    assert engine.stats == before
    fits = engine.submit(random_prompt(17), SamplingParams(max_new_tokens=4))
    assert fits.id == running.id + 1
    assert fits.status is RequestStatus.WAITING
    engine.run()
    check_ended_well(engine, running, fits)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt_token_ids must have between 1 and 255 tokens"),
        ([1] * 256, "prompt_token_ids must have between 1 and 255 tokens"),
        ([1] * 50, "prompt_token_ids must have fewer than max_context = 50 tokens; got 50"),
        ([1, VOCABULARY], "prompt_token_ids must hold token ids below vocab_size = 61; got 61"),
        ([-1], "prompt_token_ids must hold token ids"),
    ],
    ids=["empty", "beyond-the-model", "beyond-max-context", "unknown", "negative"],
)
def test_impossible_prompts_are_refused_by_name(prompt, message):
    engine = make_engine(max_context=50)
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt)
    assert engine.idle


def test_max_context_ends_a_request():
    engine = make_engine(max_context=20)
    request = engine.submit(random_prompt(15), SamplingParams(max_new_tokens=50))
    engine.run()
    assert (len(request.token_ids), request.finish_reason) == (5, "length")


def test_a_stop_token_ends_a_request_and_is_no_part_of_it():
    prompt = random_prompt(9)
    free = alone(tuple(prompt), SamplingParams(max_new_tokens=12))[0]
    engine = make_engine()
    stop = free[5]
    request = engine.submit(prompt, SamplingParams(12, stop_token_ids=(stop,)))
    events = []
    while not engine.idle:
        events += engine.step()
    assert request.token_ids == free[: free.index(stop)]
    assert events[-1] == StepEvent(request.id, None, "stop")
    check_ended_well(engine, request)


def test_a_long_prompt_delays_a_stream_by_one_chunk_at_a_time():
    engine = make_engine()
    first = engine.submit(random_prompt(5), SamplingParams(max_new_tokens=30))
    engine.step()
    late = engine.submit(random_prompt(60, seed=3), SamplingParams(max_new_tokens=4))
    for step in range(1, 9):  # 60 tokens are 8 chunks of 8
        assert late.token_ids == []
        assert len(first.token_ids) == step
        engine.step()
        assert late.computed_tokens == min(8 * step, 60)
    assert len(late.token_ids) == 1
    engine.run()
    check_ended_well(engine, first, late)


def test_prefix_cache_under_churn_never_serves_another_text():
    """FR-11: a pool of 4 pages; A uses 3, B needs all 4, then A comes again."""
    engine = make_engine(num_pages=4, page_size=8)
    params = SamplingParams(max_new_tokens=4)
    a, b = [1, 2, 3, 4] * 5, [7, 8, 9] * 9
    results = []
    for prompt in (a, b, a, a, b):
        request = engine.submit(prompt, params)
        engine.run()
        fresh = make_engine(num_pages=4, page_size=8)
        expected = fresh.submit(prompt, params)
        fresh.run()
        assert request.token_ids == expected.token_ids
        results.append(request.cached_tokens)
    assert results == [0, 0, 0, 16, 8]
    engine.scheduler.check_invariants()
    assert engine.stats.free_pages == 4


def recorded_logits(engine: Engine, prompt: list[int], monkeypatch) -> torch.Tensor:
    """Logits of all of a request's steps, [tokens, vocabulary]."""
    kept = []
    choose = engine._choose

    def record(request, prediction):
        kept.append(prediction.logits.clone())
        return choose(request, prediction)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_choose", record)
        engine.submit(prompt, SamplingParams(max_new_tokens=4))
        engine.run()
    return torch.stack(kept)


def test_100_tokens_in_one_chunk_in_two_and_after_a_hit(monkeypatch):
    """FR-31. In float64, chunks change the order of sums and no FP8 code: rounding is all."""
    prompt = random_prompt(100, seed=4)
    outputs = {}
    for chunk in (128, 64):
        engine = make_engine(
            decoder=small_decoder(torch.float64), page_size=16, prefill_chunk=chunk
        )
        outputs[chunk] = recorded_logits(engine, prompt, monkeypatch)
    assert engine.stats.times.cached_tokens == 0
    after_hit = recorded_logits(engine, prompt, monkeypatch)
    assert engine.stats.times.cached_tokens == 64
    assert torch.equal(after_hit, outputs[64])
    scale = outputs[128].abs().max()
    difference = (outputs[64] - outputs[128]).abs().max()
    assert difference <= 1e6 * torch.finfo(torch.float64).eps * scale


def test_a_prefix_that_several_requests_built_has_the_bits_of_one(monkeypatch):
    """The middle of the third prompt was once the short last chunk of the first."""
    tokens = random_prompt(60, seed=6)
    engine = make_engine()
    for length in (45, 52):
        recorded_logits(engine, tokens[:length], monkeypatch)
    built = recorded_logits(engine, tokens, monkeypatch)
    assert engine.stats.times.cached_tokens == 40 + 48
    assert torch.equal(built, recorded_logits(make_engine(), tokens, monkeypatch))


# Failures


class FaultyBackend(Fp8CacheBackend):
    """Raises `error`, at most `times` times, when a request attends with so many tokens cached.

    The request is known by its first page, which no other may share.
    """

    def __init__(self, error: BaseException, times: int = 1000) -> None:
        super().__init__()
        self.error, self.times = error, times
        self.request, self.length = None, 0

    def fail_at(self, request, length: int) -> None:
        self.request, self.length = request, length

    def check(self, block_table, cache_seqlens) -> None:
        held = self.request and self.request.pages and self.request.pages.pages
        if not held or self.times == 0:
            return
        place = [held[0], self.length]
        if place in torch.stack((block_table[:, 0], cache_seqlens), dim=1).tolist():
            self.times -= 1
            raise self.error

    def attend(self, q_latent, q_rope, cache, block_table, cache_seqlens, *args, **kwargs):
        self.check(block_table, cache_seqlens)
        return super().attend(q_latent, q_rope, cache, block_table, cache_seqlens, *args, **kwargs)

    def read_prefix(self, cache, block_table, cache_seqlens):
        self.check(block_table, cache_seqlens)
        return super().read_prefix(cache, block_table, cache_seqlens)


def mixed_requests(engine: Engine, count: int) -> list:
    """Prompts of 11, 18, 25 ... tokens, greedy and sampled in turn, ten new tokens each."""
    return [
        engine.submit(
            random_prompt(11 + 7 * i, seed=i),
            SamplingParams(max_new_tokens=10, temperature=0.9 * (i % 2), seed=i),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("which", "tokens"),
    [(0, 0), (4, 0), (0, 1), (1, 4), (4, 9)],
    ids=["first-prompt", "later-prompt", "first-step", "sampled", "last-step"],
)
def test_a_request_that_fails_in_the_model_fails_alone(which, tokens):
    """In a decode step the fault stops the whole batch; the others are repeated without it."""
    backend = FaultyBackend(RuntimeError("broken on purpose"))
    engine = make_engine(backend=backend)
    requests = mixed_requests(engine, 6)
    bad = requests.pop(which)
    backend.fail_at(bad, len(bad.prompt_token_ids) + tokens)
    engine.run()
    assert (bad.finish_reason, bad.error) == ("error", "RuntimeError: broken on purpose")
    # The first token comes out of the prompt's chunk, the others out of steps with it cached.
    assert bad.token_ids == alone(bad.prompt_token_ids, bad.params)[0][:tokens]
    check_ended_well(engine, *requests)


def test_a_failed_prompt_is_not_found_by_others():
    backend = FaultyBackend(RuntimeError("broken on purpose"), times=1)
    engine = make_engine(backend=backend)
    params = SamplingParams(max_new_tokens=3)
    bad, good = (engine.submit(random_prompt(30), params) for _ in range(2))
    backend.fail_at(bad, 30)
    engine.run()
    assert bad.finish_reason == "error"
    assert good.cached_tokens == 0
    check_ended_well(engine, good)


def test_a_lonely_request_that_fails_is_not_repeated():
    backend = FaultyBackend(RuntimeError("broken on purpose"), times=1)
    engine = make_engine(backend=backend)
    bad = engine.submit(random_prompt(5))
    backend.fail_at(bad, 7)
    engine.run()
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 2)
    assert engine.stats.free_pages == 60


@pytest.mark.parametrize("tokens", [0, 3])
def test_after_an_interrupt_the_next_step_takes_up_where_it_was(tokens):
    backend = FaultyBackend(KeyboardInterrupt(), times=1)
    engine = make_engine(backend=backend)
    requests = mixed_requests(engine, 4)
    backend.fail_at(requests[1], len(requests[1].prompt_token_ids) + tokens)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    check_ended_well(engine, *requests)


def test_an_interrupt_in_a_callback_loses_no_draw():
    engine = make_engine()
    requests = mixed_requests(engine, 4)
    told = []

    def interrupt(event):
        told.append(event)
        if len(told) == 3:
            raise KeyboardInterrupt

    first = engine.submit(random_prompt(3, seed=9), SamplingParams(10, 0.9), on_token=interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert [event.token_id for event in told] == first.token_ids
    check_ended_well(engine, first, *requests)


def test_nan_ends_the_request_that_meets_it_and_no_other():
    """The embedding of one token is NaN: one prompt has it, one request comes to say it."""
    decoder = fresh_decoder()
    prompts = [random_prompt(11 + 7 * i, seed=i) for i in range(4)]
    params = SamplingParams(max_new_tokens=10)
    expected = [alone(tuple(prompt), params)[0] for prompt in prompts]
    elsewhere = {*prompts[1]}.union(*prompts[:1], *prompts[2:], *expected[:1], *expected[2:])
    token = next(token for token in expected[1] if token not in elsewhere)
    decoder.model.embed_tokens.weight[token] = float("nan")
    prompts[3][5] = token
    engine = make_engine(decoder=decoder)
    good, says_it, also_good, has_it, has_it_too = [
        engine.submit(prompt, params) for prompt in [*prompts, prompts[3]]
    ]
    engine.run()
    assert has_it_too.cached_tokens == 0  # what failed is not published
    for request in (says_it, has_it, has_it_too):
        assert request.finish_reason == "error"
        assert "logits must be numbers with a finite maximum" in request.error
    assert says_it.token_ids == expected[1][: expected[1].index(token) + 1]
    assert has_it.token_ids == []
    assert [good.token_ids, also_good.token_ids] == [expected[0], expected[2]]
    check_ended_well(engine, good, also_good)


def test_a_callback_that_raises_at_the_last_token_still_tells():
    engine = make_engine()
    params = SamplingParams(max_new_tokens=2)
    request = engine.submit(random_prompt(5), params, on_token=Listener(2))
    events = [event for _ in range(2) for event in engine.step()]
    assert [event.finish_reason for event in events] == [None, "error"]
    assert (request.finish_reason, len(request.token_ids)) == ("error", 2)
    assert engine.idle and engine.stats.free_pages == 60


# Callbacks that use the engine


def test_a_callback_may_cancel_and_submit():
    """It cancels itself, one that had its token in this step, and one that would get it next."""
    engine = make_engine()
    params = SamplingParams(max_new_tokens=20)
    added = []

    def on_token(event):
        if len(middle.token_ids) == 3:
            for request in (middle, before, after):
                assert engine.cancel(request.id)
            added.append(engine.submit(random_prompt(7, seed=2), SamplingParams(max_new_tokens=3)))

    before = engine.submit(random_prompt(2, seed=1), params)
    middle = engine.submit(random_prompt(3, seed=2), params, on_token=on_token)
    after = engine.submit(random_prompt(3, seed=3), params)
    events = []
    while not engine.idle:
        events += engine.step()
    assert [len(request.token_ids) for request in (before, middle, after)] == [3, 3, 2]
    for request in (before, middle, after):
        assert request.finish_reason == "cancelled"
        expected = alone(request.prompt_token_ids, request.params)[0]
        assert request.token_ids == expected[: len(request.token_ids)]
        last = [event for event in events if event.request_id == request.id][-1]
        assert last == StepEvent(request.id, None, "cancelled")
    check_ended_well(engine, *added)


def test_a_callback_that_cancels_and_then_raises_stays_cancelled():
    engine = make_engine()

    def on_token(event):
        engine.cancel(event.request_id)
        raise LookupError("on purpose")

    request = engine.submit(random_prompt(5), on_token=on_token)
    engine.run()
    assert request.finish_reason == "cancelled"
    assert request.error == "on_token raised LookupError: on purpose"
    assert engine.stats.free_pages == 60


def test_a_callback_may_not_step():
    engine = make_engine()
    request = engine.submit(random_prompt(5), on_token=lambda event: engine.step())
    engine.run()
    assert "step must not be called from a callback" in request.error


def test_cancelling_what_was_never_submitted_is_refused():
    engine = make_engine()
    with pytest.raises(ValueError, match="request_id must be one that submit gave; got 0"):
        engine.cancel(0)


# Streams


def test_streams_read_in_turn_give_every_token_in_order():
    engine = make_engine()
    requests = mixed_requests(engine, 3)
    streams = [engine.stream(request) for request in requests]
    collected = [[next(stream)] for stream in streams]
    for stream, tokens in zip(reversed(streams), reversed(collected), strict=True):
        tokens += stream
    assert collected == [request.token_ids for request in requests]
    # A request that has ended can be streamed again, without a step.
    assert list(engine.stream(requests[0])) == requests[0].token_ids
    engine.run()
    check_ended_well(engine, *requests)


def test_a_stream_says_that_its_request_failed():
    engine = make_engine()
    params = SamplingParams(max_new_tokens=5)
    request = engine.submit(random_prompt(5), params, on_token=Listener(3))
    tokens = []
    with pytest.raises(RequestFailed, match="request 0 failed: on_token raised LookupError: on p"):
        tokens.extend(engine.stream(request))
    assert request.token_ids == alone(request.prompt_token_ids, request.params)[0][:3]


def test_a_stream_of_a_cancelled_request_ends():
    engine = make_engine()
    request = engine.submit(random_prompt(5))
    stream = engine.stream(request)
    tokens = [next(stream), next(stream)]
    engine.cancel(request.id)
    assert list(stream) == []
    assert tokens == request.token_ids


# The choice of a token

extremes = st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, 1.0, -1.0])


@given(
    st.integers(1, 6).flatmap(
        lambda width: st.lists(
            st.lists(extremes, min_size=width, max_size=width), min_size=1, max_size=4
        )
    )
)
def test_greedy_tokens_are_those_of_sample_token(rows):
    """Ties, infinities and NaN included; None where sample_token refuses."""
    logits = torch.tensor(rows)
    for best, row in zip(_greedy_tokens(logits), logits, strict=True):
        try:
            expected = sample_token(row, SamplingParams(), torch.Generator())
        except ValueError:
            expected = None
        assert best == expected


# Memory and time


class SizesMade(TorchDispatchMode):
    """Notes the size of every tensor that operations make; views of the cache are not made."""

    def __init__(self, cache) -> None:
        super().__init__()
        self.cache = {plane.untyped_storage().data_ptr() for layer in cache for plane in layer}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                if leaf.untyped_storage().data_ptr() not in self.cache:
                    self.sizes.append(leaf.numel())
        return out


def test_a_step_costs_the_same_in_a_pool_100_times_the_live_tokens():
    """FR-32: every tensor of every step has the same size in either pool."""
    made = []
    for num_pages in (8, 800):
        engine = make_engine(num_pages=num_pages, max_context=32)
        with SizesMade(engine.cache) as sizes:
            engine.submit(random_prompt(21), SamplingParams(max_new_tokens=8))
            engine.run()
        made.append(sizes.sizes)
    assert len(made[0]) > 100
    assert made[0] == made[1]


class WorkspaceBackend(Fp8CacheBackend):
    """Needs 3 bytes for each row of queries and cached token."""

    def workspace_bytes(self, batch, s_q, heads, kv_lora_rank, capacity_tokens):
        return 3 * batch * s_q * heads * capacity_tokens


def test_pages_are_counted_after_the_workspace():
    """FR-32. A chunk of 8 queries stays absorbed, so the naive form needs nothing."""
    page_bytes = CONFIG.num_hidden_layers * (32 + 4 + 2 * 16) * 16
    heads = CONFIG.num_attention_heads
    for rows, most in ((4, 8), (20, 20)):  # a chunk of 8 queries, or 20 rows
        workspace = 3 * most * heads * 112  # 100 tokens fill 7 pages of 16
        shape = {"page_size": 16, "decode_rows": rows, "prefill_chunk": 8, "max_context": 100}
        backend = WorkspaceBackend()
        plan = plan_cache(CONFIG, backend, workspace + 5 * page_bytes + 7, **shape)
        assert (plan.num_pages, plan.page_bytes) == (5, page_bytes)
        assert (plan.attend_workspace_bytes, plan.prefill_workspace_bytes) == (workspace, 0)
        assert plan_cache(CONFIG, Fp8CacheBackend(), 5 * page_bytes, **shape).num_pages == 5
        least = workspace + page_bytes
        with pytest.raises(ValueError, match=f"memory_bytes must be at least {least}"):
            plan_cache(CONFIG, backend, least - 1, **shape)
        assert plan_cache(CONFIG, backend, least, **shape).num_pages == 1
    engine = make_engine(backend=backend, num_pages=plan.num_pages, page_size=16)
    held = sum(plane.untyped_storage().nbytes() for layer in engine.cache for plane in layer)
    assert held == plan.cache_bytes


NAIVE_PEAK = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile

from stage0_reference.latent_attention import naive_attention

heads, s_q, length = map(int, sys.argv[1:])
draw = lambda *shape: torch.randn(shape).bfloat16()
queries = draw(s_q, heads, 64), draw(s_q, heads, 32)
rows = draw(length, 128), draw(length, 32)
weights = draw(heads, 64, 128), draw(heads, 48, 128)
with (
    torch.inference_mode(),
    profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
):
    naive_attention(*queries, *rows, *weights, 0.1)
in_use = peak = sum(part.numel() * part.element_size() for part in rows)
for event in profiled.profiler.kineto_results.events():
    if event.name() == "[memory]":
        in_use += event.nbytes()
        peak = max(peak, in_use)
print(peak)
"""
"""Prints the largest number of bytes that naive attention holds, its cached rows included."""


@pytest.mark.parametrize(("heads", "s_q", "length"), [(4, 64, 1000), (2, 256, 900), (3, 9, 2000)])
def test_the_planned_prefill_workspace_is_what_naive_attention_takes(heads, s_q, length):
    """Never less than the measured peak, and not more by an eighth.

    Measured in a process of its own: what other tests left behind, the checks of annotations and
    compiled graphs among it, allocates too.
    """
    config = tiny_config(
        num_attention_heads=heads,
        kv_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=48,
        max_position_embeddings=length,
    )
    plan = plan_cache(config, Fp8CacheBackend(), 10**9, prefill_chunk=s_q)
    command = [sys.executable, "-c", NAIVE_PEAK, *map(str, (heads, s_q, length))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    peak = int(done.stdout.split()[-1])
    assert peak <= plan.prefill_workspace_bytes <= 1.125 * peak


# What it says, and what it refuses


def test_stats_count_what_was_done():
    engine = make_engine()
    prompts = [random_prompt(20), random_prompt(20), random_prompt(9, seed=1)]
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=6)) for prompt in prompts]
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.free_pages, stats.promised_pages) == (0, 3, 60, 0)
    engine.step()
    stats = engine.stats
    assert (stats.running, stats.waiting) == (3, 0)
    assert stats.times.prefill_tokens == 8
    assert stats.free_pages == 58  # 8 tokens on pages of 4
    # 25 and 14 tokens at the longest, the last of them not cached: 6 + 6 + 4 pages, less 2 held
    assert stats.promised_pages == 7 + 7 + 4 - 2
    engine.run()
    times = engine.stats.times
    assert times.cached_tokens == 16
    assert times.prefill_tokens == 20 + 4 + 9
    assert times.decode_tokens == sum(len(request.token_ids) - 1 for request in requests)
    assert times.prefill_seconds > 0 and times.decode_seconds > 0
    assert engine.stats.graph_replays == 0


def test_describe_names_the_path_and_the_reason():
    text = make_engine().describe()
    assert "stage 1, per-token FP8 latent cache" in text
    assert "decode: eager, because the model is on cpu" in text
    assert "bits:" not in text
    asked = make_engine(use_cuda_graph=False).describe()
    assert "decode: eager, because use_cuda_graph is False" in asked


@pytest.mark.parametrize("keywords", [{"graph_rows": [1, 3]}, {"max_running": 129}])
def test_describe_warns_where_bits_may_depend_on_the_others(keywords):
    assert "may depend on who runs beside it" in make_engine(**keywords).describe()


def test_several_numbers_of_rows_serve_the_same_requests():
    engine = make_engine(graph_rows=[1, 2, 3])
    requests = mixed_requests(engine, 5)
    engine.run()
    check_ended_well(engine, *requests)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph must be False or 'auto' here, since the model"),
        ({"graph_rows": [1, 2]}, r"graph_rows must end with max_running = 3; got \[1, 2\]"),
        ({"graph_rows": []}, "graph_rows must end with max_running = 3; got"),
        ({"max_context": 257}, "max_context must be between 2 and 256"),
        ({"max_context": 1}, "max_context must be between 2 and 256"),
        ({"max_running": 0}, "max_running must be at least 1; got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1; got 0"),
        ({"num_pages": 0}, "num_pages must be at least 1; got 0"),
    ],
)
def test_impossible_engines_are_refused_by_name(keywords, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**keywords)


@pytest.mark.unchecked
def test_an_unknown_choice_of_graph_is_refused():
    with pytest.raises(ValueError, match="use_cuda_graph must be True, False or 'auto'; got 'yes'"):
        make_engine(use_cuda_graph="yes")


@pytest.mark.gpu
def test_an_engine_with_a_graph_gives_the_tokens_of_one_without():
    from stage3_dataflow.triton_backend import FusedBackend

    config = tiny_config(
        num_hidden_layers=2,
        hidden_size=256,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        v_head_dim=16,
        moe_intermediate_size=16,
        max_position_embeddings=4096,
    )
    decoder = random_decoder(config, dtype=torch.bfloat16).to("cuda")
    tokens = {}
    for use_cuda_graph in (False, True):
        engine = Engine(
            decoder,
            FusedBackend(),
            num_pages=80,
            max_running=4,
            prefill_chunk=128,
            use_cuda_graph=use_cuda_graph,
        )
        requests = [
            engine.submit(
                random_prompt(length, seed=length),
                SamplingParams(max_new_tokens=70, temperature=0.8 * (length % 2), seed=length),
            )
            for length in (1, 63, 64, 65, 300, 1000, 300)
        ]
        for step in range(40):
            engine.step()
            if step == 20:
                engine.cancel(requests[1].id)
        engine.run()
        stats = engine.stats
        assert stats.graph_replays == (stats.times.decode_steps if use_cuda_graph else 0)
        assert stats.free_pages == 80
        tokens[use_cuda_graph] = [request.token_ids for request in requests]
        alone_engine = Engine(
            decoder,
            FusedBackend(),
            num_pages=80,
            max_running=4,
            prefill_chunk=128,
            use_cuda_graph=use_cuda_graph,
        )
        by_itself = alone_engine.submit(requests[4].prompt_token_ids, requests[4].params)
        alone_engine.run()
        assert by_itself.token_ids == requests[4].token_ids == requests[6].token_ids
    assert tokens[True] == tokens[False]


@pytest.mark.gpu
def test_greedy_tokens_on_the_gpu_take_the_first_of_equals():
    logits = torch.zeros(7, 129_280, device="cuda")
    logits[torch.arange(7), torch.tensor([0, 5, 1000, 31, 4096, 129_279, 77])] = 1.0
    logits[:, 100_000] = 1.0
    assert _greedy_tokens(logits) == _greedy_tokens(logits.cpu())
