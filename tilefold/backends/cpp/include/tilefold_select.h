// The best elements of a reduction with an integer each: argmax, argmin, topk.
#pragma once
#include "tilefold_simd.h"

namespace tf {

// Whether a outranks b: NaN outranks every number, and nothing outranks its equal
template <bool Down, class T> TF_INLINE bool outranks(T a, T b) { return a != a ? b == b : Down ? a < b : a > b; }
template <bool Down, class T, int N> TF_INLINE M<N> outranks(V<T, N> a, V<T, N> b) {
  if constexpr (T(0.5) != T(0)) return !(Down ? ge(a, b) : le(a, b)) & eq(b, b);
  else return Down ? lt(a, b) : gt(a, b);
}

// A best element with its integer, below 0 where there is none yet
template <bool Down, class T, class I> struct One { T value; I at; };
// of two parts of a reduction, the first one's where they are equal
template <bool Down, class T, class I> TF_INLINE One<Down, T, I> earlier(One<Down, T, I> a, One<Down, T, I> b) {
  return b.at >= 0 && (a.at < 0 || outranks<Down>(b.value, a.value)) ? b : a;
}
// in every lane
template <bool Down, class T, class I, int N> struct Best {
  V<T, N> value;
  V<I, N> at;
  TF_INLINE void take_where(M<N> m, V<T, N> x, V<I, N> index) {
    value = select(m, x, value);
    at = select(m, index, at);
  }
  TF_INLINE M<N> beaten(V<T, N> x) const { return outranks<Down>(x, value) | lt(at, splat<N>(I(0))); }
  // lacking: an index below 0 is no candidate's
  TF_INLINE void take(V<T, N> x, V<I, N> index, bool lacking) {
    take_where(lacking ? beaten(x) & ge(index, splat<N>(I(0))) : beaten(x), x, index);
  }
  template <class W> TF_INLINE void take_some(V<T, N> x, V<I, N> index, W w) {
    if constexpr (W::full) take_where(beaten(x), x, index);
    else take_where(beaten(x) & first_lanes<N>(w.n), x, index);
  }
  // of all lanes: the least integer of equal ones
  TF_INLINE One<Down, T, I> first() const {
    if constexpr (N == 2) {
      const One<Down, T, I> a = {lane(value, 0), lane(at, 0)}, b = {lane(value, 1), lane(at, 1)};
      return a.at < b.at ? earlier(a, b) : earlier(b, a);
    } else {
      Best<Down, T, I, N / 2> a = {low(value), low(at)};
      const V<T, N / 2> x = high(value);
      const V<I, N / 2> index = high(at);
      const M<N / 2> tied = !(outranks<Down>(a.value, x)) & lt(index, a.at);
      a.take_where((a.beaten(x) | tied) & ge(index, splat<N / 2>(I(0))), x, index);
      return a.first();
    }
  }
};

// Slots of a Select statement, best first, kept in the tile itself; ties keep what came first
template <bool Down, class T, class MV, class MI>
struct Slots {
  MV* values;
  MI* indices;
  int64_t count, filled;
  T worst;
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
  TF_INLINE bool beats(T x) const { return (filled < count || outranks<Down>(x, worst)) && count > 0; }
  void insert(T x, int64_t index) {
    int64_t at = filled < count ? filled++ : count - 1;
    for (; at > 0 && outranks<Down>(x, T(load1(values + at - 1))); --at) {
      values[at] = values[at - 1];
      indices[at] = indices[at - 1];
    }
    store1(values + at, x);
    store1(indices + at, index);
    worst = T(load1(values + count - 1));
  }
};

}  // namespace tf
