// The best elements of a reduction with an integer each: argmax, argmin, topk.
#pragma once
#include "tilefold_simd.h"

namespace tf {

// Slots of a Select statement, best first, kept in the tile itself; ties keep what came first
template <bool Down, class T, class MV, class MI>
struct Slots {
  MV* values;
  MI* indices;
  int64_t count, filled;
  T worst;
  static TF_INLINE bool better(T a, T b) { return a != a ? b == b : Down ? a < b : a > b; }
  TF_INLINE Slots(MV* values, MI* indices, int64_t count, T start, bool accumulate)
      : values(values), indices(indices), count(count), filled(0), worst(start) {
    if (!accumulate)
      for (int64_t n = 0; n < count; ++n) {
        store1(values + n, start);
        store1(indices + n, int64_t(-1));
      }
    while (filled < count && int64_t(load1(indices + filled)) != -1) ++filled;
    if (count > 0) worst = T(load1(values + count - 1));
  }
  TF_INLINE bool beats(T x) const { return (filled < count || better(x, worst)) && count > 0; }
  void insert(T x, int64_t index) {
    int64_t at = filled < count ? filled++ : count - 1;
    for (; at > 0 && better(x, T(load1(values + at - 1))); --at) {
      values[at] = values[at - 1];
      indices[at] = indices[at - 1];
    }
    store1(values + at, x);
    store1(indices + at, index);
    worst = T(load1(values + count - 1));
  }
};

}  // namespace tf
