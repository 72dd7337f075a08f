# %% [markdown]
# # 10. Stage 0: the attention that must not change
#
# Stage 0 decodes a real model in plain PyTorch over a paged cache in BF16. Nothing in it is fast.
# It is what the later stages are compared with, so this chapter looks at three things that they
# must keep: the absorbed form, the pages, and the online softmax.

# %%
import figures
import torch

from stage0_reference import (
    AbsorbedBackend,
    SamplingParams,
    TextGenerator,
    absorbed_attention,
    load_model,
    naive_attention,
)
from stage0_reference.attention_backend import cache_bytes_per_token
from stage0_reference.latent_attention import absorb_query, latent_attention
from stage0_reference.latent_cache import (
    Bf16LatentPages,
    LatentRows,
    allocate_pages,
    gather_rows,
    paged_latent_attention,
    write_rows,
)

_ = torch.manual_seed(0)

# %% [markdown]
# ## A model that runs
#
# The shipped model is small (8.2 million parameters, bytes as tokens, trained on Python files), but
# its cache has the published widths: a latent of 512 and a rotary key of 64.

# %%
decoder, tokenizer = load_model()
backend = AbsorbedBackend()
generator = TextGenerator(decoder, backend, num_pages=16)
prompt = "class Stack:\n    def push(self, item):\n"
(completion,) = generator.generate([tokenizer.encode(prompt)], [SamplingParams(max_new_tokens=40)])
print(prompt + tokenizer.decode(completion.token_ids))

cache = backend.make_cache(decoder.config, num_pages=16, page_size=64)
per_layer = cache_bytes_per_token(cache) // decoder.config.num_hidden_layers
print(f"{len(cache)} layers, {per_layer} bytes a token and layer")
assert per_layer == 1152

# %% [markdown]
# ## Count: two forms of one sum
#
# Head h scores token t with a key that is made from the latent. Moving the matrix to the other side
# of the product changes nothing but the order of additions:
#
#     q_nope . (W_UK c_kv)  =  (W_UK^T q_nope) . c_kv
#
# The right side needs no key: the query, 128 wide, becomes 512 wide once (`absorb_query`), and then
# reads latents as they are cached. The same is done with `W_UV` behind the sum over tokens. First
# the naive form, in float64, where rounding cannot blur the comparison.

# %%
heads, nope, rope, v_dim, latent, length = 4, 128, 64, 128, 512, 200
draw = torch.Generator().manual_seed(1)


def normal(*shape):
    """Draw a float64 tensor."""
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


q_nope, q_rope = normal(1, heads, nope), normal(1, heads, rope)
c_kv, k_rope = normal(length, latent), normal(length, rope)
w_uk, w_uv = normal(heads, nope, latent) / latent**0.5, normal(heads, v_dim, latent) / latent**0.5
softmax_scale = (nope + rope) ** -0.5

naive = naive_attention(q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, softmax_scale)
absorbed = absorbed_attention(q_nope, q_rope, c_kv, k_rope, w_uk, w_uv, softmax_scale)
difference = float((naive.out - absorbed.out).abs().max())
print(f"largest difference between the two forms in float64: {difference:.1e}")
assert difference < 1e-13

# %% [markdown]
# Note `softmax_scale`: it is (128 + 64)^-0.5, the width of the *naive* key. Absorbing makes the
# query 576 wide and must not change the scale. (With YaRN the scale has a further factor,
# `ModelConfig.softmax_scale`.) What happens if one takes 576:

# %%
q_latent = absorb_query(q_nope, w_uk)
right = latent_attention(q_latent, q_rope, c_kv, k_rope, softmax_scale)
wrong = latent_attention(q_latent, q_rope, c_kv, k_rope, (latent + rope) ** -0.5)
error = float((wrong.out - right.out).norm() / right.out.norm())
print(f"relative error of the output with the wrong scale: {error:.0%}")
assert error > 0.1

# %% [markdown]
# ## Change one thing: pages
#
# A cache that grows token by token cannot be one tensor a request. It is a pool of pages, and a
# block table says which page holds which tokens. Three requests of 200, 0 and 70 tokens, pages of
# 64 tokens, in no order:

# %%
lengths = [200, 0, 70]
page_size, num_pages = 64, 8
block_table = torch.tensor([[5, 2, 7, 0], [-1, -1, -1, -1], [3, 6, -1, -1]], dtype=torch.int32)
figures.block_table(
    block_table.tolist(),
    num_pages,
    "Block tables of three requests, and the pool: pages 5, 2, 7, 0 and 3, 6 are in use",
)

# %%
pool = allocate_pages(num_pages, page_size, latent, rope, dtype=torch.float64)
for plane in pool:
    plane.fill_(float("nan"))  # a slot means nothing until it is written

