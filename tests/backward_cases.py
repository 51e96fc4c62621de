"""Cases for the backward kernel of Hopper: tails of its tiles, masks, groups, packed sequences, lengths, layouts."""

from __future__ import annotations

from case import BF16, F16, Packed, case, causal, fixed, upper_left

WINDOW = fixed(window=(70, 20))
DTYPES = (F16, BF16)
# A block has 128 keys, a step 64 queries, or 128 for heads of 64.
CASES = (
    *(case(f"rows-{n}", f"1,{n},200,1,1,64") for n in (1, 63, 64, 65, 127, 128, 129, 257)),
    *(case(f"keys-{n}", f"1,150,{n},1,1,128") for n in (1, 63, 64, 65, 127, 128, 129, 257)),
    *(case(f"causal-{sq}-{sk}-{d}", f"1,{sq},{sk},1,1,{d}", causal) for sq, sk in ((300, 300), (400, 130), (130, 400)) for d in (64, 128)),
    *(case(f"upper-left-{sq}-{sk}", f"1,{sq},{sk},1,1,64", upper_left) for sq, sk in ((300, 200), (200, 300))),
    *(case(f"window-{d}", f"1,300,300,1,1,{d}", WINDOW) for d in (64, 128)),
    case("window-left", "1,300,300,1,1,128", fixed(window=(130, -1))),
    case("window-right", "1,300,300,1,1,64", fixed(window=(-1, 40))),
    case("window-causal-more-rows", "1,500,200,1,1,64", fixed(window=(64, 0), causal=True)),
    *(
        case(f"heads-{d}-{dv}", f"1,140,150,2,1,{d},{dv}", causal)
        for d, dv in ((8, 8), (40, 64), (72, 72), (96, 128), (64, 128), (48, 104), (128, 40))
    ),
    *(case(f"groups-{h}-{hk}", f"2,100,150,{h},{hk},64", causal) for h, hk in ((4, 2), (6, 2), (5, 1))),
    case("groups-128", "1,100,300,6,2,128"),
    # Heads wider than 128: 64 keys of a block, 64 queries of a step, of which a warpgroup has 32.
    *(case(f"wide-rows-{n}", f"1,{n},100,1,1,256") for n in (1, 32, 33, 65)),
    *(case(f"wide-keys-{n}", f"1,70,{n},1,1,192", causal) for n in (1, 63, 64, 65, 129)),
    *(case(f"wide-{d}-{dv}", f"1,100,140,2,1,{d},{dv}", causal) for d, dv in ((136, 136), (192, 128), (256, 64), (64, 256))),
    case("wide-window", "1,200,200,1,1,256", WINDOW),
    case("wide-more-rows", "1,200,70,2,2,256", causal),
    case("wide-groups", "1,60,150,4,2,256", causal),
    case("wide-packed", "3,130,130,2,1,256", causal, packed=Packed((130, 1, 70), (100, 64, 130), slack=(3, 2))),
    case("wide-lengths-heads-first", "3,70,150,2,1,160", layout="BHSD", kv_lengths=(150, 130, 0)),
    case("batch-heads-first", "3,100,140,3,3,128", causal, layout="BHSD"),
    case("lengths", "3,150,300,2,1,64", causal, kv_lengths=(300, 130, 0)),
    case("lengths-128", "3,150,300,2,1,128", kv_lengths=(300, 77, 1)),
    case("starts", "3,200,300,2,1,64", kv_lengths=(300, 280, 200), kv_start=(129, 3, 200)),
    case("packed", "4,300,300,2,1,64", causal, packed=Packed((300, 1, 193, 76), (300, 64, 200, 1))),
    case("packed-empty-slack", "4,200,300,4,2,128", packed=Packed((3, 0, 200, 5), (70, 2, 300, 0), slack=(6, 4))),
    case("packed-heads-first", "3,130,130,2,2,64", causal, layout="BHSD", packed=Packed((130, 64, 7), (130, 64, 7))),
    case("scale-negative", "1,100,150,1,1,64", fixed(scale=-0.3), causal),
    case("scale-zero", "1,100,150,1,1,128", fixed(scale=0.0)),
    case("heads-of-packed", "2,150,150,2,2,64", causal, strides="heads_of_packed"),
)
RUNS = [(c, DTYPES[n % 2]) for n, c in enumerate(CASES)]
IDS = [f"{c.name}-{d.name}" for c, d in RUNS]

# Those in which tiles of keys meet the tiles of queries in different ways: they add to dQ one after the other.
IN_ORDER = [
    (c, t) for c, t in RUNS
    if c.name in ("starts", "lengths-128", "packed", "packed-empty-slack", "groups-6-2", "keys-257")
    or c.name in ("wide-window", "wide-groups", "wide-packed", "wide-more-rows")
    or c.name.startswith(("causal-", "upper-left-", "window-"))
]
IN_ORDER_IDS = [f"{c.name}-{d.name}" for c, d in IN_ORDER]
