# %% [markdown]
# # 70. The library in your own loop
#
# Stage 3 is a library. This chapter calls it from the outside, as code does that has a model, a
# scheduler and a cache of its own: one layer by hand first, then under FlashMLA's names, then the
# engine that does all of it. On a CPU the calls run their PyTorch twins; on a GPU the same lines
# launch kernels.

# %%
import figures
import torch

from stage0_reference import SamplingParams, load_model
from stage0_reference.attention_backend import cache_bytes_per_token
from stage0_reference.latent_attention import latent_attention
from stage3_dataflow import (
    DecodeWorkspace,
    allocate_latent_pages,
    append_kv,
    mla_decode,
    which_kernel,
    which_path,
)
from stage3_dataflow.engine import Engine, plan_cache
from stage3_dataflow.flash_mla import (
    flash_mla_ckv_fp8_per_token,
    quantize_and_cache_k,
    quantize_ckv_per_token_head,
)
from stage3_dataflow.fused_writes import quantize_q
from stage3_dataflow.triton_backend import FusedBackend

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(which_path(device))

# %% [markdown]
# ## What the library needs from you
#
# | you keep | the library wants |
# |---|---|
# | which pages are free | `block_table`, int32 [batch, max_pages]; behind the end anything |
# | how long each request is | `cache_seqlens`, int32 [batch], on the device; 0 is allowed |
# | where a new token goes | `slot_mapping`, `page * page_size + offset`; negative writes nothing |
# | the absorbed weights | `q_latent` = q_nope W_UK, and W_UV behind the result |
# | the softmax scale | (qk_nope_head_dim + qk_rope_head_dim)^-0.5, and YaRN's correction |
#
# ## One layer by hand
#
# Two requests decode ten steps each over one pool. Pages are taken when a request needs them. The
# exact answer is computed beside it from the unquantised history.

# %%
heads, latent, rope, page_size = 16, 512, 64, 64
softmax_scale = (128 + rope) ** -0.5
cache = allocate_latent_pages(8, page_size, latent, rope, device=device)
free_pages = [5, 2, 7, 0, 3]
tables = [[free_pages.pop()], [free_pages.pop()]]
lengths = [0, 0]
history = [[], []]
workspace = DecodeWorkspace(device)  # one for each stream


