# %% [markdown]
# # 0. The problem in numbers
#
# To produce one token, a decoder reads what it has cached of every token before it, in every layer.
# This chapter counts what that costs: bytes and operations per cached token, for three ways to
# cache attention. The counts say why MLA keeps a latent, and why FP8 has to reach the arithmetic as
# well as the cache.
#
# Everything here runs on a CPU in seconds. The two numbers that need a GPU were measured on one
# NVIDIA H200 on 2026-11-30 and are given as such.

# %%
import figures
import torch
from torch.utils.flop_counter import FlopCounterMode

from stage0_reference import absorbed_attention, naive_attention
from stage3_dataflow.bench_cases import count_work, equal_shape

# %% [markdown]
# ## Bytes
#
# One layer with DeepSeek-V3's widths: 128 heads, keys of 128 + 64 elements, values of 128, a latent
# of 512 and one rotary key of 64. Plain multi-head attention caches a key and a value a head. MLA
# caches the latent, from which both can be made again, and the rotary key that all heads share.

# %%
heads, nope, rope, v_dim, latent = 128, 128, 64, 128, 512

cached_bytes = {
    "multi-head, BF16": heads * (nope + rope + v_dim) * 2,
    "latent, BF16": (latent + rope) * 2,
    "latent, FP8": latent * 1 + 4 + rope * 2,  # codes, one float32 scale, rope in BF16
}
for name, size in cached_bytes.items():
    ratio = cached_bytes["multi-head, BF16"] / size
    print(f"{name:<18}{size:>8,} bytes a token and layer   {ratio:>5.0f} times less")

assert cached_bytes == {"multi-head, BF16": 81920, "latent, BF16": 1152, "latent, FP8": 644}

# %%
figures.byte_layout(
    {
        "BF16 latent cache": [("c_kv", 1024), ("k_rope", 128)],
        "FP8 latent cache": [("codes", 512), ("scale", 4), ("rope", 128)],
    },
    "A token's row in both caches: 1024 and 128 bytes against 512, 4 and 128",
)

# %% [markdown]
# Over 61 layers and a context of 131,072 tokens that is one request's memory:

# %%
layers, context = 61, 131_072
gigabytes = {name: size * layers * context / 1e9 for name, size in cached_bytes.items()}
for name, size in gigabytes.items():
    print(f"{name:<18}{size:>8.1f} GB")

assert 650 < gigabytes["multi-head, BF16"] < 660
assert gigabytes["latent, FP8"] < 5.2

# %%
lengths = [2**power for power in range(10, 18)]
figures.lines(
    {
        name: (lengths, [size * layers * length / 1e9 for length in lengths])
        for name, size in cached_bytes.items()
    },
    "Cache of one request in gigabytes by context, for the three forms; all grow linearly",
    xlabel="context, tokens",
    ylabel="GB for one request, 61 layers",
    log="xy",
)

# %% [markdown]
# The latent cache exists because of the first line. A multi-head cache of this model fills more
# than four H200 (141 GB each) for one long request. The FP8 cache is 44 percent smaller again.
#
# ## Operations
#
# The same attention can be computed in two forms (chapter 10 has the algebra). *Naive* expands
# every cached latent into keys and values, per head. *Absorbed* moves the two matrices to the
# query's side and reads latents only. A multiply-add counts as two operations.

# %%
naive = 2 * heads * (latent * (nope + v_dim) + nope + rope + v_dim)  # a cached token
absorbed = 2 * heads * (latent + rope + latent)
once = 2 * heads * latent * (nope + v_dim)  # absorbed: both matrices, once a query, not a token

print(f"naive     {naive:>12,} operations a cached token")
print(f"absorbed  {absorbed:>12,} operations a cached token, and {once:,} once")
assert naive / absorbed > 100

# %% [markdown]
# A formula that nobody runs is a guess. torch can count the products that a function really does;
# here with two heads, so that it takes no time.

# %%
torch.manual_seed(0)
few, length = 2, 256
query = torch.randn(1, few, nope), torch.randn(1, few, rope)
rows = torch.randn(length, latent), torch.randn(length, rope)
matrices = torch.randn(few, nope, latent) / 20, torch.randn(few, v_dim, latent) / 20


