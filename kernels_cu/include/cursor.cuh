// Which tiles of keys a block of decode.cu goes through.
#include "include/deal.cuh"

// A block's way through its run, tile by tile.
template <int MASK, int N> struct Cursor {
    const DecodeParams& p;
    Deal deal;
    int unit, end;       // in the row of all units: the next one that is not begun; end of the run
    int batch, pass;
    int before;          // units before the (sequence, pass)
    int tiles, units;    // of the sequence
    int tile, stop;      // next tile and end of the part, from the sequence's first tile on
    int first;           // the sequence's first tile
    KeyRange range;
    int position, kv_length;

    __device__ __forceinline__ Cursor(const DecodeParams& p, const UnitIndex<MASK, N>& index, int passes, int run)
        : p(p), deal(p, index.total() * passes), tile(0), stop(0) {
        unit = run < deal.runs ? deal.begin(run) : 0;
        end = run < deal.runs ? deal.begin(run + 1) : 0;
        if (!more()) return;
        int sequences_before;
        batch = index.find(int(quotient(unit, passes)), sequences_before);
        before = sequences_before * passes;
        enter(index.extent(batch));
        pass = int(quotient(unit - before, units));
        before += pass * units;
        begin_part();
    }

    // Run `run` has one of the two parts of a (sequence, pass), sequences are alike.
    __device__ __forceinline__ Cursor(const DecodeParams& p, int passes, int run) : p(p), unit(run + 1), end(run + 1), before(run & ~1) {
        batch = int(quotient(run / 2, passes)), pass = run / 2 - batch * passes;
        enter(Extent<MASK, N>(p, batch));
        units = 2;
        tile = part_begin = run % 2 == 0 ? 0 : (tiles + 1) / 2;
        stop = run % 2 == 0 ? (tiles + 1) / 2 : tiles;
    }

    __device__ __forceinline__ bool more() const { return unit < end || tile < stop; }
    __device__ __forceinline__ bool begins() const { return tile == part_begin; }
    __device__ __forceinline__ bool ends() const { return tile + 1 == stop; }
    __device__ __forceinline__ bool whole() const { return part_begin == 0 && stop == tiles; }

    // The slot of the part.
    __device__ __forceinline__ int slot(int run, int lane) const {
        if (p.most_units != 0) return (unit - 1) * p.heads_at_once + lane;
        return (run * p.heads_at_once + lane) * 2 + (deal.begin(run) < before ? 1 : 0);
    }

    __device__ __forceinline__ void advance(int passes) {
        if (++tile < stop || unit >= end) return;
        if (unit == before + units) {  // the sequence is done for these heads
            before = unit;
            if (++pass == passes) {
                pass = 0, ++batch;
                enter(Extent<MASK, N>(p, batch));
            }
        }
        begin_part();
    }

  private:
    int part_begin;

    __device__ __forceinline__ void enter(const Extent<MASK, N>& e) {
        tiles = e.tiles, units = e.units, first = e.first, range = e.range, position = e.position, kv_length = e.kv_length;
    }

    // From `unit` on, which lies in the sequence: one unit, or as much of the run as does.
    __device__ __forceinline__ void begin_part() {
        const int own = unit - before;
        if (p.most_units != 0) {
            const u32 each = u32(tiles) / u32(units), rest = u32(tiles) % u32(units);
            tile = int(each * u32(own) + min(u32(own), rest));
            stop = tile + int(each) + (u32(own) < rest ? 1 : 0);
            ++unit;
        } else {
            tile = own;
            stop = min(tiles, own + end - unit);
            unit = before + stop;
        }
        part_begin = tile;
    }
};
