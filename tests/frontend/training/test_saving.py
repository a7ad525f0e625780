"""What a forward saves for its backward: the choice on joint graphs, and the tensors that autograd then holds."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilefold.errors import TilefoldError
from tilefold.frontend.capture.decompose import decompositions, rewrite_attention
from tilefold.frontend.capture.options import read_options
from tilefold.frontend.training.prices import Prices, state_of, widens
from tilefold.frontend.training.saving import partitioner

B, H, S, D = 2, 3, 48, 8


def passes(fn, *args, budget=None, kind="folds", dynamic=False):
    """Forward and backward graphs, run op by op: (results, gradients of what needs them, the graphs by name)."""
    graphs: dict[str, torch.fx.GraphModule] = {}

    def compiler(name):
        def run(gm, _):
            graphs[name] = gm
            return make_boxed_func(gm.forward)

        return run

    def backend(gm, examples):
        rewrite_attention(gm)
        return aot_module_simplified(
            gm,
            examples,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            decompositions=dict(decompositions()),
            partition_fn=partitioner(kind, budget),
        )

    torch._dynamo.reset()
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    made = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*leaves)
    made.backward(torch.randn(made.shape, generator=torch.Generator().manual_seed(3)).to(made.dtype))
    return made.detach(), [a.grad for a in leaves if a.requires_grad], graphs


def saved(graphs):
    """Shapes and types of what the backward is given, but for gradients of results."""
    nodes = graphs["backward"].graph.find_nodes(op="placeholder")
    values = [n.meta["val"] for n in nodes if "tangents" not in n.name]
    return [(tuple(v.shape), v.dtype) for v in values if isinstance(v, torch.Tensor)]


def qkv(dtype=torch.float32, s=S):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, s, D, generator=gen).to(dtype) for _ in range(3)]


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v):
    i = torch.arange(q.shape[2])
    s = torch.where(i <= i[:, None], q @ k.mT * D**-0.5, -torch.inf)
    return torch.softmax(s, -1) @ v


def grouped(q, k, v):
    """Heads that share keys, by einsum: rows of several axes in one product, and axes of one index between."""
    q, k, v = q.unflatten(1, (1, H)), k[:, :1], v[:, :1]
    i = torch.arange(q.shape[3])
    s = torch.einsum("bkgld,bkmd->bkglm", q, k).float() * D**-0.5
    p = s.masked_fill(i > i[:, None], -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("bkglm,bkmd->bkgld", p, v).flatten(1, 2)


def sigmoid(q, k, v):
    return torch.sigmoid(q @ k.mT - 3) @ v


def right(fn, args, gradients):
    """Gradients against float64, with at most twice eager's error (or that of a last bit)."""
    exact, plain = [], []
    for found, cast in ((exact, torch.Tensor.double), (plain, lambda a: a)):
        leaves = [cast(a).detach().clone().requires_grad_() if a.is_floating_point() else a for a in args]
        made = fn(*leaves)
        made.backward(torch.randn(made.shape, generator=torch.Generator().manual_seed(3)).to(made.dtype))
        found += [a.grad for a in leaves if a.requires_grad]
    for g, e, p in zip(gradients, exact, plain, strict=True):
        allowed = 2 * (p.double() - e).abs().max() + 8 * torch.finfo(g.dtype).eps * e.abs().max()
        assert (g.double() - e).abs().max() <= allowed


@pytest.mark.parametrize("fn", [causal, by_hand, grouped, sigmoid])
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_saves_nothing_of_queries_times_keys(fn, dynamic):
    args = qkv()
    _, gradients, graphs = passes(fn, *args, dynamic=dynamic)
    assert max(torch.Size(shape).numel() for shape, _ in saved(graphs)) <= B * H * S * D
    right(fn, args, gradients)


def test_attention_of_narrow_types_saves_no_wide_copies():
    _, _, graphs = passes(causal, *qkv(torch.bfloat16))
    assert all(dtype is torch.bfloat16 or shape[-1] == 1 for shape, dtype in saved(graphs))
    assert len(saved(graphs)) == 5  # q, k, v, the result, a number a row


def joint(q, k, v, a, b):
    """The rows of two streams attend together, and have a projection each."""
    o = causal(q, k, v).transpose(1, 2).flatten(2)
    return torch.cat((o[:, :20] @ a, o[:, 20:] @ b), 1)


def test_attention_of_which_parts_of_the_rows_are_stored_saves_no_wide_copy():
    """Nothing stores the whole result: what is summed in the backward is the one that both projections read."""
    gen = torch.Generator().manual_seed(1)
    weights = [torch.randn(H * D, 16, generator=gen).bfloat16() for _ in range(2)]
    args = (*qkv(torch.bfloat16), *weights)
    _, gradients, graphs = passes(joint, *args)
    assert all(dtype is torch.bfloat16 or shape[-1] == 1 for shape, dtype in saved(graphs))
    right(joint, args, gradients)


