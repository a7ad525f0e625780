// Single instructions for what portable vector code says in several: parts of vectors in memory, the
// larger of two, rounding, scaling by powers of two, square roots, halves. Each is on GCC's native
// vectors; Has<name, bytes> says whether this machine's registers of so many bytes have it.
#pragma once
#include <stdint.h>
#include <string.h>

#define TF_INLINE __attribute__((always_inline)) inline

namespace tf {

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TF_AVX512 1
#endif

// ---------------------------------------------------------------- parts of vectors
// Elements of `size` bytes in registers of `bytes`: load(p, live) is zero and store(p, x, live) does nothing where bit l
// of `live` is not set; memory there is not touched.
template <int size, int bytes> struct Masked { static constexpr bool exists = false; };
#if defined(TF_AVX512) && !defined(__clang__)
#define TF_MASKED(size, bytes, T, bits, name)                                                      \
  template <> struct Masked<size, bytes> {                                                         \
    static constexpr bool exists = true;                                                           \
    typedef T native __attribute__((vector_size(bytes)));                                          \
    static TF_INLINE native load(const void* p, uint64_t live) {                                   \
      return __builtin_ia32_load##name##_mask((const T*)p, native{}, bits(live));                  \
    }                                                                                              \
    static TF_INLINE void store(void* p, native x, uint64_t live) {                                \
      __builtin_ia32_store##name##_mask((T*)p, x, bits(live));                                     \
    }                                                                                              \
  };
TF_MASKED(1, 16, char, uint16_t, dquqi128) TF_MASKED(1, 32, char, uint32_t, dquqi256) TF_MASKED(1, 64, char, uint64_t, dquqi512)
TF_MASKED(2, 16, short, uint8_t, dquhi128) TF_MASKED(2, 32, short, uint16_t, dquhi256) TF_MASKED(2, 64, short, uint32_t, dquhi512)
TF_MASKED(4, 16, int, uint8_t, dqusi128) TF_MASKED(4, 32, int, uint8_t, dqusi256) TF_MASKED(4, 64, int, uint16_t, dqusi512)
TF_MASKED(8, 16, long long, uint8_t, dqudi128) TF_MASKED(8, 32, long long, uint8_t, dqudi256)
TF_MASKED(8, 64, long long, uint8_t, dqudi512)
#undef TF_MASKED
#endif
TF_INLINE uint64_t first_bits(int n) { return n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; }

// ---------------------------------------------------------------- elements anywhere
// of(p, at, live): elements of `size` bytes at eight offsets, counted in elements; zero where bit l of `live` is not set,
// and memory there is not touched.
template <int size> struct Gathered { static constexpr bool exists = false; };
#if defined(TF_AVX512) && !defined(__clang__)
#define TF_GATHERED(size, T, name)                                                                 \
  template <> struct Gathered<size> {                                                              \
    static constexpr bool exists = true;                                                           \
    typedef T native __attribute__((vector_size(8 * size)));                                       \
    typedef long long offsets __attribute__((vector_size(64)));                                    \
    static TF_INLINE native of(const void* p, offsets at, uint64_t live) {                         \
      return __builtin_ia32_##name(native{}, p, at, uint8_t(live), size);                          \
    }                                                                                              \
  };
TF_GATHERED(4, float, gatherdiv16sf) TF_GATHERED(8, double, gatherdiv8df)
#undef TF_GATHERED
#endif

// ---------------------------------------------------------------- arithmetic
// Of f32 and f64 in a register of `bytes`. larger(a, b), smaller(a, b): b where they are equal or one is NaN.
// rounded<mode>: 0 to even, 1 down, 2 up, 3 to zero. scaled(y, n): y 2^n, n a whole number.
template <class T, int bytes> struct Unit { static constexpr bool exists = false, scales = false; };
#if defined(__AVX__) && !defined(__clang__)
#define TF_UNIT(T, bytes, max, min, root, round)                                                   \
  template <> struct Unit<T, bytes> {                                                              \
    static constexpr bool exists = true, scales = false;                                           \
    typedef T native __attribute__((vector_size(bytes)));                                          \
    static TF_INLINE native larger(native a, native b) { return max(a, b); }                       \
    static TF_INLINE native smaller(native a, native b) { return min(a, b); }                      \
    static TF_INLINE native sqrt(native a) { return root(a); }                                     \
    template <int mode> static TF_INLINE native rounded(native a) { return round(a, 8 + mode); }   \
  };
TF_UNIT(float, 16, __builtin_ia32_maxps, __builtin_ia32_minps, __builtin_ia32_sqrtps, __builtin_ia32_roundps)
TF_UNIT(float, 32, __builtin_ia32_maxps256, __builtin_ia32_minps256, __builtin_ia32_sqrtps256, __builtin_ia32_roundps256)
TF_UNIT(double, 16, __builtin_ia32_maxpd, __builtin_ia32_minpd, __builtin_ia32_sqrtpd, __builtin_ia32_roundpd)
TF_UNIT(double, 32, __builtin_ia32_maxpd256, __builtin_ia32_minpd256, __builtin_ia32_sqrtpd256, __builtin_ia32_roundpd256)
#undef TF_UNIT
#endif
#if defined(TF_AVX512) && !defined(__clang__)
#define TF_UNIT(T, kind, bits)                                                                     \
  template <> struct Unit<T, 64> {                                                                 \
    static constexpr bool exists = true, scales = true;                                            \
    typedef T native __attribute__((vector_size(64)));                                             \
    static constexpr int as_set = 4; /* rounding as the thread's */                                \
    static TF_INLINE native larger(native a, native b) {                                           \
      return __builtin_ia32_max##kind##512_mask(a, b, a, bits(-1), as_set);                        \
    }                                                                                              \
    static TF_INLINE native smaller(native a, native b) {                                          \
      return __builtin_ia32_min##kind##512_mask(a, b, a, bits(-1), as_set);                        \
    }                                                                                              \
    static TF_INLINE native sqrt(native a) { return __builtin_ia32_sqrt##kind##512_mask(a, a, bits(-1), as_set); } \
    template <int mode> static TF_INLINE native rounded(native a) {                                \
      return __builtin_ia32_rndscale##kind##_mask(a, 8 + mode, a, bits(-1), as_set);               \
    }                                                                                              \
    static TF_INLINE native scaled(native y, native n) {                                           \
      return __builtin_ia32_scalef##kind##512_mask(y, n, y, bits(-1), as_set);                     \
    }                                                                                              \
  };
TF_UNIT(float, ps, uint16_t) TF_UNIT(double, pd, uint8_t)
#undef TF_UNIT
#endif

// ---------------------------------------------------------------- masks
// of(x): a bit for each 32-bit lane, its sign
template <int bytes> struct Signs { static constexpr bool exists = false; };
#if defined(__AVX__) && !defined(__clang__)
template <> struct Signs<16> {
  static constexpr bool exists = true;
  typedef float native __attribute__((vector_size(16)));
  static TF_INLINE int of(native x) { return __builtin_ia32_movmskps(x); }
};
template <> struct Signs<32> {
  static constexpr bool exists = true;
  typedef float native __attribute__((vector_size(32)));
  static TF_INLINE int of(native x) { return __builtin_ia32_movmskps256(x); }
};
#endif
#if defined(TF_AVX512) && !defined(__clang__)
template <> struct Signs<64> {
  static constexpr bool exists = true;
  typedef int native __attribute__((vector_size(64)));
  static TF_INLINE int of(native x) { return __builtin_ia32_cvtd2mask512(x); }
};
#endif

// ---------------------------------------------------------------- conversions
// From and to a whole register of 64 bytes, which GCC's own conversion takes apart. Integers to narrower ones keep their
// low bits; numbers to integers are truncated.
template <class To, class From, int lanes> struct Conversion { static constexpr bool exists = false; };
#if defined(TF_AVX512) && !defined(__clang__)
#define TF_CONVERSION(To, From, lanes, Wide, Narrow, bits, call, ...)                              \
  template <> struct Conversion<To, From, lanes> {                                                 \
    static constexpr bool exists = true;                                                           \
    typedef To to __attribute__((vector_size(lanes * sizeof(To))));                                \
    typedef From from __attribute__((vector_size(lanes * sizeof(From))));                          \
    typedef Wide wide __attribute__((vector_size(lanes * sizeof(To))));                            \
    typedef Narrow narrow __attribute__((vector_size(lanes * sizeof(From))));                      \
    static TF_INLINE to of(from x) {                                                               \
      return (to)__builtin_ia32_##call##512_mask((narrow)x, wide{}, bits(-1) __VA_OPT__(, ) __VA_ARGS__); \
    }                                                                                              \
  };
TF_CONVERSION(double, float, 8, double, float, uint8_t, cvtps2pd, 4)
TF_CONVERSION(float, double, 8, float, double, uint8_t, cvtpd2ps, 4)
TF_CONVERSION(double, int32_t, 8, double, int, uint8_t, cvtdq2pd)
TF_CONVERSION(int32_t, double, 8, int, double, uint8_t, cvttpd2dq, 4)
TF_CONVERSION(int32_t, int8_t, 16, int, char, uint16_t, pmovsxbd)
TF_CONVERSION(int32_t, uint8_t, 16, int, char, uint16_t, pmovzxbd)
TF_CONVERSION(uint32_t, uint8_t, 16, int, char, uint16_t, pmovzxbd)
TF_CONVERSION(int32_t, int16_t, 16, int, short, uint16_t, pmovsxwd)
TF_CONVERSION(uint32_t, uint16_t, 16, int, short, uint16_t, pmovzxwd)
TF_CONVERSION(int64_t, int32_t, 8, long long, int, uint8_t, pmovsxdq)
TF_CONVERSION(uint64_t, uint32_t, 8, long long, int, uint8_t, pmovzxdq)
TF_CONVERSION(int32_t, int64_t, 8, int, long long, uint8_t, pmovqd)
TF_CONVERSION(uint32_t, uint64_t, 8, int, long long, uint8_t, pmovqd)
TF_CONVERSION(int16_t, int32_t, 16, short, int, uint16_t, pmovdw)
TF_CONVERSION(uint16_t, uint32_t, 16, short, int, uint16_t, pmovdw)
TF_CONVERSION(int8_t, int32_t, 16, char, int, uint16_t, pmovdb)
TF_CONVERSION(uint8_t, int32_t, 16, char, int, uint16_t, pmovdb)
TF_CONVERSION(uint8_t, uint32_t, 16, char, int, uint16_t, pmovdb)
#undef TF_CONVERSION
#endif

}  // namespace tf
