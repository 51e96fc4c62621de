"""decode(): what it appends, and that a call which is refused changes nothing that the user owns."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from refusal import refused

import cuflash

RNG = np.random.default_rng(11)
FORMS = ["dense", "paged", "dense BHSD", "paged BHSD"]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


class State:
    """Two sequences in a cache of 8 keys each, dense or in pages of 4, with new keys; everything that a call might spoil."""

    def __init__(self, form: str = "dense", new: int = 2, lengths=(3, 5)):
        self.layout = "BHSD" if "BHSD" in form else "BSHD"
        table = np.array([[4, 1], [0, 2]], np.int32) if "paged" in form else None
        # Slack in front and behind shows writes outside of the cache.
        shape = (7, 4, 2) if table is not None else (4, 8, 2)
        self.k_memory, self.v_memory = normal(*shape, 8), normal(*shape, 6)
        self.arrays = {
            "q": normal(2, new or 1, 4, 8), "k_cache": self.k_memory[1:-1], "v_cache": self.v_memory[1:-1],
            "kv_lengths": np.array(lengths), "k_new": normal(2, new, 2, 8), "v_new": normal(2, new, 2, 6),
        }  # fmt: skip
        if self.layout == "BHSD":
            for name in ("q", "k_cache", "v_cache", "k_new", "v_new"):
                self.arrays[name] = self.arrays[name].swapaxes(1, 2)
        if table is not None:
            self.arrays["page_table"] = table

    def decode(self, **changed):
        return cuflash.decode(**{**self.arrays, "layout": self.layout, "backend": "reference", **changed})

    def everything(self) -> dict[str, np.ndarray]:
        return {**self.arrays, "k_memory": self.k_memory, "v_memory": self.v_memory}

    def refuses(self, error: type[Exception], *pieces: str, **changed) -> None:
        """The call raises, and no byte of any array differs afterwards."""
        before = copy.deepcopy(self.everything())
        given = copy.deepcopy({name: x for name, x in changed.items() if isinstance(x, np.ndarray)})
        with refused(error, *pieces):
            self.decode(**changed)
        for name, array in self.everything().items():
            assert np.array_equal(array, before[name]), name
        for name, array in given.items():
            assert np.array_equal(array, changed[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new", [0, 1, 3])
def test_decode_is_attention_over_old_and_new_keys(form, new):
    state = State(form, new)
    lengths = state.arrays["kv_lengths"].copy()
    k_before, v_before = state.k_memory.copy(), state.v_memory.copy()
    out, lse = state.decode(causal=True, return_lse=True)
    assert np.array_equal(state.arrays["kv_lengths"], lengths), "kv_lengths is not modified"

    changed = [np.any(a != b, axis=(2, 3)).sum() for a, b in ((state.k_memory, k_before), (state.v_memory, v_before))]
    assert changed == [2 * new, 2 * new], "exactly the new rows were written"
    after = {**state.arrays, "kv_lengths": lengths + new}
    k, v = after.pop("k_cache"), after.pop("v_cache")
    q, k_new, v_new = (after.pop(name) for name in ("q", "k_new", "v_new"))
    expected = cuflash.attention(q, k, v, causal=True, return_lse=True, layout=state.layout, backend="reference", **after)
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    to_bshd = (0, 2, 1, 3) if state.layout == "BHSD" else (0, 1, 2, 3)
    for cache, added in ((k.transpose(to_bshd), k_new.transpose(to_bshd)), (v.transpose(to_bshd), v_new.transpose(to_bshd))):
        for b in range(2):
            whole = cache[b] if "page_table" not in after else cache[after["page_table"][b]].reshape(8, 2, -1)
            assert np.array_equal(whole[lengths[b] : lengths[b] + new], added[b])


@pytest.mark.parametrize("form", FORMS)
def test_lengths_that_do_not_fit_change_nothing(form):
    state = State(form)
    state.refuses(ValueError, "kv_lengths:", "7 keys at index 1 plus 2", "of 8", "nothing was written", kv_lengths=[3, 7])
    state.refuses(ValueError, "kv_lengths:", "9 at index 0", "from 0 to 8", kv_lengths=[9, 1])
    state.refuses(ValueError, "kv_lengths:", "-1 at index 0", "from 0 to 8", kv_lengths=[-1, 1])
    state.refuses(ValueError, "kv_lengths:", "-2 at index 1", "from 0 to 8", kv_lengths=np.array([1, -2]))
    state.refuses(ValueError, "kv_lengths:", f"{2**63 - 1} at index 0", kv_lengths=[2**63 - 1, 0])
    state.refuses(ValueError, "kv_lengths:", "(3,)", "(2,)", kv_lengths=[1, 1, 1])
    state.refuses(TypeError, "kv_lengths:", "float64", "integer", kv_lengths=[1.0, 1.0])
    state.refuses(TypeError, "kv_lengths:", "None", "number of keys", kv_lengths=None)
    name = "page table row" if "paged" in form else "keys of k_cache"
    state.refuses(ValueError, "kv_lengths:", name, kv_lengths=[9, 9], k_new=None, v_new=None)


@pytest.mark.parametrize("form", FORMS)
def test_new_keys_that_do_not_fit_change_nothing(form):
    state = State(form)
    k_new, v_new = state.arrays["k_new"], state.arrays["v_new"]
    state.refuses(ValueError, "v_new: missing", "k_new was given", v_new=None)
    state.refuses(ValueError, "k_new: missing", "v_new was given", k_new=None)
    state.refuses(ValueError, "k_new:", "batch 1", "q's 2", k_new=k_new[:1], v_new=v_new[:1])
    state.refuses(ValueError, "v_new:", "differs from k_new's", v_new=v_new[:, :1])
    state.refuses(ValueError, "k_new:", "(2, 7)", "cache's (2, 8)", k_new=k_new[..., :7])
    state.refuses(ValueError, "v_new:", "(2, 8)", "cache's (2, 6)", v_new=k_new)
    state.refuses(ValueError, "k_new:", "3 axes", "q (2, ", k_new=k_new[0])
    state.refuses(TypeError, "k_new:", "float64", "q's float32", k_new=k_new.astype(np.float64))
    state.refuses(TypeError, "v_new:", "list", "NumPy", v_new=v_new.tolist())


@pytest.mark.parametrize("form", FORMS)
def test_caches_that_cannot_be_written_change_nothing(form):
    state = State(form)
    k_cache, v_cache, k_new = (state.arrays[name] for name in ("k_cache", "v_cache", "k_new"))
    frozen = k_cache.view()
    frozen.flags.writeable = False
    state.refuses(ValueError, "k_cache:", "read-only", "writeable", k_cache=frozen)
    state.refuses(ValueError, "k_cache:", "head size 7", "q's 8", k_cache=k_cache[..., :7])
    state.refuses(ValueError, "v_cache:", "differs from k_cache's", v_cache=v_cache[1:])
    state.refuses(TypeError, "v_cache:", "float64", "q's float32", v_cache=v_cache.astype(np.float64))
    state.refuses(ValueError, "k_cache:", "overlaps k_new", "written to k_cache", k_new=k_cache[:2, :2, :2])
    state.refuses(ValueError, "v_cache:", "overlaps v_new", "written to v_cache", v_new=v_cache[:2, :2, :2])
    state.refuses(ValueError, "k_cache:", "overlaps v_cache", v_cache=k_cache, v_new=k_new)
    state.refuses(ValueError, "k_cache:", "overlaps bias", bias=k_cache[0, 0, :1, :1])


def test_results_must_not_overlap_what_is_appended_or_the_caches():
    state = State()
    fused, caches = normal(2, 2, 6, 8), normal(2, 8, 8, 8)
    given = {"k_new": fused[:, :, :2], "v_new": fused[:, :, :2].copy(), "k_cache": caches[:, :, :2], "v_cache": caches[:, :, 4:6]}
    state.refuses(ValueError, "out:", "overlaps k_new", "buffer of their own", **given, out=fused[:, :, 1:5])
    state.refuses(ValueError, "out:", "overlaps v_cache", "buffer of their own", **given, out=caches[:, :2, 2:6])
    out = fused[:, :, 2:]
    assert state.decode(**given, out=out) is out, "interleaved, but with no element in common"


def test_a_fused_cache_of_keys_and_values_is_fine():
    plain, fused = State(), State()
    memory = np.zeros((2, 8, 2, 2, 8), np.float32)
    memory[:, :, 0], memory[:, :, 1, :, :6] = plain.arrays["k_cache"], plain.arrays["v_cache"]
    given = {**plain.arrays, "k_cache": memory[:, :, 0], "v_cache": memory[:, :, 1, :, :6]}
    assert np.array_equal(fused.decode(**given), plain.decode())
    assert np.array_equal(memory[:, :, 0], plain.arrays["k_cache"]) and not memory[:, :, 1, :, 6:].any()


@pytest.mark.parametrize(
    ("table", "lengths", "pieces"),
    [
        ([[4, 1], [0, 1]], (4, 5), ("[0, 1] is page 1", "entry [1, 1] uses it too")),
        ([[4, 1], [4, 2]], (3, 4), ("[0, 0] is page 4", "entry [1, 0] uses it too")),
        ([[4, 4], [0, 2]], (4, 4), ("[0, 1] is page 4", "entry [0, 0] uses it too")),
        ([[4, 5], [0, 2]], (3, 4), ("[0, 1] is 5", "5 pages (0 to 4)")),
        ([[-1, 1], [0, 2]], (3, 4), ("[0, 0] is -1", "5 pages (0 to 4)")),
    ],
)
def test_pages_that_take_new_keys_belong_to_one_sequence(table, lengths, pieces):
    """Else an append would change keys that another sequence sees; full pages of a common prefix may be shared."""
    State("paged", lengths=lengths).refuses(ValueError, "page_table:", *pieces, page_table=np.array(table))


def test_full_pages_may_be_shared_and_unused_entries_may_be_anything():
    state = State("paged", lengths=(4, 4))
    shared = np.array([[4, 1, -7, 10**9], [4, 2, 4, 1]])
    copies = {name: _with_copy(state.arrays[name]) for name in ("k_cache", "v_cache")}
    expected = state.decode(page_table=np.array([[4, 1], [3, 2]]), **copies)
    assert np.array_equal(state.decode(page_table=shared), expected)
    state.arrays["page_table"] = np.array([[4, 4], [4, 4]])
    assert state.decode(k_new=None, v_new=None, kv_lengths=[8, 8]).shape == (2, 2, 4, 6), "reading shares as it likes"
    state.decode(k_new=state.arrays["k_new"][:, :0], v_new=state.arrays["v_new"][:, :0], kv_lengths=[7, 8])


def _with_copy(pages: np.ndarray) -> np.ndarray:
    """The pages, with page 4 copied to page 3."""
    pages = pages.copy()
    pages[3] = pages[4]
    return pages


@pytest.mark.parametrize("form", FORMS)
def test_calls_that_no_backend_takes_append_nothing(form):
    state = State(form)
    state.refuses(cuflash.NoBackendError, "reference/fa2", kernel="fa2")
    state.refuses(cuflash.NoBackendError, "CUDA expression", score_mod="s")
    state.refuses(ValueError, "softcap:", "above 0", softcap=0)
    state.refuses(ValueError, "out:", "(1,)", "must be", out=np.zeros(1, np.float32))
    state.refuses(TypeError, "decode()", "'casual'", casual=True)


def test_a_full_cache_stays_as_it_was():
    cache = cuflash.PagedKVCache(num_pages=3, page_size=2, heads_kv=2, head_dim=8)
    first, second = cache.new_sequence(), cache.new_sequence()
    cache.append(first, normal(3, 2, 8), normal(3, 2, 8))
    cache.append(second, normal(1, 2, 8), normal(1, 2, 8))
    before = cache.k_pages.copy(), cache.v_pages.copy(), cache.page_table([first, second]).copy()
    new = normal(2, 2, 2, 8)
    kept = new.copy()
    with pytest.raises(cuflash.CacheFullError):
        cache.append([first, second], new, new)
    after = cache.k_pages, cache.v_pages, cache.page_table([first, second])
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True)) and np.array_equal(new, kept)


def test_forms_with_fewer_axes():
    """One sequence without its batch axis, and without its head axis, dense and paged."""
    q, k, v, new = normal(1, 1, 8), normal(6, 1, 8), normal(6, 1, 8), normal(1, 1, 8)
    whole = [x[None].copy() for x in (q, k, v)]
    expected = cuflash.decode(*whole, [3], k_new=new[None], v_new=new[None], return_lse=True, backend="reference")
    three = cuflash.decode(q, k.copy(), v.copy(), 3, k_new=new, v_new=new, return_lse=True, backend="reference")
    assert np.array_equal(three[0], expected[0][0]) and np.array_equal(three[1], expected[1][0])
    flat = [x[:, 0].copy() for x in (q, k, v, new)]
    two = cuflash.decode(*flat[:3], np.int64(3), k_new=flat[3], v_new=flat[3], return_lse=True, backend="reference")
    assert np.array_equal(two[0], expected[0][0, :, 0]) and np.array_equal(two[1], expected[1][0, 0])
    pages = [x.reshape(3, 2, 1, 8).copy() for x in (k, v)]
    paged = cuflash.decode(flat[0], *pages, 3, page_table=[[0, 1, 2]], k_new=flat[3], v_new=flat[3], backend="reference")
    assert np.array_equal(paged, two[0])


# --- rotary embedding, and entries of a larger cache -----------------------------------------------------------------


def tables(positions: int, half: int, dtype=np.float32) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_an_embedding_sees_distances_alone(form, style):
    """Keys appended one by one, then queries: every logit depends on where query and key stand to each other, in both styles."""
    results = []
    for shift in (0, 2):
        state = State(form, new=1, lengths=(shift, shift))
        for name in ("k_cache", "v_cache"):
            state.arrays[name][...] = np.nan
        rng = np.random.default_rng(5)
        for step in range(3):
            for name in ("q", "k_new", "v_new"):
                state.arrays[name][...] = rng.standard_normal(state.arrays[name].shape)
            lengths = np.array([shift + step] * 2)
            out, lse = state.decode(
                kv_lengths=lengths, rope=(*tables(8, 4), style), kv_start=[shift, shift], causal=True, return_lse=True,
            )
        results.append((out, lse))
    (a, b), (c, d) = results
    np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(b, d, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_what_an_embedding_does(form):
    """Row n of the tables for key n, whatever the layout; features behind rot as they are; a quarter turn by hand."""
    state = State(form, new=2, lengths=(3, 5))
    turns = np.array([0, 1, 2, 3, 4, 5, 6, 7])[:, None] * np.array([[np.pi / 2, 0.0]])
    before, q = state.arrays["k_new"].copy(), state.arrays["q"].copy()
    out = state.decode(rope=(np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32), "half"), causal=True)
    bshd = (0, 2, 1, 3) if state.layout == "BHSD" else (0, 1, 2, 3)
    cache, new, given_q = (x.transpose(bshd) for x in (state.arrays["k_cache"], before, q))

    def by_hand(x: np.ndarray, position: int) -> np.ndarray:
        y = x.copy()
        for _ in range(position % 4):
            y[..., 0], y[..., 2] = -y[..., 2].copy(), y[..., 0].copy()
        return y

    turned_q = given_q.copy()
    for b, n in enumerate((3, 5)):
        whole = cache[b] if "page_table" not in state.arrays else cache[state.arrays["page_table"][b]].reshape(8, 2, 8)
        for t in range(2):
            np.testing.assert_allclose(whole[n + t], by_hand(new[b, t], n + t), rtol=1e-5, atol=1e-6)
            turned_q[b, t] = by_hand(given_q[b, t], n + t)
    state.arrays["q"] = turned_q.transpose(bshd)
    again = state.decode(k_new=None, v_new=None, kv_lengths=[5, 7], causal=True)
    np.testing.assert_allclose(out, again, rtol=1e-4, atol=1e-5)
    assert np.array_equal(state.arrays["k_new"], before), "inputs stay as they are"


@pytest.mark.parametrize("form", FORMS)
def test_embeddings_that_do_not_fit_change_nothing(form):
    state = State(form)
    cos, sin = tables(8, 4)
    for bad, words in ((cos, "ndarray"), ((cos, sin), "2 entries"), ([cos, sin, "half", 1], "4 entries"), ("half", "str")):
        state.refuses(TypeError, "rope:", words, "(cos, sin, 'half')", rope=bad)
    state.refuses(ValueError, "rope[2]:", "'neox'", "'interleaved', 'half'", rope=(cos, sin, "neox"))
    state.refuses(TypeError, "rope[2]:", "True", rope=(cos, sin, True))
    state.refuses(TypeError, "rope[0]:", "float64", "float32", rope=(cos.astype(float), sin, "half"))
    state.refuses(TypeError, "rope[1]:", "list", rope=(cos, sin.tolist(), "half"))
    state.refuses(ValueError, "rope[0]:", "(8, 5)", "from 1 to 4", rope=(*tables(8, 5), "half"))
    state.refuses(ValueError, "rope[0]:", "(8, 0)", rope=(cos[:, :0], sin[:, :0], "half"))
    state.refuses(ValueError, "rope[0]:", "(8,)", rope=(cos[:, 0], sin[:, 0], "half"))
    state.refuses(ValueError, "rope[1]:", "(7, 4)", "(8, 4)", rope=(cos, sin[1:], "half"))
    state.refuses(ValueError, "rope:", "6 positions (0 to 5)", "sequence 1 reaches 6", rope=(*tables(6, 4), "half"))
    state.refuses(ValueError, "rope:", "0 positions", rope=(*tables(0, 4), "half"))
    queries = {"q": normal(2, 8, 4, 8) if state.layout == "BSHD" else normal(2, 4, 8, 8), "k_new": None, "v_new": None}
    state.refuses(ValueError, "rope:", "4 positions", "sequence 0 reaches 5", rope=(*tables(4, 4), "half"), kv_lengths=[3, 4], **queries)
    state.decode(rope=(*tables(6, 4), "half"), kv_lengths=[3, 4], **queries)


def test_tables_that_share_memory_with_a_cache_or_result_change_nothing():
    state = State()
    cos, sin = tables(8, 4)
    out = np.zeros((2, 2, 4, 6), np.float32)
    state.refuses(ValueError, "k_cache:", "overlaps rope[1]", rope=(cos, state.arrays["k_cache"][0, :, 0, :4], "half"))
    state.refuses(ValueError, "out:", "overlaps rope[0]", rope=(out.reshape(-1)[:32].reshape(8, 4), sin, "half"), out=out)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_entries_of_a_larger_cache(layout, backend):
    state = State("dense" if layout == "BSHD" else "dense BHSD", lengths=(3, 5))
    larger = {}
    for name in ("k_cache", "v_cache"):
        cache = state.arrays[name]
        larger[name] = np.concatenate([np.full_like(cache[:1], np.nan), cache[::-1]])
    out = state.decode(cache_batch_index=[2, 1], backend=backend, **larger)
    assert np.array_equal(out, state.decode(backend=backend))
    for name, cache in larger.items():
        assert np.array_equal(cache[[2, 1]], state.arrays[name]) and np.isnan(cache[0]).all()


def test_entries_may_be_shared_where_nothing_is_written():
    state = State()
    given = {"k_new": None, "v_new": None, "kv_lengths": [6, 3]}
    assert np.array_equal(state.decode(cache_batch_index=[1, 1], **given)[0], state.decode(**given, k_cache=state.arrays["k_cache"][[1, 1]],
                          v_cache=state.arrays["v_cache"][[1, 1]])[0])  # fmt: skip


def test_entries_that_do_not_fit_change_nothing():
    state = State()
    state.refuses(ValueError, "cache_batch_index:", "2 at index 1", "from 0 to 1", cache_batch_index=[0, 2])
    state.refuses(ValueError, "cache_batch_index:", "-1 at index 0", cache_batch_index=[-1, 0])
    state.refuses(ValueError, "cache_batch_index:", "1 at index 0 and again at 1", "distinct", cache_batch_index=[1, 1])
    state.refuses(ValueError, "cache_batch_index:", "(3,)", "(batch,)", cache_batch_index=[0, 1, 2])
    state.refuses(TypeError, "cache_batch_index:", "float64", cache_batch_index=[0.0, 1.0])
    state.refuses(ValueError, "kv_lengths:", "8 keys at index 1 plus 2", cache_batch_index=[1, 0], kv_lengths=[3, 8])
    three = {name: state.arrays[name][0] for name in ("q", "k_cache", "v_cache", "k_new", "v_new")}
    state.refuses(ValueError, "k_cache:", "(8, 2, 8)", "4 axes", cache_batch_index=[0], kv_lengths=[3], **three)
    empty = {name: state.arrays[name][:, :0] for name in ("k_cache", "v_cache", "k_new", "v_new")}
    state.refuses(ValueError, "k_cache:", "room for a key", cache_batch_index=[0, 1], kv_lengths=[0, 0], **empty)
    State("paged").refuses(ValueError, "cache_batch_index:", "page_table[index]", cache_batch_index=[0, 1])


def test_tensors_of_pytorch():
    """Also as cos and sin in a tuple, and as entries; the caches are written where they are."""
    torch = pytest.importorskip("torch")
    mine, theirs = State(), State()
    tensors = {name: torch.from_numpy(x) for name, x in theirs.arrays.items() if name != "kv_lengths"}
    for name, x in mine.arrays.items():
        theirs.arrays[name][...] = x
    cos, sin = tables(8, 4)
    options = {"rope": (cos, sin, "interleaved"), "cache_batch_index": np.array([1, 0]), "causal": True}
    there = {"rope": (torch.from_numpy(cos), torch.from_numpy(sin), "interleaved"), "cache_batch_index": torch.tensor([1, 0])}
    out = cuflash.decode(**tensors, kv_lengths=torch.from_numpy(mine.arrays["kv_lengths"]), causal=True, **there, backend="reference")
    assert isinstance(out, torch.Tensor) and np.array_equal(out.numpy(), mine.decode(**options))
    assert all(np.array_equal(theirs.arrays[name], mine.arrays[name]) for name in ("k_cache", "v_cache"))
    with refused(TypeError, "rope[1]:", "numpy.ndarray", "one kind"):
        cuflash.decode(**tensors, kv_lengths=[3, 5], rope=(there["rope"][0], sin, "half"))