def test_a_residual_is_saved_as_it_is_and_not_as_its_terms():
    """The forward writes it for the next layer; its terms would each be held and read again."""

    def layers(x, a, b, c, w):
        for u in (a, b, c):
            x = x + F.layer_norm(x, (64,), w) @ u
        return F.layer_norm(x, (64,), w)

    gen = torch.Generator().manual_seed(1)
    args = [torch.randn(*s, generator=gen) for s in ((256, 64), (64, 64), (64, 64), (64, 64), (64,))]
    _, gradients, graphs = passes(layers, *args)
    terms = [
        n
        for n in graphs["backward"].graph.nodes
        if n.target is torch.ops.aten.add.Tensor and n.meta["val"].shape == (256, 64)
    ]
    assert not any(all(a.op == "placeholder" and "mm" in a.name for a in n.all_input_nodes[1:]) for n in terms)
    wide = [shape for shape, _ in saved(graphs) if shape == (256, 64)]
    assert len(wide) <= 7  # x of four norms, their results that are multiplied
    right(layers, args, gradients)


def test_torchs_own_cut_saves_the_probabilities():
    """What the test above would not see otherwise."""
    _, _, graphs = passes(causal, *qkv(), kind="min_cut")
    assert max(torch.Size(shape).numel() for shape, _ in saved(graphs)) == B * H * S * S


@pytest.mark.parametrize("fn", [causal, grouped])
def test_the_state_of_a_softmax_is_a_number_a_row_and_the_sum_of_its_gradient_is_the_results(fn):
    _, _, graphs = passes(fn, *qkv())
    rows = [shape for shape, _ in saved(graphs) if shape[-1] == 1 and torch.Size(shape).numel() == B * H * S]
    assert len(rows) == 1
    products = [n for n in graphs["backward"].graph.nodes if n.target is torch.ops.aten.bmm.default]
    sums = [n for n in graphs["backward"].graph.nodes if n.target is torch.ops.aten.sum.dim_IntList]
    assert len(products) == 5 and len(sums) == 1
    assert sums[0].args[0].meta["val"].shape[-1] == D  # over features, not over keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_saves_its_arguments_as_they_are_and_states_without_guards(dtype):
    """Scores are of float32 copies, and rows without a key have a log-sum-exp that counts as others."""
    args = qkv(dtype)
    _, gradients, graphs = passes(causal, *args)
    assert sorted(map(str, saved(graphs))) == sorted(
        map(str, [((B, H, S, D), dtype)] * 4 + [((B, H, S, 1), torch.float32)])
    )
    targets = {n.target for n in graphs["forward"].graph.output_node().args[0] if hasattr(n, "target")}
    assert torch.ops.aten.add.Tensor in targets
    assert not {torch.ops.aten.amax.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.where.self} & targets
    right(causal, args, gradients)


def test_what_is_made_again_from_what_it_is_of():
    """Wider copies, in whatever order, and maps of one state are; narrower copies and maps of two values are not.

    Heads that are expanded, or lie apart, are copied for `matmul`: saved in float32, their products had to be of that,
    160 us of an attention's 427 on an H100."""

    def fn(x, w):
        top = x.amax(-1, keepdim=True)
        return (
            x.half(),
            w.float(),
            torch.where(top == -torch.inf, 0.0, top),
            torch.where(top == -torch.inf, x[..., :1], top),
            w.float().t().clone(memory_format=torch.contiguous_format),
            w.t().clone(memory_format=torch.contiguous_format),
        )

    graph = make_fx(fn, tracing_mode="fake")(torch.randn(4, 8), torch.randn(4, 8).half()).graph
    narrow, wide, guard, other, turned, copied = graph.output_node().args[0]
    assert widens(wide) and widens(turned) and not widens(narrow) and not widens(copied)
    assert state_of(guard).target is torch.ops.aten.amax.default and state_of(other) is None
    prices = Prices(frozenset(), frozenset(), frozenset(), frozenset())
    assert prices.keep(wide) is None and prices.keep(turned) is None and prices.keep(guard) is None
    assert prices.keep(narrow) and prices.keep(other)


def test_a_short_attention_keeps_its_sum_over_keys():
    """The result is no smaller than the probabilities: nothing is gained by reading it."""
    args = qkv(s=8)
    _, gradients, graphs = passes(causal, *args)
    sums = [n for n in graphs["backward"].graph.nodes if n.target is torch.ops.aten.sum.dim_IntList]
    assert sums[0].args[0].meta["val"].shape[-1] == 8 and not any(
        n.args[0].meta["val"].shape[-1] == D and n.args[1] == [-1] and n.args[0].meta["val"].dim() == 3 for n in sums
    )
    right(causal, args, gradients)