def counted(attention):
    """Operations of one call, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = attention(*query, *rows, *matrices, 192**-0.5)
    return counter.get_total_flops(), result


naive_count, naive_result = counted(naive_attention)
absorbed_count, absorbed_result = counted(absorbed_attention)
print(f"naive {naive_count:,}, absorbed {absorbed_count:,}, for {few} heads and {length} tokens")

assert naive_count == naive * few // heads * length
assert absorbed_count == (absorbed * length + once) * few // heads
torch.testing.assert_close(naive_result.out, absorbed_result.out, rtol=1e-4, atol=1e-4)

# %% [markdown]
# The counts are the formulas, and both forms give the same output. Naive does 121 times the work a
# cached token at 128 heads. It pays in prefill, where many queries share one expansion. In decoding
# it does not.
#
# ## What the machine allows
#
# Two rates bound any kernel: how fast bytes come from memory, and how fast tensor cores multiply.
# Measured on one NVIDIA H200 on 2026-11-30 (torch 2.11.0+cu130): 4.27 TB/s for a device-to-device
# copy; 716 TFLOP/s for a BF16 product of 8192 x 8192 matrices, 1300 for FP8.

# %%
COPY_RATE = 4.27e12
BF16_RATE, FP8_RATE = 716e12, 1300e12


def floor_microseconds(num_heads, cache, batch=128, length=8192):
    """Least time for bytes, and for operations, of one decode step in one layer."""
    work = count_work("decode", equal_shape(batch, num_heads, length), cache)
    wide = work.flops["scores, rope"]  # stays in BF16 either way
    rest = work.total_flops - wide
    rate = FP8_RATE if cache == "fp8" else BF16_RATE
    moving = work.total_bytes / COPY_RATE
    multiplying = rest / rate + wide / BF16_RATE
    return moving * 1e6, multiplying * 1e6, work.total_flops / work.total_bytes


print("128 requests of 8,192 tokens, one layer")
print("heads  cache   bytes us  products us  bound     operations a byte")
floors = {}
for num_heads in (16, 32, 64, 128):
    for cache in ("bf16", "fp8"):
        moving, multiplying, intensity = floor_microseconds(num_heads, cache)
        floors[num_heads, cache] = max(moving, multiplying)
        bound = "memory" if moving > multiplying else "products"
        print(
            f"{num_heads:>5}  {cache:<6}{moving:>9.0f}{multiplying:>13.0f}  {bound:<9}"
            f"{intensity:>6.0f}"
        )

# %% [markdown]
# Read it aloud. With 16 heads (a model cut over eight GPUs) the step waits for memory, and a cache
# 44 percent smaller is 44 percent less waiting. With 128 heads on one GPU there are 235 operations
# for every byte of a BF16 cache: the products are the limit, and a smaller cache alone would gain
# *nothing*. There the products themselves must run on FP8 operands. Hence two techniques and not
# one: the cache (stage 1) for few heads, the arithmetic (stage 2) for many.

# %%
few_heads = floors[16, "bf16"] / floors[16, "fp8"]
many_heads = floors[128, "bf16"] / floors[128, "fp8"]
print(f"FP8 may gain a factor {few_heads:.2f} at 16 heads and {many_heads:.2f} at 128 heads")

moving_fp8, _, _ = floor_microseconds(128, "fp8")
_, multiplying_bf16, _ = floor_microseconds(128, "bf16")
assert multiplying_bf16 > moving_fp8  # an FP8 cache under BF16 products: no faster than BF16
assert 1.7 < few_heads < 1.8 and 1.7 < many_heads < 1.8

# %% [markdown]
# What is left for the rest of the course:
#
# | chapter | question |
# |---|---|
# | 10, stage 0 | what exactly is the attention that must not change? |
# | 20, stage 1 | how does a latent fit into 8 bits, and what must not be put there? |
# | 30, stage 2 | how does the value's scale get past the sum over tokens? |
# | 40, stage 3 | how does all of it become a few launches? |
# | 50 | how near do the kernels come to the floors above? |
# | 60 | what can be promised about the result, and which test says so? |
# | 70 | how does someone else's loop call it? |
