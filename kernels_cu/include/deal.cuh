// Who reads which keys: the tiles of all sequences, dealt out to the blocks of the grid in equal runs.
//
// A unit is what is never cut: a tile; or, where each sequence is cut in a way of its own (num_splits, batch_invariant), a fixed share of
// the sequence. The units of all (sequence, pass) pairs form one row, in which every run has as many as any other, or one fewer. The
// heads_at_once blocks of a run read the same keys at the same time, each those of its head: in memory the heads of a token are neighbours.
// Heads beyond heads_at_once come in further passes over the sequence.
//
// Lengths may be known on the device alone, so every block works the deal out by itself, from the lengths of all sequences.
#include "include/decode_params.cuh"
#include "include/mask.cuh"

// a / b without the 30 instructions of a division where it can be told at once.
__device__ __forceinline__ u32 quotient(u32 a, u32 b) { return a < b ? 0 : b == 1 ? a : a / b; }

// Which keys of a sequence are read: tiles of N keys from the first to the last that some query may see; at least one.
template <int MASK, int N> struct Extent {
    KeyRange range;
    int first, tiles, units;
    int position, kv_length;

    __device__ __forceinline__ Extent(const DecodeParams& p, int batch) {
        const Sequence seq = sequence(p, batch);
        const Visibility<MASK> visible(p, seq);
        range = visible.of_any(seq.position, seq.position + p.q_rows - 1);
        range.end = max(range.end, range.begin);
        first = range.begin / N;
        tiles = range.empty() ? 1 : (range.end - 1) / N - first + 1;
        position = seq.position, kv_length = seq.kv_length;
        units = p.most_units == 0 ? tiles : min(p.most_units, int(u32(tiles + p.unit_tiles - 1) / u32(p.unit_tiles)));
    }

    // That of another lane of the warp; all lanes ask.
    __device__ __forceinline__ Extent of_lane(int lane) const {
        const auto of = [lane](int x) { return int(__shfl_sync(0xffffffffu, u32(x), lane)); };
        Extent e(*this);
        e.range = {of(range.begin), of(range.end)}, e.first = of(first), e.tiles = of(tiles), e.units = of(units);
        e.position = of(position), e.kv_length = of(kv_length);
        return e;
    }
};

struct Deal {
    u32 each, rest;  // units of a run; as many runs have one more
    int runs;

    Deal() = default;
    __device__ __forceinline__ Deal(const DecodeParams& p, int total)
        : each(u32(total) / u32(p.runs)), runs(p.runs) {
        if (each < u32(p.least)) runs = max(1, int(u32(total) / u32(p.least))), each = u32(total) / u32(runs);
        rest = u32(total) - each * u32(runs);
    }

    __device__ __forceinline__ int begin(int run) const { return int(each * u32(run) + min(u32(run), rest)); }

    __device__ __forceinline__ int owner(int unit) const {
        if (unit >= begin(runs - 1)) return runs - 1;
        const u32 large = (each + 1) * rest;
        const bool in_large = u32(unit) < large;
        return int((in_large ? 0 : rest) + quotient(in_large ? unit : unit - large, in_large ? each + 1 : each));
    }
};

// Units of all sequences together, those before a sequence, and which sequence has a unit. For a whole warp, whose lanes agree.
template <int MASK, int N> struct UnitIndex {
    const DecodeParams& p;
    bool uniform;         // sequences are alike
    Extent<MASK, N> one;  // of sequence `lane`, or of all that are alike
    int own;              // its units; 0 if there is no such sequence

    __device__ __forceinline__ UnitIndex(const DecodeParams& p)
        : p(p), uniform(p.batch == 1 || (!p.kv_lengths && !p.kv_start)), one(p, uniform ? 0 : min(int(threadIdx.x % 32), p.batch - 1)) {
        own = uniform || int(threadIdx.x % 32) < p.batch ? one.units : 0;
    }

    __device__ __forceinline__ Extent<MASK, N> extent(int batch) const {
        if (uniform) return one;
        return batch < 32 ? one.of_lane(batch) : Extent<MASK, N>(p, batch);
    }

    __device__ __forceinline__ int units(int batch) const { return batch < p.batch ? Extent<MASK, N>(p, batch).units : 0; }

    // Of sequence first + lane.
    __device__ __forceinline__ int lane_units(int first) const { return first == 0 ? own : units(first + int(threadIdx.x % 32)); }

    __device__ __forceinline__ int total() const { return uniform ? p.batch * own : before(p.batch); }

    // Units before a sequence.
    __device__ __forceinline__ int before(int batch) const {
        if (uniform) return batch * own;
        int sum = 0;
#pragma unroll 1
        for (int first = 0; first < batch; first += 32) {
            int x = lane_units(first);
            if (first + int(threadIdx.x % 32) >= batch) x = 0;
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) x += int(__shfl_xor_sync(0xffffffffu, u32(x), lanes));
            sum += x;
        }
        return sum;
    }

    // The sequence of a unit below total(), and the units before that.
    __device__ __forceinline__ int find(int unit, int& before) const {
        if (uniform) {
            const int batch = int(quotient(unit, own));
            before = batch * own;
            return batch;
        }
        before = 0;
        const int lane = threadIdx.x % 32;
        int first = 0;
#pragma unroll 1
        while (true) {
            int x = lane_units(first);  // becomes the units up to this lane's sequence, with it
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) {
                const int y = int(__shfl_sync(0xffffffffu, u32(x), (lane - lanes) & 31));
                if (lane >= lanes) x += y;
            }
            const int end = int(__shfl_sync(0xffffffffu, u32(x), 31));
            if (unit < before + end) {
                const int here = __popc(__ballot_sync(0xffffffffu, before + x <= unit));  // sequences that end before it
                if (here > 0) before += int(__shfl_sync(0xffffffffu, u32(x), here - 1));
                return first + here;
            }
            before += end;
            first += 32;
        }
    }
};

// Where a part's partial result goes, and those of the others of the same (sequence, head).
struct Parts {
    int first, second, step, count;  // slots of part 0 and of part 1, from one to the next; number of parts

    __device__ __forceinline__ int slot(int part) const { return part == 0 ? first : second + (part - 1) * step; }

    // begin: units before the (sequence, pass), which has so many; lane: which of its run's heads.
    __device__ __forceinline__ Parts(const DecodeParams& p, const Deal& deal, int begin, int units, int lane) {
        step = p.heads_at_once;
        if (p.most_units != 0) {
            first = begin * step + lane, second = first + step, count = units;
        } else {  // a run has two slots: the second one for the part with which it ends, where that is not the first
            const int run = deal.owner(begin);
            count = deal.owner(begin + units - 1) - run + 1;
            first = (run * step + lane) * 2 + (deal.begin(run) < begin ? 1 : 0);
            step *= 2;
            second = (run * p.heads_at_once + lane) * 2 + step;
        }
    }
};