def test_logits_are_saved_once_and_their_probabilities_never():
    def loss(x, w, y):
        return F.cross_entropy((x @ w).float(), y, label_smoothing=0.1)

    gen = torch.Generator().manual_seed(1)
    x, w = (torch.randn(*s, generator=gen).bfloat16() for s in ((64, 512), (512, 1000)))
    y = torch.randint(1000, (64,), generator=gen)
    _, _, graphs = passes(loss, x, w, y)
    wide = [(shape, dtype) for shape, dtype in saved(graphs) if torch.Size(shape).numel() >= 64 * 1000]
    assert (64, 1000) in [shape for shape, _ in wide]
    assert all(dtype is torch.bfloat16 for _, dtype in wide)


def test_norms_save_their_statistics_and_no_wide_copy():
    def norm(x, w, b, u):
        return F.layer_norm(x, (64,), w, b) @ u

    gen = torch.Generator().manual_seed(1)
    args = [torch.randn(*s, generator=gen).bfloat16() for s in ((32, 64), (64,), (64,), (64, 16))]
    _, gradients, graphs = passes(norm, *args)
    assert [s for s, _ in saved(graphs)].count((32, 1)) == 2
    assert all(t is torch.bfloat16 for _, t in saved(graphs))
    right(norm, args, gradients)


def test_a_budget_moves_from_the_fastest_choice_to_the_inputs():
    def mlp(x, a, b):
        return torch.tanh(torch.tanh(x @ a) @ b).sum(-1)

    gen = torch.Generator().manual_seed(1)
    args = [torch.randn(*s, generator=gen) for s in ((64, 512), (512, 512), (512, 512))]
    held = []
    for budget in (1.0, 0.5, 0.0):
        _, gradients, graphs = passes(mlp, *args, budget=budget)
        held.append(sum(torch.Size(s).numel() for s, _ in saved(graphs)))
        right(mlp, args, gradients)
    assert held[0] > held[1] > held[2]


def test_random_masks_are_saved_and_not_drawn_again():
    def fn(x):
        return F.dropout(torch.tanh(x), 0.5, training=True)

    made, (gradient,), _ = passes(fn, torch.ones(64, 64))
    assert torch.equal(gradient != 0, made != 0)
    assert 0.4 < (made != 0).float().mean() < 0.6


def test_checkpointed_parts_are_computed_again():
    def inner(x, a, b):
        return torch.tanh(torch.tanh(x @ a) @ b)

    def plain(x, a, b):
        return inner(inner(x, a, b), a, b).sum(-1)

    def with_checkpoints(x, a, b):
        y = checkpoint(inner, x, a, b, use_reentrant=False)
        return checkpoint(inner, y, a, b, use_reentrant=False).sum(-1)

    gen = torch.Generator().manual_seed(1)
    args = [torch.randn(*s, generator=gen) for s in ((64, 64), (64, 64), (64, 64))]
    _, _, all_of_it = passes(plain, *args)
    _, gradients, some = passes(with_checkpoints, *args)
    assert len(saved(some)) < len(saved(all_of_it))
    right(plain, args, gradients)


def attend(q, k, v, p=0.0):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


def fused_calls(graphs):
    return [
        n
        for g in graphs.values()
        for n in g.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and "dot_product" in str(n.target)
    ]


def test_attention_in_checkpoints_is_taken_apart_as_any():
    def twice(q, k, v):
        inside = checkpoint(attend, q, k, v, use_reentrant=False)
        return checkpoint(lambda *x: checkpoint(attend, *x, use_reentrant=False), inside, k, v, use_reentrant=False)

    args = qkv(s=12)
    _, gradients, graphs = passes(twice, *args)
    assert not fused_calls(graphs)
    right(lambda q, k, v: attend(attend(q, k, v), k, v), args, gradients)