def append(request, c_kv, k_rope):
    """Write one token of a request, with a page more if the last one is full."""
    if lengths[request] == len(tables[request]) * page_size:
        tables[request].append(free_pages.pop())
    page = tables[request][lengths[request] // page_size]
    slot = torch.tensor([page * page_size + lengths[request] % page_size], device=device)
    append_kv(c_kv, k_rope, cache, slot)
    lengths[request] += 1
    history[request].append((c_kv, k_rope))


def attend(q_latent, q_rope):
    """Decode both requests at once."""
    width = max(map(len, tables))
    block_table = torch.tensor(
        [row + [-1] * (width - len(row)) for row in tables], dtype=torch.int32, device=device
    )
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return mla_decode(
        q_latent, q_rope, cache, block_table, cache_seqlens, softmax_scale, workspace=workspace
    )


for request, prompt in enumerate((60, 3)):
    for _ in range(prompt):
        append(request, torch.randn(1, latent, device=device), torch.randn(1, rope, device=device))

errors = []
for _ in range(10):
    for request in (0, 1):
        append(request, torch.randn(1, latent, device=device), torch.randn(1, rope, device=device))
    q_latent = torch.randn(2, 1, heads, latent, device=device) / 4
    q_rope = torch.randn(2, 1, heads, rope, device=device) / 4
    out, lse = attend(q_latent, q_rope)
    for request in (0, 1):
        rows = [torch.cat(part) for part in zip(*history[request], strict=True)]
        exact = latent_attention(q_latent[request], q_rope[request], *rows, softmax_scale).out
        errors.append(float((out[request] - exact).norm() / exact.norm()))
print(f"lengths {lengths}, tables {tables}")
print(f"relative error against exact attention: {min(errors):.1%} to {max(errors):.1%}")
assert len(tables[0]) == 2 and max(errors) < 0.1

# %% [markdown]
# The first request crossed a page boundary on the way. The error is the format's (chapter 60).
# `which_kernel` says which decode kernel serves such a call, and why.

# %%
query = quantize_q(q_latent, q_rope)
table = torch.tensor([[0]] * 2, dtype=torch.int32, device=device)
print(which_kernel(query, cache, table, out, lse))

# %% [markdown]
# ## What is refused
#
# Mistakes are found before any launch, and the message has the argument, what was expected, what
# came, and the remedy.

# %%
try:
    mla_decode(q_latent, q_rope, cache, table.long(), table[:, 0], softmax_scale)
except TypeError as error:
    print(error)
    assert "block_table" in str(error) and "int32" in str(error)
else:
    raise AssertionError("int64 tables are refused")

# %% [markdown]
# ## A loop that calls FlashMLA
#
# Code that calls FlashMLA, or its branch for per-token FP8 caches, changes an import:
# `from stage3_dataflow.flash_mla import ...`. Argument names, order and shapes are theirs, and so
# is the default softmax scale, 576^-0.5, which no MLA model wants: pass yours.

# %%
flat = [torch.zeros(64, 1, width, dtype=dtype, device=device) for width, dtype in (
    (latent, torch.float8_e4m3fn), (1, torch.float32), (rope, torch.bfloat16),
)]  # fmt: skip
keys = torch.randn(9, 1, latent + rope, device=device).bfloat16()
slots = torch.randperm(64, device=device)[:9]
quantize_and_cache_k(keys, *flat, slots, latent)

queries = torch.randn(1, 1, heads, latent + rope, device=device).bfloat16()
q_codes, q_scale, q_rotary = quantize_ckv_per_token_head(queries, latent)
their_out, their_lse = flash_mla_ckv_fp8_per_token(
    q_codes, q_rotary, flat[0], flat[2], q_scale, flat[1],
    slots.int()[None], torch.tensor([9], dtype=torch.int32, device=device), latent,
    softmax_scale=softmax_scale,
)  # fmt: skip
exact = latent_attention(
    queries[0, ..., :latent].float(), queries[0, ..., latent:].float(),
    keys[:, 0, :latent].float(), keys[:, 0, latent:].float(), softmax_scale,
).out  # fmt: skip
error = float((their_out[0].float() - exact).norm() / exact.norm())
print(f"a flat pool has pages of one token; error {error:.1%}, lse {list(their_lse.shape)}")
assert error < 0.1 and their_lse.shape == (1, heads, 1)

# %% [markdown]
# ## The engine
#
# Whoever has no scheduler takes this one: requests come and go, prompts are computed in chunks,
# prefixes are found again, and each request's tokens are those it would get alone. First, how many
# pages does a budget of memory hold once the workspace is set aside?

# %%
decoder, tokenizer = load_model(device=device)
backend = FusedBackend()
plan = plan_cache(decoder.config, backend, 128 * 2**20, max_context=1024)
print(f"{plan.num_pages} pages of {plan.page_bytes:,} bytes, {plan.workspace_bytes:,} bytes aside")
assert plan.num_pages * plan.page_bytes + plan.workspace_bytes <= 128 * 2**20

engine = Engine(
    decoder, backend, num_pages=min(plan.num_pages, 64), max_running=3, max_context=1024
)
print(engine.describe())
per_layer = cache_bytes_per_token(engine.cache) // decoder.config.num_hidden_layers
assert per_layer == 644

# %%
prompts = ["class Stack:\n", "def read(path):\n", "import os\n", "class Stack:\n"]
params = SamplingParams(max_new_tokens=12)
requests = [engine.submit(tokenizer.encode(text), params) for text in prompts]
pages_in_use = []
while not engine.idle:
    engine.step()
    stats = engine.stats
    pages_in_use.append(64 - stats.free_pages)
for text, request in zip(prompts, requests, strict=True):
    print(repr(text), "->", repr(tokenizer.decode(request.token_ids)), request.finish_reason)

assert all(len(request.token_ids) == 12 for request in requests)
assert requests[0].token_ids == requests[3].token_ids
assert engine.stats.running == 0 and pages_in_use[-1] == 0

# %%
alone = Engine(decoder, backend, num_pages=64, max_running=3, max_context=1024)
request = alone.submit(tokenizer.encode(prompts[1]), params)
alone.run()
assert request.token_ids == requests[1].token_ids
print("alone and among others: the same tokens")

figures.lines(
    {"pages held": (list(range(1, len(pages_in_use) + 1)), pages_in_use)},
    "Pages held over the engine's steps: they rise as requests are admitted and fall to 0",
    xlabel="step",
    ylabel="pages of 64 tokens",
)

# %% [markdown]
# Streaming (`engine.stream`), cancelling (`engine.cancel`), callbacks and sampling are in
# `stage3_dataflow/engine.py`; what happens when a request fails is in its first lines. On a GPU the
# decode step is one CUDA graph, and `engine.describe()` says so or why not.
#
# For `torch.compile` and `torch.export`, `stage3_dataflow/custom_ops.py` registers the operators;
# eager calls do not pass through them.
