// Vectors of N lanes over any element type, on GCC's vector extensions.
//
// V<T, N> is one native register where N elements fit in one, otherwise a pair of halves: the same
// generated code serves AVX2, AVX-512 and plain SSE2. M<N> is a lane mask. Memory element types
// (bf16, f16, e4m3, e5m2, narrow integers) are converted to their compute type by load and store.
#pragma once
#include "tilefold_native.h"

#define TF_UNROLL _Pragma("GCC unroll 32")
#define TF_EXPORT __attribute__((visibility("default")))

namespace tf {

#if defined(TF_AVX512)
constexpr int kNative = 64;
#elif defined(__AVX2__)
constexpr int kNative = 32;
#else
constexpr int kNative = 16;
#endif
constexpr int kLanes = kNative / 4;  // f32 lanes of one register

// ---------------------------------------------------------------- vectors
template <class T, int N, bool Base = (N * sizeof(T) <= kNative)>
struct V;
template <class T, int N>
struct V<T, N, true> {
  static constexpr bool base = true;
  typedef T native __attribute__((vector_size(N * sizeof(T))));
  native r;
};
template <class T, int N>
struct V<T, N, false> {
  static constexpr bool base = false;
  V<T, N / 2> lo, hi;
};
template <int N>
struct M {
  V<int32_t, N> v;  // 0 or -1
};

// Halves of a register, and the register of two halves. GCC puts a union into memory, where reading the whole waits
// until both halves are written: shuffles stay in registers.
#if defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define TF_SHUFFLES 1
template <int... at> struct Places {};
template <int first, class X, int... at> TF_INLINE auto places(X a, X b, Places<at...>) {
  return __builtin_shufflevector(a, b, (first + at)...);
}
#endif
template <class T, int N>
TF_INLINE V<T, N / 2> low(V<T, N> a) {
  if constexpr (!V<T, N>::base) {
    return a.lo;
  } else {
#if defined(TF_SHUFFLES)
    if constexpr (N > 2) return {places<0>(a.r, a.r, Places<__integer_pack(N / 2)...>{})};
#endif
    union { typename V<T, N>::native x; V<T, N / 2> y[2]; } u = {a.r};
    return u.y[0];
  }
}
template <class T, int N>
TF_INLINE V<T, N / 2> high(V<T, N> a) {
  if constexpr (!V<T, N>::base) {
    return a.hi;
  } else {
#if defined(TF_SHUFFLES)
    if constexpr (N > 2) return {places<N / 2>(a.r, a.r, Places<__integer_pack(N / 2)...>{})};
#endif
    union { typename V<T, N>::native x; V<T, N / 2> y[2]; } u = {a.r};
    return u.y[1];
  }
}
template <class T, int N>
TF_INLINE V<T, 2 * N> join(V<T, N> a, V<T, N> b) {
  if constexpr (!V<T, 2 * N>::base) {
    return {a, b};
  } else {
#if defined(TF_SHUFFLES)
    if constexpr (N > 1) return {places<0>(a.r, b.r, Places<__integer_pack(2 * N)...>{})};
#endif
    union { V<T, N> y[2]; typename V<T, 2 * N>::native x; } u = {{a, b}};
    return {u.x};
  }
}
template <int N> TF_INLINE M<N / 2> low(M<N> a) { return {low(a.v)}; }
template <int N> TF_INLINE M<N / 2> high(M<N> a) { return {high(a.v)}; }
template <int N> TF_INLINE M<2 * N> join(M<N> a, M<N> b) { return {join(a.v, b.v)}; }
template <int N, class T>
TF_INLINE V<T, N> splat(T x) {
  if constexpr (!V<T, N>::base) {
    const V<T, N / 2> h = splat<N / 2>(x);
    return {h, h};
  } else {
    return {x - typename V<T, N>::native{}};
  }
}
template <int N>
TF_INLINE M<N> splat_mask(bool x) { return {splat<N>(int32_t(-int(x)))}; }

template <class T, int N>
TF_INLINE T lane(const V<T, N>& a, int l) {
  if constexpr (V<T, N>::base) return a.r[l];
  else return l < N / 2 ? lane(a.lo, l) : lane(a.hi, l - N / 2);
}
template <class T, int N>
TF_INLINE void set_lane(V<T, N>& a, int l, T x) {
  if constexpr (V<T, N>::base) a.r[l] = x;
  else if (l < N / 2) set_lane(a.lo, l, x);
  else set_lane(a.hi, l - N / 2, x);
}

#define TF_BINARY(op)                                                         \
  template <class T, int N>                                                   \
  TF_INLINE V<T, N> operator op(V<T, N> a, V<T, N> b) {                       \
    if constexpr (V<T, N>::base) return {a.r op b.r};                         \
    else return {a.lo op b.lo, a.hi op b.hi};                                 \
  }
TF_BINARY(+) TF_BINARY(-) TF_BINARY(*) TF_BINARY(/) TF_BINARY(&) TF_BINARY(|) TF_BINARY(^) TF_BINARY(<<) TF_BINARY(>>)
#undef TF_BINARY
#define TF_SHIFT(op)                                                          \
  template <class T, int N>                                                   \
  TF_INLINE V<T, N> operator op(V<T, N> a, int k) {                           \
    if constexpr (V<T, N>::base) return {a.r op k};                           \
    else return {a.lo op k, a.hi op k};                                       \
  }
TF_SHIFT(<<) TF_SHIFT(>>)
#undef TF_SHIFT
// A product as it is rounded: what subtracts it is no fused multiply-subtract.
template <class T>
TF_INLINE T rounded(T x) {
#if defined(__x86_64__)
  __asm__("" : "+x"(x));
#endif
  return x;
}
template <class T, int N>
TF_INLINE V<T, N> rounded(V<T, N> a) {
  if constexpr (!V<T, N>::base) return {rounded(a.lo), rounded(a.hi)};
  else if constexpr (N * sizeof(T) >= 16) return {rounded(a.r)};
  else return a;
}
template <class T, int N>
TF_INLINE V<T, N> operator-(V<T, N> a) {
  if constexpr (V<T, N>::base) return {-a.r};
  else return {-a.lo, -a.hi};
}

template <int size, bool negative> struct Int;
template <> struct Int<2, true> { using type = int16_t; };
template <> struct Int<2, false> { using type = uint16_t; };
template <> struct Int<4, true> { using type = int32_t; };
template <> struct Int<4, false> { using type = uint32_t; };
// an integer of so many bytes that has T's sign
template <int size, class T> using int_of = typename Int<size, (T(-1) < T(0))>::type;
// value conversion, lane by lane; between integers whose sizes are not neighbours in steps, which are instructions
template <class U, class T, int N>
TF_INLINE V<U, N> convert(V<T, N> a) {
  constexpr bool integers = T(0.5) == T(0) && U(0.5) == U(0);
  if constexpr (__is_same(U, T)) return a;
  else if constexpr (Conversion<U, T, N>::exists) return {(typename V<U, N>::native)Conversion<U, T, N>::of(a.r)};
  else if constexpr (N > 8 && Conversion<U, T, N / 2>::exists) return join(convert<U>(low(a)), convert<U>(high(a)));
  else if constexpr (integers && sizeof(U) > 2 * sizeof(T)) return convert<U>(convert<int_of<2 * sizeof(T), T>>(a));
  else if constexpr (integers && sizeof(T) > 2 * sizeof(U)) return convert<U>(convert<int_of<sizeof(T) / 2, T>>(a));
  else if constexpr (V<T, N>::base && V<U, N>::base) return {__builtin_convertvector(a.r, typename V<U, N>::native)};
  else return join(convert<U>(low(a)), convert<U>(high(a)));
}
// same bits, other type of the same size
template <class U, class T, int N>
TF_INLINE V<U, N> bits(V<T, N> a) {
  static_assert(sizeof(U) == sizeof(T));
  if constexpr (V<T, N>::base) return {(typename V<U, N>::native)a.r};
  else return {bits<U>(a.lo), bits<U>(a.hi)};
}

#define TF_COMPARE(name, op)                                                  \
  template <class T, int N>                                                   \
  TF_INLINE V<int32_t, N> name##_bits(V<T, N> a, V<T, N> b) {                 \
    if constexpr (!V<T, N>::base) {                                           \
      return join(name##_bits(a.lo, b.lo), name##_bits(a.hi, b.hi));          \
    } else if constexpr (sizeof(T) == 4) {                                    \
      return {a.r op b.r};                                                    \
    } else {                                                                  \
      return convert<int32_t>(V<int64_t, N>{a.r op b.r});                     \
    }                                                                         \
  }                                                                           \
  template <class T, int N>                                                   \
  TF_INLINE M<N> name(V<T, N> a, V<T, N> b) { return {name##_bits(a, b)}; }   \
  template <class T>                                                          \
  TF_INLINE bool name(T a, T b) { return a op b; }
TF_COMPARE(lt, <) TF_COMPARE(le, <=) TF_COMPARE(gt, >) TF_COMPARE(ge, >=) TF_COMPARE(eq, ==) TF_COMPARE(ne, !=)
#undef TF_COMPARE
template <int N> TF_INLINE M<N> eq(M<N> a, M<N> b) { return {eq_bits(a.v, b.v)}; }
template <int N> TF_INLINE M<N> ne(M<N> a, M<N> b) { return {a.v ^ b.v}; }
template <int N> TF_INLINE M<N> operator&(M<N> a, M<N> b) { return {a.v & b.v}; }
template <int N> TF_INLINE M<N> operator|(M<N> a, M<N> b) { return {a.v | b.v}; }
template <int N> TF_INLINE M<N> operator!(M<N> a) { return {a.v ^ splat<N>(int32_t(-1))}; }

template <class I, class T, int N>
TF_INLINE V<T, N> select_wide(V<I, N> m, V<T, N> a, V<T, N> b) {
  if constexpr (V<T, N>::base) return {m.r ? a.r : b.r};
  else return {select_wide(m.lo, a.lo, b.lo), select_wide(m.hi, a.hi, b.hi)};
}
template <class T, int N>
TF_INLINE V<T, N> select(M<N> m, V<T, N> a, V<T, N> b) {
  if constexpr (sizeof(T) == 4) return select_wide(m.v, a, b);
  else return select_wide(convert<int64_t>(m.v), a, b);
}
template <int N>
TF_INLINE M<N> select(M<N> m, M<N> a, M<N> b) { return {(m.v & a.v) | ((m.v ^ splat<N>(int32_t(-1))) & b.v)}; }
template <class T> TF_INLINE T select(bool m, T a, T b) { return m ? a : b; }

template <int N> TF_INLINE bool any(M<N> m) {
  if constexpr (!V<int32_t, N>::base) {
    return any(M<N / 2>{m.v.lo}) || any(M<N / 2>{m.v.hi});
  } else if constexpr (Signs<4 * N>::exists) {
    return Signs<4 * N>::of((typename Signs<4 * N>::native)m.v.r) != 0;
  } else {
    int32_t some = 0;
    TF_UNROLL
    for (int l = 0; l < N; ++l) some |= m.v.r[l];
    return some != 0;
  }
}

// 1 or 0 per lane, in any arithmetic type
template <class T, int N> TF_INLINE V<T, N> from_mask(M<N> m) { return convert<T>(V<int32_t, N>{m.v} & splat<N>(int32_t(1))); }
template <class T, int N> TF_INLINE M<N> to_mask(V<T, N> a) { return ne(a, splat<N>(T(0))); }
template <int N> TF_INLINE M<N> first_lanes(int n) {
  V<int32_t, N> at;
  if constexpr (V<int32_t, N>::base) {
    TF_UNROLL
    for (int l = 0; l < N; ++l) at.r[l] = l;
    return lt(at, splat<N>(int32_t(n)));
  } else {
    return {join(first_lanes<N / 2>(n).v, first_lanes<N / 2>(n - N / 2).v)};
  }
}
// first, first + 1, first + 2, ...
template <class T, int N> TF_INLINE V<T, N> iota(T first) {
  if constexpr (V<T, N>::base) {
    V<T, N> at;
    TF_UNROLL
    for (int l = 0; l < N; ++l) at.r[l] = T(l);
    return at + splat<N>(first);
  } else {
    return {iota<T, N / 2>(first), iota<T, N / 2>(T(first + N / 2))};
  }
}

// ---------------------------------------------------------------- strips: how many lanes are live
template <int N> struct Full {
  static constexpr int lanes = N;
  static constexpr bool full = true;
  static constexpr int n = N;
};
template <int N> struct Part {
  static constexpr int lanes = N;
  static constexpr bool full = false;
  int n;
};
// lanes of a strip: `vectors` f32 registers, fewer where no more than `extent` elements are ever live
constexpr int lanes(int vectors, int64_t extent = 1 << 30) {
  int n = kLanes;
  while (n < vectors * kLanes && n < extent) n *= 2;
  return n;
}
// the first and the second half of a strip
template <int N> TF_INLINE Full<N / 2> low_strip(Full<N>) { return {}; }
template <int N> TF_INLINE Full<N / 2> high_strip(Full<N>) { return {}; }
template <int N> TF_INLINE Part<N / 2> low_strip(Part<N> w) { return {w.n < N / 2 ? w.n : N / 2}; }
template <int N> TF_INLINE Part<N / 2> high_strip(Part<N> w) { return {w.n < N / 2 ? 0 : w.n - N / 2}; }
#define TF_BODY __attribute__((always_inline))
// f(width, i) for i = lo, lo + N, ...; the last strip may be partial
template <int N, class F>
TF_INLINE void strips(int64_t lo, int64_t hi, F f) {
  int64_t i = lo;
  for (; i + N <= hi; i += N) f(Full<N>{}, i);
  if (i < hi) f(Part<N>{int(hi - i)}, i);
}
// lanes beyond a partial strip keep `old`
template <class W, class X>
TF_INLINE X keep(W w, X now, X old) {
  if constexpr (W::full) return now;
  else return select(first_lanes<W::lanes>(w.n), now, old);
}

// ---------------------------------------------------------------- element types in memory
struct bf16 { uint16_t b; };
struct f16 { uint16_t b; };
struct e4m3 { uint8_t b; };
struct e5m2 { uint8_t b; };
struct bool8 { uint8_t b; };

template <class T> struct Mem { using raw = T; using compute = T; };
template <> struct Mem<bf16> { using raw = uint16_t; using compute = float; };
template <> struct Mem<f16> { using raw = uint16_t; using compute = float; };
template <> struct Mem<e4m3> { using raw = uint8_t; using compute = float; };
template <> struct Mem<e5m2> { using raw = uint8_t; using compute = float; };
template <> struct Mem<bool8> { using raw = uint8_t; using compute = bool; };
template <> struct Mem<int32_t> { using raw = int32_t; using compute = int32_t; };
template <> struct Mem<int16_t> { using raw = int16_t; using compute = int32_t; };
template <> struct Mem<int8_t> { using raw = int8_t; using compute = int32_t; };
template <> struct Mem<uint8_t> { using raw = uint8_t; using compute = int32_t; };
template <class T> using raw_t = typename Mem<T>::raw;

template <int N> TF_INLINE V<float, N> half_to_float(V<uint16_t, N> h) {
#if defined(__F16C__) && !defined(__clang__)
  if constexpr (N == 8) {
    typedef short v8hi __attribute__((vector_size(16)));
    return {__builtin_ia32_vcvtph2ps256((v8hi)h.r)};
#if defined(TF_AVX512)
  } else if constexpr (N == 16) {
    typedef short v16hi __attribute__((vector_size(32)));
    return {__builtin_ia32_vcvtph2ps512_mask((v16hi)h.r, typename V<float, 16>::native{}, uint16_t(-1), 4)};
#endif
  } else if constexpr (N > 8) {
    return join(half_to_float(low(h)), half_to_float(high(h)));
  }
#endif
  const V<uint32_t, N> w = convert<uint32_t>(h);
  const V<uint32_t, N> mag = w & splat<N>(0x7fffu);
  const V<float, N> finite = bits<float>(mag << 13) * splat<N>(0x1p112f);
  const V<float, N> special = bits<float>((mag << 13) | splat<N>(0x7f800000u));
  const V<float, N> v = select(ge(mag, splat<N>(0x7c00u)), special, finite);
  return bits<float>(bits<uint32_t>(v) | ((w & splat<N>(0x8000u)) << 16));
}
template <int N> TF_INLINE V<uint16_t, N> float_to_half(V<float, N> f) {
#if defined(__F16C__) && !defined(__clang__)
  if constexpr (N == 8) {
    return {(typename V<uint16_t, 8>::native)__builtin_ia32_vcvtps2ph256(f.r, 0)};
#if defined(TF_AVX512)
  } else if constexpr (N == 16) {
    typedef short v16hi __attribute__((vector_size(32)));
    return {(typename V<uint16_t, 16>::native)__builtin_ia32_vcvtps2ph512_mask(f.r, 0, v16hi{}, uint16_t(-1))};
#endif
  } else if constexpr (N > 8) {
    return join(float_to_half(low(f)), float_to_half(high(f)));
  }
#endif
  const V<uint32_t, N> w = bits<uint32_t>(f), twice = w + w;
  const V<float, N> mag = bits<float>(w & splat<N>(0x7fffffffu));
  V<float, N> base = (mag * splat<N>(0x1p112f)) * splat<N>(0x1p-110f);
  V<uint32_t, N> bias = twice & splat<N>(0xff000000u);
  bias = select(lt(bias, splat<N>(0x71000000u)), splat<N>(0x71000000u), bias);
  base = bits<float>((bias >> 1) + splat<N>(0x07800000u)) + base;
  const V<uint32_t, N> b = bits<uint32_t>(base);
  const V<uint32_t, N> body = ((b >> 13) & splat<N>(0x7c00u)) + (b & splat<N>(0x0fffu));
  const V<uint32_t, N> v = select(gt(twice, splat<N>(0xff000000u)), splat<N>(0x7e00u), body);
  return convert<uint16_t>(((w >> 16) & splat<N>(0x8000u)) | v);
}

// raw bits -> compute type
template <class T, int N> TF_INLINE auto widen(V<raw_t<T>, N> r) {
  if constexpr (__is_same(T, bf16)) {
    return bits<float>(convert<uint32_t>(r) << 16);
  } else if constexpr (__is_same(T, f16)) {
    return half_to_float(r);
  } else if constexpr (__is_same(T, e5m2)) {
    return half_to_float(convert<uint16_t>(r) << 8);
  } else if constexpr (__is_same(T, e4m3)) {
    const V<uint32_t, N> w = convert<uint32_t>(r), mag = w & splat<N>(0x7fu);
    const V<float, N> finite = bits<float>(mag << 20) * splat<N>(0x1p120f);
    const V<float, N> v = select(eq(mag, splat<N>(0x7fu)), bits<float>(splat<N>(0x7fc00000u)), finite);
    return bits<float>(bits<uint32_t>(v) | ((w & splat<N>(0x80u)) << 24));
  } else if constexpr (__is_same(T, bool8)) {
    return to_mask(convert<int32_t>(r));
  } else {
    return convert<typename Mem<T>::compute>(r);
  }
}
// compute type (float, double, int32, int64 or mask) -> raw bits, rounded as torch's Tensor.to. Beyond
// 464 torch up to 2.11 made e4m3 NaN, later ones the largest number: TF_E4M3_SATURATES.
template <class T, int N> TF_INLINE V<uint32_t, N> narrow_small(V<float, N> f, int mantissa, int bias, uint32_t denormal_below,
                                                                uint32_t too_big_from, uint32_t too_big, uint32_t nan) {
  const V<uint32_t, N> w = bits<uint32_t>(f), mag = w & splat<N>(0x7fffffffu);
  const uint32_t magic = uint32_t(127 - bias + 23 - mantissa + 1) << 23;
  const V<uint32_t, N> small = bits<uint32_t>(bits<float>(mag) + bits<float>(splat<N>(magic))) - splat<N>(magic);
  const int drop = 23 - mantissa;
  const V<uint32_t, N> odd = (mag >> drop) & splat<N>(1u);
  const V<uint32_t, N> normal = (mag + splat<N>((uint32_t(bias - 127) << 23) + (1u << (drop - 1)) - 1u) + odd) >> drop;
  V<uint32_t, N> v = select(lt(mag, splat<N>(denormal_below)), small, normal);
  v = select(ge(mag, splat<N>(too_big_from)), splat<N>(too_big), v);
  v = select(gt(mag, splat<N>(0x7f800000u)), splat<N>(nan), v);
  return v | ((w >> 24) & splat<N>(0x80u));
}
template <class T, class X, int N> TF_INLINE V<raw_t<T>, N> narrow(V<X, N> x) {
  if constexpr (__is_same(T, bf16)) {
    const V<uint32_t, N> w = bits<uint32_t>(convert<float>(x));
    const V<uint32_t, N> r = (w + splat<N>(0x7fffu) + ((w >> 16) & splat<N>(1u))) >> 16;
    return convert<uint16_t>(select(gt(w & splat<N>(0x7fffffffu), splat<N>(0x7f800000u)), splat<N>(0x7fc0u), r));
  } else if constexpr (__is_same(T, f16)) {
    return float_to_half(convert<float>(x));
  } else if constexpr (__is_same(T, e5m2)) {
    return convert<uint8_t>(narrow_small<T>(convert<float>(x), 2, 15, 113u << 23, 143u << 23, 0x7cu, 0x7fu));
  } else if constexpr (__is_same(T, e4m3)) {
#if defined(TF_E4M3_SATURATES)
    return convert<uint8_t>(narrow_small<T>(convert<float>(x), 3, 7, 121u << 23, 0x43e80001u, 0x7eu, 0x7fu));
#else
    return convert<uint8_t>(narrow_small<T>(convert<float>(x), 3, 7, 121u << 23, 1087u << 20, 0x7fu, 0x7fu));
#endif
  } else if constexpr (__is_same(T, bool8)) {
    return convert<uint8_t>(from_mask<int32_t>(to_mask(x)));
  } else if constexpr (sizeof(T) < 4 && X(0.5) != X(0)) {
    return convert<T>(convert<int64_t>(x));  // wraps
  } else {
    return convert<T>(x);
  }
}
template <class T, int N> TF_INLINE V<raw_t<T>, N> narrow(M<N> m) {
  if constexpr (__is_same(T, bool8)) return convert<uint8_t>(from_mask<int32_t>(m));
  else return narrow<T>(from_mask<int32_t>(m));
}

// ---------------------------------------------------------------- memory
template <int N, class T> TF_INLINE V<T, N> load_full(const T* p) {
  if constexpr (!V<T, N>::base) {
    return {load_full<N / 2>(p), load_full<N / 2>(p + N / 2)};
  } else {
    V<T, N> out;
    memcpy(&out.r, p, sizeof out.r);
    return out;
  }
}
template <class T, int N> TF_INLINE void store_full(T* p, V<T, N> x) {
  if constexpr (!V<T, N>::base) {
    store_full(p, x.lo);
    store_full(p + N / 2, x.hi);
  } else {
    memcpy(p, &x.r, sizeof x.r);
  }
}
template <int N, class T> TF_INLINE V<T, N> load_part(const T* p, int n) {
  if constexpr (!V<T, N>::base) {
    if (n <= N / 2) return {load_part<N / 2>(p, n), splat<N / 2>(T(0))};
    return {load_full<N / 2>(p), load_part<N / 2>(p + N / 2, n - N / 2)};
  } else if constexpr (Masked<sizeof(T), N * sizeof(T)>::exists) {
    return {(typename V<T, N>::native)Masked<sizeof(T), N * sizeof(T)>::load(p, first_bits(n))};
  } else {
#if defined(__AVX2__) && !defined(__clang__)
    if constexpr (sizeof(T) == 4 && N == 8) {
      typedef float v8sf __attribute__((vector_size(32)));
      typedef int v8si __attribute__((vector_size(32)));
      return {(typename V<T, N>::native)__builtin_ia32_maskloadps256((const v8sf*)p, (v8si)first_lanes<8>(n).v.r)};
    }
#endif
    if (n == N) return load_full<N>(p);
    V<T, N> out = splat<N>(T(0));
    TF_UNROLL
    for (int l = 0; l < N; ++l)
      if (l < n) out.r[l] = p[l];
    return out;
  }
}
template <class T, int N> TF_INLINE void store_part(T* p, V<T, N> x, int n) {
  if constexpr (!V<T, N>::base) {
    if (n <= N / 2) return store_part(p, x.lo, n);
    store_full(p, x.lo);
    store_part(p + N / 2, x.hi, n - N / 2);
  } else if constexpr (Masked<sizeof(T), N * sizeof(T)>::exists) {
    typedef Masked<sizeof(T), N * sizeof(T)> Some;
    Some::store(p, (typename Some::native)x.r, first_bits(n));
  } else {
#if defined(__AVX2__) && !defined(__clang__)
    if constexpr (sizeof(T) == 4 && N == 8) {
      typedef float v8sf __attribute__((vector_size(32)));
      typedef int v8si __attribute__((vector_size(32)));
      __builtin_ia32_maskstoreps256((v8sf*)p, (v8si)first_lanes<8>(n).v.r, (v8sf)x.r);
      return;
    }
#endif
    if (n == N) return store_full(p, x);
    TF_UNROLL
    for (int l = 0; l < N; ++l)
      if (l < n) p[l] = x.r[l];
  }
}

// contiguous; narrow elements by as many as one register of 32-bit lanes takes
template <class T, class W> TF_INLINE auto load(const T* p, W w) {
  constexpr int N = W::lanes;
  if constexpr (sizeof(T) < 4 && N > kLanes) return join(load(p, low_strip(w)), load(p + N / 2, high_strip(w)));
  else if constexpr (W::full) return widen<T>(load_full<N>((const raw_t<T>*)p));
  else return widen<T>(load_part<N>((const raw_t<T>*)p, w.n));
}
template <class T, class X, class W> TF_INLINE void store(T* p, X x, W w) {
  constexpr int N = W::lanes;
  if constexpr (sizeof(T) < 4 && N > kLanes) {
    store(p, low(x), low_strip(w));
    store(p + N / 2, high(x), high_strip(w));
  } else if constexpr (W::full) store_full((raw_t<T>*)p, narrow<T>(x));
  else store_part((raw_t<T>*)p, narrow<T>(x), w.n);
}
// every `stride`-th element
template <int size> struct Place { typedef int type; };
template <> struct Place<8> { typedef long long type; };
// every second element, of which there are registers full: two loads, none beyond the last element, and a shuffle
template <int N, class T> TF_INLINE V<T, N> load_second(const T* p) {
  if constexpr (!V<T, N>::base) {
    return {load_second<N / 2>(p), load_second<N / 2>(p + N)};
  } else {
    typedef typename Place<sizeof(T)>::type index __attribute__((vector_size(N * sizeof(T))));
    index at;
    TF_UNROLL
    for (int l = 0; l < N; ++l) at[l] = 2 * l + (l >= N / 2);
    return {__builtin_shuffle(load_full<N>(p).r, load_full<N>(p + N - 1).r, at)};
  }
}
template <class T, int N> TF_INLINE void store_second(T* p, V<T, N> x) {
  if constexpr (!V<T, N>::base) {
    store_second(p, x.lo);
    store_second(p + N, x.hi);
  } else {
    typedef Masked<sizeof(T), N * sizeof(T)> Some;
    typedef typename Place<sizeof(T)>::type index __attribute__((vector_size(N * sizeof(T))));
    index low, high;
    TF_UNROLL
    for (int l = 0; l < N; ++l) {
      low[l] = l / 2;
      high[l] = (N + l) / 2;
    }
    Some::store(p, (typename Some::native)__builtin_shuffle(x.r, low), 0x5555555555555555);
    Some::store(p + N, (typename Some::native)__builtin_shuffle(x.r, high), 0x5555555555555555);
  }
}
template <class T, int N> constexpr bool has_second() {
  if constexpr (!V<T, N>::base) return has_second<T, N / 2>();
  else return sizeof(T) >= 4 && N > 1 && Masked<sizeof(T), N * sizeof(T)>::exists;
}
template <class T, class W> TF_INLINE auto load_strided(const T* p, int64_t stride, W w) {
  constexpr int N = W::lanes;
  if (stride == 1) return load(p, w);
  if constexpr (W::full && has_second<raw_t<T>, N>()) {
    if (stride == 2) return widen<T>(load_second<N>((const raw_t<T>*)p));
  }
  V<raw_t<T>, N> out = splat<N>(raw_t<T>(0));
  TF_UNROLL
  for (int l = 0; l < N; ++l)
    if (W::full || l < w.n) set_lane(out, l, ((const raw_t<T>*)p)[l * stride]);
  return widen<T>(out);
}
template <class T, class X, class W> TF_INLINE void store_strided(T* p, int64_t stride, X x, W w) {
  constexpr int N = W::lanes;
  if (stride == 1) return store(p, x, w);
  const V<raw_t<T>, N> r = narrow<T>(x);
  if constexpr (W::full && has_second<raw_t<T>, N>()) {
    if (stride == 2) return store_second((raw_t<T>*)p, r);
  }
  TF_UNROLL
  for (int l = 0; l < N; ++l)
    if (W::full || l < w.n) ((raw_t<T>*)p)[l * stride] = lane(r, l);
}
// elements at `offset` (in elements)
template <class R, int N, class W> TF_INLINE V<R, N> raw_gather(const R* p, V<int64_t, N> offset, W w) {
  if constexpr (N > 8) {
    return join(raw_gather(p, low(offset), low_strip(w)), raw_gather(p, high(offset), high_strip(w)));
  } else if constexpr (N == 8 && Gathered<sizeof(R)>::exists) {
    typedef Gathered<sizeof(R)> Eight;
    return {(typename V<R, N>::native)Eight::of(p, (typename Eight::offsets)offset.r, first_bits(w.n))};
  } else {
    V<R, N> out = splat<N>(R(0));
    TF_UNROLL
    for (int l = 0; l < N; ++l)
      if (W::full || l < w.n) set_lane(out, l, p[lane(offset, l)]);
    return out;
  }
}
template <class T, int N, class W> TF_INLINE auto gather(const T* p, V<int64_t, N> offset, W w) {
  return widen<T>(raw_gather((const raw_t<T>*)p, offset, w));
}
template <class T, class X, int N, class W> TF_INLINE void scatter(T* p, V<int64_t, N> offset, X x, W w) {
  const V<raw_t<T>, N> r = narrow<T>(x);
  TF_UNROLL
  for (int l = 0; l < N; ++l)
    if (W::full || l < w.n) ((raw_t<T>*)p)[lane(offset, l)] = lane(r, l);
}
// the first n elements from first on of a register that is partly inside an axis: one load, and what lies beside it
template <int N, class R> TF_INLINE V<R, N> raw_edges(const R* p, int64_t first, int64_t extent, int n) {
  typedef Masked<sizeof(R), N * sizeof(R)> Some;
  typedef int_of<sizeof(R), int> I;
  const int before = first < 0 ? int(-first) : 0, stop = extent - first < n ? int(extent - first) : n;
  const auto mask = [](int lanes) { return convert<I>(first_lanes<N>(lanes).v); };
  V<R, N> out = {(typename V<R, N>::native)Some::load(p + first, first_bits(stop) & ~first_bits(before))};
  out = select_wide(mask(before), splat<N>(p[0]), out);
  return select_wide(mask(stop), out, splat<N>(p[extent - 1]));
}
// elements first + lane of an axis of `extent` elements; places outside it give the nearest element. Registers that are
// inside or outside as a whole are loaded as such.
template <class R, class W> TF_INLINE V<R, W::lanes> raw_clamped(const R* p, int64_t first, int64_t stride, int64_t extent, W w) {
  constexpr int N = W::lanes;
  if constexpr (N > kLanes) {
    return join(raw_clamped(p, first, stride, extent, low_strip(w)),
                raw_clamped(p, first + N / 2, stride, extent, high_strip(w)));
  } else {
    if (first >= 0 && first + w.n <= extent && stride == 1) {
      if constexpr (W::full) return load_full<N>(p + first);
      else return load_part<N>(p + first, w.n);
    }
    if (extent > 0 && first + w.n <= 0) return splat<N>(p[0]);
    if (extent > 0 && first >= extent) return splat<N>(p[(extent - 1) * stride]);
    if constexpr (Masked<sizeof(R), N * sizeof(R)>::exists && sizeof(R) != 1) {
      if (extent > 0 && stride == 1) return raw_edges<N>(p, first, extent, w.n);
    }
    V<R, N> out = splat<N>(R(0));
    TF_UNROLL
    for (int l = 0; l < N; ++l) {
      const int64_t at = first + l < 0 ? 0 : first + l < extent ? first + l : extent - 1;
      if (extent > 0 && (W::full || l < w.n)) set_lane(out, l, p[at * stride]);
    }
    return out;
  }
}
template <class T, class W> TF_INLINE auto load_clamped(const T* p, int64_t first, int64_t stride, int64_t extent, W w) {
  if (first >= 0 && first + w.n <= extent) return load_strided(p + first * stride, stride, w);
  return widen<T>(raw_clamped((const raw_t<T>*)p, first, stride, extent, w));
}

// one element
template <class T> TF_INLINE typename Mem<T>::compute load1(const T* p) {
  if constexpr (__is_same(T, bool8)) return p->b != 0;
  else if constexpr (__is_same(T, raw_t<T>)) return *p;
  else return lane(widen<T>(splat<4>(p->b)), 0);
}
template <class T, class X> TF_INLINE void store1(T* p, X x) {
  if constexpr (__is_same(T, bool8)) p->b = x != X(0);
  else if constexpr (__is_same(T, raw_t<T>)) {
    if constexpr (sizeof(T) < 4) *p = T(int64_t(x));
    else *p = T(x);
  } else p->b = lane(narrow<T>(splat<4>(float(x))), 0);
}
// round to T's precision, stay in the compute type
template <class T, class X, int N> TF_INLINE auto round_to(V<X, N> x) { return widen<T>(narrow<T>(x)); }
template <class T, class X> TF_INLINE auto round_to(X x) {
  T tmp;
  store1(&tmp, x);
  return load1(&tmp);
}
template <class T, int N> TF_INLINE auto round_to(M<N> x) { return widen<T>(narrow<T>(x)); }

// ---------------------------------------------------------------- transposition
// 8 x 8 transposition: r[n] holds 8 values along k, and holds 8 values along n afterwards
TF_INLINE void transpose8(V<float, 8> (&r)[8]) {
  if constexpr (kNative >= 32) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef int i8 __attribute__((vector_size(32)));
    v8 t[8], u[8];
    TF_UNROLL
    for (int i = 0; i < 8; i += 2) {
      v8 x, y;
      memcpy(&x, &r[i], 32);
      memcpy(&y, &r[i + 1], 32);
      t[i] = __builtin_shuffle(x, y, i8{0, 8, 1, 9, 4, 12, 5, 13});
      t[i + 1] = __builtin_shuffle(x, y, i8{2, 10, 3, 11, 6, 14, 7, 15});
    }
    TF_UNROLL
    for (int i = 0; i < 8; i += 4)
      TF_UNROLL
      for (int j = 0; j < 2; ++j) {
        u[i + 2 * j] = __builtin_shuffle(t[i + j], t[i + j + 2], i8{0, 1, 8, 9, 4, 5, 12, 13});
        u[i + 2 * j + 1] = __builtin_shuffle(t[i + j], t[i + j + 2], i8{2, 3, 10, 11, 6, 7, 14, 15});
      }
    TF_UNROLL
    for (int i = 0; i < 4; ++i) {
      const v8 lo = __builtin_shuffle(u[i], u[i + 4], i8{0, 1, 2, 3, 8, 9, 10, 11});
      const v8 hi = __builtin_shuffle(u[i], u[i + 4], i8{4, 5, 6, 7, 12, 13, 14, 15});
      memcpy(&r[i], &lo, 32);
      memcpy(&r[i + 4], &hi, 32);
    }
  } else {
    TF_UNROLL
    for (int i = 0; i < 8; ++i)
      TF_UNROLL
      for (int j = 0; j < i; ++j) {
        const float x = lane(r[i], j);
        set_lane(r[i], j, lane(r[j], i));
        set_lane(r[j], i, x);
      }
  }
}
// out[r * pitch + c] = p[c * stride + r]; rows of `out` are written in whole blocks of 8 columns
template <class T> static void turn(T* to, int64_t pitch, const T* from, int64_t stride, int64_t rows, int64_t columns) {
  typedef raw_t<T> R;
  const R* p = (const R*)from;
  R* out = (R*)to;
  if constexpr (sizeof(R) > 4) {
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = 0; r < rows; ++r) out[r * pitch + c] = p[c * stride + r];
  } else {
    for (int64_t c = 0; c < columns; c += 8)
      strips<8>(0, rows, [&](auto w, int64_t r) TF_BODY {
        V<float, 8> t[8];
        TF_UNROLL
        for (int i = 0; i < 8; ++i) {
          V<R, 8> x = splat<8>(R(0));
          if (c + i < columns) {
            if constexpr (decltype(w)::full) x = load_full<8>(p + (c + i) * stride + r);
            else x = load_part<8>(p + (c + i) * stride + r, w.n);
          }
          if constexpr (sizeof(R) == 4) t[i] = bits<float>(x);
          else t[i] = bits<float>(convert<int32_t>(x));
        }
        transpose8(t);
        TF_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (i >= w.n) continue;
          if constexpr (sizeof(R) == 4) store_full(out + (r + i) * pitch + c, bits<R>(t[i]));
          else store_full(out + (r + i) * pitch + c, convert<R>(bits<int32_t>(t[i])));
        }
      });
  }
}

}  // namespace tf