def test_checkpointed_attention_draws_the_same_numbers_again():
    q, k, v = qkv(s=12)
    made, gradients, _ = passes(lambda q, k, v: checkpoint(attend, q, k, v, 0.4, use_reentrant=False), q, k, v)
    seed = torch.randn(made.shape, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close((gradients[2] * v).sum(), (made * seed).sum(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(made, attend(q, k, v))


def test_attention_that_a_checkpoint_s_user_names_stays_an_operator():
    def saves(_, op, *args, **kwargs):
        attention = "dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE

    def named(q, k, v):
        contexts = functools.partial(create_selective_checkpoint_contexts, saves)
        return checkpoint(attend, q, k, v, use_reentrant=False, context_fn=contexts)

    args = qkv(s=12)
    _, gradients, graphs = passes(named, *args)
    assert len(fused_calls(graphs)) == 2
    right(attend, args, gradients)


def test_arguments_changed_in_place():
    def fn(x, count):
        y = torch.exp(x)
        count.add_(1)
        return (y * count).sum(-1)

    count = torch.tensor(2.0)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch._dynamo.reset()
    torch.compile(fn, backend="tilefold")(x, count).sum().backward()
    assert count == 3
    torch.testing.assert_close(x.grad, 3 * torch.exp(x.detach()))


def test_what_is_computed_of_an_argument_before_it_changes_is_not_computed_again_afterwards():
    def fn(x, count):
        y = torch.exp(x) * (count + 5)
        count.mul_(3)
        return (y * (count * 2)).sum(-1)

    count = torch.tensor(2.0)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch._dynamo.reset()
    torch.compile(fn, backend="tilefold")(x, count).sum().backward()
    assert count == 6
    torch.testing.assert_close(x.grad, 84 * torch.exp(x.detach()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "greedy"}, "unknown partition"),
        ({"activation_memory_budget": 2}, "activation_memory_budget is 2"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(TilefoldError, match=message):
        read_options(None, options)


def test_options_say_who_cuts():
    assert read_options(None, {"partition": "min_cut"}).partition == "min_cut"
    assert read_options(None, {"activation_memory_budget": 0.25}).memory_budget == 0.25


def test_a_convolution_of_few_channels_is_not_computed_again():
    """Its result is larger than its operands together, and its windows are short; it is a library's all the same."""

    def step(x, w):
        y = F.conv2d(x, w, padding=1)
        return F.relu(F.batch_norm(y, None, None, training=True)).square()

    gen = torch.Generator().manual_seed(2)
    args = [torch.randn(2, 3, 16, 16, generator=gen), torch.randn(16, 3, 3, 3, generator=gen)]
    _, gradients, graphs = passes(step, *args)
    assert not graphs["backward"].graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert ((2, 16, 16, 16), torch.float32) in saved(graphs)
    right(step, args, gradients)


def test_places_of_maxima_are_saved_and_their_windows_not_read_again():
    """Of pooled channels nothing but the places: the backward neither computes the map nor the maxima again."""

    def pooled(x, w):
        return F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 3, 2, 1)

    _, _, graphs = passes(pooled, torch.randn(2, 3, 12, 12), torch.randn(4, 3, 3, 3))
    assert ((2, 4, 6, 6), torch.int16) in saved(graphs)
    assert not any("max_pool2d_with_indices.default" in str(n.target) for n in graphs["backward"].graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compared_for_equality_is_rounded_alike(dtype):
    """A maximum that waits for the backward is rounded: of what is computed again in float32, nothing would be it."""

    def loudest(x, w, b):
        return (F.gelu(x @ w + b) * 1.7).amax(1)

    gen = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=gen).to(dtype).requires_grad_() for s in ((3, 300, 4), (4, 64), (64,))]
    found = torch.compile(loudest, backend="tilefold")(*args)
    found.backward(torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).to(dtype))
    right(loudest, [a.detach() for a in args], [a.grad for a in args])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compared_for_equality_is_not_multiplied_again(dtype):
    """Another order of the sums would leave no element that is the maximum, and divide by their number."""

    def farthest(x, w, b):
        return (F.relu(x) @ w + b).amax(1)

    gen = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=gen).to(dtype) for s in ((3, 300, 4), (4, 64), (64,))]
    _, gradients, graphs = passes(farthest, *args)
    assert (3, 300, 64) in [shape for shape, _ in saved(graphs)]
    right(farthest, args, gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_what_is_compared_in_16_bits_is_read_as_it_was_stored(dtype, wide):
    """A map with all its digits is none of the maxima that were rounded: the gradient was divided by their number."""

    def largest(x, y):
        z = torch.exp(x * y)
        return (z.float() if wide else z).reshape(8, 200).amax(1)

    gen = torch.Generator().manual_seed(0)
    args = [torch.rand(8, 10, 20, generator=gen).to(dtype) for _ in range(2)]
    for a in args:
        a[:, 4, 7] = a[:, 4, 7] + 1  # one maximum a row, whatever is rounded
    _, _, graphs = passes(largest, *args)
    assert saved(graphs).count(((8, 10, 20), dtype)) == 3
    torch._dynamo.reset()
    results = []
    for run in (largest, torch.compile(largest, backend="tilefold")):
        leaves = [a.clone().requires_grad_() for a in args]
        run(*leaves).float().sum().backward()
        results.append([a.grad for a in leaves])
    torch.testing.assert_close(results[1], results[0], rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_what_is_compared_may_be_viewed_by_a_size_that_is_not_known():
    def highest(x):
        return (x * 2).unfold(1, 3, 1).amax(2)  # windows by a position of each, of a size that is an argument

    args = [torch.randn(3, 8, generator=torch.Generator().manual_seed(0))]
    _, gradients, _ = passes(highest, *args, dynamic=True)
    right(highest, args, gradients)
