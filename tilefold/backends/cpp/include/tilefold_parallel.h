// What a kernel stands on: the grid on the OpenMP runtime that torch has loaded, and memory for its tiles.
//
// GOMP_parallel is the entry point that both libgomp and LLVM's libomp offer; calling it directly
// needs neither compiler's OpenMP code generation nor a second runtime.
#pragma once
#include <stdint.h>
#include <stdlib.h>

#include "tilefold_simd.h"

extern "C" void GOMP_parallel(void (*f)(void*), void* data, unsigned threads, unsigned flags);

namespace tf {

// f(item) for item in [0, count): items are handed out in runs, so that uneven ones balance
template <class F>
struct Team {
  F* f;
  int64_t count, run;
  int64_t next;
  static void work(void* self) {
    Team* team = static_cast<Team*>(self);
    for (;;) {
      const int64_t first = __atomic_fetch_add(&team->next, team->run, __ATOMIC_RELAXED);
      if (first >= team->count) return;
      const int64_t last = first + team->run < team->count ? first + team->run : team->count;
      for (int64_t item = first; item < last; ++item) (*team->f)(item);
    }
  }
};
template <class F>
static inline void parallel_for(int64_t count, int64_t threads, F f) {
  if (threads > count) threads = count;
  if (threads <= 1) {
    for (int64_t item = 0; item < count; ++item) f(item);
    return;
  }
  const int64_t run = count / (threads * 16);
  Team<F> team = {&f, count, run < 1 ? 1 : run, 0};
  GOMP_parallel(Team<F>::work, &team, unsigned(threads), 0);
}

// Memory of one thread that grows to the largest request and stays
struct Arena {
  void* memory = nullptr;
  int64_t bytes = 0;
  char* reserve(int64_t need) {
    if (need > bytes) {
      free(memory);
      bytes = (need + 4095) / 4096 * 4096;
      memory = aligned_alloc(64, size_t(bytes));
      if (memory == nullptr) abort();
    }
    return static_cast<char*>(memory);
  }
  ~Arena() { free(memory); }
};
// bytes rounded up, so that what follows stays aligned and whole vectors may be read past the end
TF_INLINE int64_t padded(int64_t bytes) { return (bytes + 127) / 64 * 64; }
TF_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
TF_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
// an index that data or a discarded branch chose, brought into [0, extent)
TF_INLINE int64_t clamp_index(int64_t i, int64_t extent) { return i < 0 ? 0 : i < extent ? i : max64(extent - 1, 0); }
template <int N> TF_INLINE V<int64_t, N> clamp_index(V<int64_t, N> i, int64_t extent) {
  const V<int64_t, N> last = splat<N>(max64(extent - 1, 0)), zero = splat<N>(int64_t(0));
  return select(lt(i, zero), zero, select(gt(i, last), last, i));
}
// set where data chose an index that does not exist; the launcher takes it after each launch
static int32_t outside = 0;
TF_INLINE void report_outside() { __atomic_store_n(&outside, 1, __ATOMIC_RELAXED); }
template <class T> TF_INLINE T within(T i, T extent) {
  if (i < 0 || i >= extent) report_outside();
  return i < 0 ? 0 : i < extent ? i : extent > 0 ? extent - 1 : 0;
}
template <class T, int N, bool B, class W> TF_INLINE V<T, N> within(V<T, N, B> i, V<T, N, B> extent, W w) {
  const V<T, N> zero = splat<N>(T(0));
  const M<N> low = lt(i, zero), high = ge(i, extent);
  if (any((low | high) & first_lanes<N>(w.n))) report_outside();
  const V<T, N> last = extent - splat<N>(T(1));
  return select(low, zero, select(high, select(lt(last, zero), zero, last), i));
}
// matrix multiplication, compiled once for each combination of element types (tilefold_gemm.h)
typedef void (*gemm_fn)(int64_t M, int64_t N, int64_t K, const void* a, int64_t sam, int64_t sak, const void* b, int64_t sbk,
                        int64_t sbn, void* c, int64_t scm, int64_t scn, bool accumulate);
TF_INLINE int64_t tiles(int64_t size, int64_t tile) { return size <= 0 ? 0 : (size + tile - 1) / tile; }

}  // namespace tf