for row, count in zip(block_table, lengths, strict=True):
    token = torch.arange(count)
    slots = row.long()[token // page_size] * page_size + token % page_size
    write_rows(pool, LatentRows(c_kv[:count], k_rope[:count]), slots)

queries = q_latent.expand(3, 1, heads, latent), q_rope.expand(3, 1, heads, rope)


def attend(cache, table, block_tokens=512):
    """Paged attention for the three requests."""
    return paged_latent_attention(
        *queries,
        lambda positions: gather_rows(cache, table, positions),
        lengths,
        softmax_scale,
        block_tokens=block_tokens,
    )


paged = attend(pool, block_table)
print("output norms:", [round(float(row.norm()), 3) for row in paged.out])
print("lse:", [round(float(row.max()), 3) for row in paged.lse])

# %% [markdown]
# ## Test
#
# The unwritten slots, about half of the pool, hold NaN. None of it may matter: a hidden token has
# probability 0, but 0 x NaN is NaN, so values are masked as well as scores. And an empty request
# has an answer: output 0, lse -inf.

# %%
assert torch.equal(paged.out[1], torch.zeros_like(paged.out[1]))
assert torch.equal(paged.lse[1], torch.full_like(paged.lse[1], -torch.inf))
torch.testing.assert_close(paged.out[0], right.out, rtol=1e-12, atol=1e-12)

order = torch.randperm(num_pages, generator=draw)  # move every page somewhere else
moved = Bf16LatentPages(*(torch.empty_like(plane) for plane in pool))
for plane, target in zip(pool, moved, strict=True):
    target[order] = plane
moved_table = torch.where(block_table >= 0, order[block_table.clamp(min=0)].int(), -1)
assert torch.equal(attend(moved, moved_table).out, paged.out)
print("the same bits wherever the pages lie")

# %% [markdown]
# ## The online softmax
#
# Attention walks the tokens in blocks and carries, per row, a maximum, a sum and an unfinished
# output. A block with a larger maximum shrinks what was there before. The block size is a choice:
# only rounding depends on it. In float64 that is nothing; in float32 it can be seen.

# %%
exact = attend(pool, block_table, block_tokens=200).out
print("block   float64     float32")
for block_tokens in (1, 16, 64, 512):
    double = attend(pool, block_table, block_tokens).out
    single = paged_latent_attention(
        *(query.float() for query in queries),
        lambda positions: LatentRows(
            *(part.float() for part in gather_rows(pool, block_table, positions))
        ),
        lengths,
        softmax_scale,
        block_tokens=block_tokens,
    ).out
    errors = [float((out.double() - exact).norm() / exact.norm()) for out in (double, single)]
    print(f"{block_tokens:>5}   {errors[0]:.1e}     {errors[1]:.1e}")
    assert errors[0] < 1e-14 and errors[1] < 1e-5

# %% [markdown]
# Read the numbers: 64 tokens a block costs no accuracy that anyone could use, and the state is
# 512 + 2 numbers a row whatever the length. Stage 2 puts a further scale into that state; stage 3
# runs the loop inside one kernel.
#
# ## Alone and in a batch
#
# A request's tokens must not depend on who else is served. Stage 0 keeps the shapes of all products
# over a request's rows the same, alone and in a batch, so that this holds bit for bit
# (`test_generation.py`). Here it is enough to see the tokens.

# %%
prompts = ["import os\n", "def add(a, b):\n", "for i in range(10):\n"]
params = SamplingParams(max_new_tokens=12)
together = generator.generate([tokenizer.encode(text) for text in prompts], [params] * 3)
for text, completion in zip(prompts, together, strict=True):
    (alone,) = generator.generate([tokenizer.encode(text)], [params])
    assert alone.token_ids == completion.token_ids
    print(repr(text), "->", repr(tokenizer.decode(completion.token_ids)))

# %% [markdown]
# ## Measured
#
# At DeepSeek-V2-Lite's geometry (27 layers, 16 heads; one NVIDIA H200, 2026-11-30, torch
# 2.11.0+cu130; `stage0_reference/results/h200_decode_v2_lite_stage0.json`) a step for 32 requests
# takes 80 ms at context 1,024 and 258 ms at 8,192, and in the longer one attention over the cache
# is 80 percent of a step. Chapter 0's floor for it, 27 layers of 32 requests of 8,192 tokens, is
# about 2 ms. The difference is what the remaining stages are about.

# %%
floor_ms = 27 * 32 * 8192 * 1152 / 4.27e12 * 1e3
print(f"reading the BF16 cache once: {floor_ms:.1f} ms of the 258 ms")
assert 1.8 < floor_ms < 2.0

# %% [markdown]
# Exercises: `docs/exercises/stage0.py`; `python -m docs.exercises.check stage0` checks an answer.
# Tests: `pytest -m stage0`.
