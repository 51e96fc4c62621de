"""backward_fa3 on the host, thread by thread: gradients within the bounds of the contract, and nothing that a GPU must not do."""

from __future__ import annotations

import compare
import numpy as np
import pytest
from backward_cases import IDS, IN_ORDER, IN_ORDER_IDS, RUNS
from case import BF16, F16
from cuflash import problem as problems
from cuflash import reference
from cuflash.backends import cuda, cuda_backward
from emulator import backward, emulate
from test_gradients import differentiate, gradient_parts
from test_kernels_emulated import H200


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if (reason := emulate.why_unusable()) is not None:
        pytest.skip(reason)
    made = emulate.Emulator(tmp_path_factory.mktemp("emulated"))
    yield made
    made.close()


def test_there_are_names_for_all_cases():
    assert len(set(IDS)) == len(RUNS)


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=IDS)
def test_gradients(emulator, case, dtype):
    """The ends of all arrays at forbidden pages, or for every other case the beginnings; one block, or three that share the tiles."""
    check(emulator, case, dtype)


@pytest.mark.parametrize(("case", "dtype"), IN_ORDER, ids=IN_ORDER_IDS)
def test_gradients_in_a_fixed_order(emulator, case, dtype):
    """Each tile of keys comes when it is its turn, and never waits for a later block: the emulator would say so. As blocks run one after
    the other here, it takes a GPU to see that one waits when it must."""
    check(emulator, case, dtype, deterministic=True)


def check(emulator, case, dtype, deterministic=False):
    given = differentiate(case, dtype)
    call, n = given.call, len(case.name)
    options = {**call.options, "dlse": given.dlse, "deterministic": deterministic}
    if case.packed is not None:
        options["varlen"] = (*call.args[3:5], options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None))
    problem = problems.build_backward(given.dout, *call.args[:3], call.out, call.lse, **options)
    assert cuda.decline(problem, "fa3") is None
    chosen = cuda_backward.instance(problem, "fa3", H200)
    found = backward.run(emulator, problem, chosen, H200, "start" if n % 2 else "end", (1, 3)[n % 2])
    found = problems.user_gradients(found, problem, options.get("layout", "BSHD"), np.ndim(call.args[0]))
    want = compare.expect_gradients(given.problems)
    for name in ("dq", "dk", "dv"):
        parts = gradient_parts(name, getattr(found, name), case)
        for part, exact in zip(parts, want.parts[name], strict=True):
            compare.assert_close(part, exact, want.bounds[name], name)


def operands(sizes, dtype, d=64):
    b, sq, sk, h = sizes
    shapes = (b, sq, h, d), (b, sk, h, d), (b, sk, h, d), (b, sq, h, d)
    return [np.random.default_rng(n).standard_normal(s).astype(dtype) for n, s in enumerate(shapes)]


def gradients(emulator, dout, q, k, v, out, lse, blocks=2, **options):
    problem = problems.build_backward(dout, q, k, v, out, lse, **options)
    assert cuda.decline(problem, "fa3") is None
    return backward.run(emulator, problem, cuda_backward.instance(problem, "fa3", H200), H200, blocks=blocks)


def forward(q, k, v, **options):
    out, lse = reference.forward(problems.build_attention(q, k, v, **options))
    return out.astype(q.dtype), lse.astype(np.float32)


@pytest.mark.parametrize("filler", [np.nan, np.inf])
def test_rows_that_see_nothing_contribute_nothing(emulator, filler):
    """Case 5: whatever dO holds there."""
    q, k, v, dout = operands((1, 200, 70, 1), F16)
    out, lse = forward(q, k, v, causal=True)
    want = gradients(emulator, dout[:, 130:], q[:, 130:], k, v, out[:, 130:], lse[..., 130:], causal=True)
    spoiled = dout.copy()
    spoiled[:, :130] = filler
    found = gradients(emulator, spoiled, q, k, v, out, lse, causal=True)
    assert not found.dq[:, :130].any()
    for name in ("dk", "dv"):
        exact = getattr(want, name).astype(np.float64)
        compare.assert_close(getattr(found, name), exact, 2 * compare.eps(F16) * np.abs(exact).max(), name)


def test_logits_so_low_that_weights_of_absent_keys_would_overflow(emulator):
    """Case 10: all logits are -120 and there are 65 keys."""
    q, k, v, dout = (np.zeros((1, 65, 1, 64), BF16) for _ in range(4))
    q[..., 0], k[..., 0] = 1, -120 * 8
    v[...], dout[...] = operands((1, 65, 65, 1), BF16)[2:]
    out, lse = forward(q, k, v)
    found = gradients(emulator, dout, q, k, v, out, lse)
    assert all(np.isfinite(g.astype(np.float32)).all() for g in (found.dq, found.dk, found.dv))
    want = dout.astype(np.float64).mean(1, keepdims=True).repeat(65, 1)
    compare.assert_close(found.dv, want, 2 * compare.eps(BF16) * np.abs(want).max(), "dv")


def test_results_of_the_forward_pass_lie_anyhow(emulator):
    """Every other number, of rows from the last to the first."""
    q, k, v, dout = operands((1, 100, 130, 2), F16)
    out, lse = forward(q, k, v)
    want = gradients(emulator, dout, q, k, v, out, lse)
    wide, long = np.zeros((*out.shape[:-1], 128), F16)[:, ::-1, :, ::2], np.zeros((*lse.shape, 2), np.float32)[..., 0]
    wide[...], long[...] = out, lse
    found = gradients(emulator, dout, q, k, v, wide, long)
    for name in ("dk", "dv"):  # delta is summed up in another order
        exact = getattr(want, name).astype(np.float64)
        compare.assert_close(getattr(found, name), exact, compare.eps(F16) * np.abs(exact).max(), name)


def test_blocks_share_the_tiles_in_any_way(emulator):
    """dk and dv are those of one block, bit for bit."""
    q, k, v, dout = operands((2, 300, 400, 2), BF16)
    out, lse = forward(q, k, v, causal=True)
    found = [gradients(emulator, dout, q, k, v, out, lse, blocks, causal=True) for blocks in (1, 3, 100)]
    for other in found[1:]:
        for name in ("dk", "dv"):
            compare.assert_same_bits(getattr(found[0], name), getattr(other, name), name)
