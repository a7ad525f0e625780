// Tile matrix multiplication: C[m, n] (+)= sum over k of A[m, k] * B[k, n], any strides, any element types.
//
// gemm() orients the product so that C is contiguous along n, then picks a form:
//   rows    few rows (decode): B is streamed once, directly from memory
//   dots    few rows and B contiguous along k: dot products along k
//   blocks  everything else: a register block of MR x NV vectors (GotoBLAS / BLIS), B in panels of
//           NV vectors that stay in L1, A in blocks that stay in L2. Narrow or strided operands are
//           converted into the panels; f32 operands that are already contiguous are used in place.
// Sums are carried in f32 (f64 for f64 operands, int64 for integers).
#pragma once
#include "tilefold_math.h"
#include "tilefold_parallel.h"

namespace tf {

#if defined(TF_AVX512)
constexpr int kRows = 14, kVectors = 2;
#else
constexpr int kRows = 6, kVectors = 2;
#endif
constexpr int64_t kBlockK = 256, kBlockM = 16 * kRows;
template <class T> constexpr int kWidth = kNative / int(sizeof(T));  // lanes of a register

template <class A, class B> struct Sum { using type = float; };
template <class B> struct Sum<double, B> { using type = double; };
template <class A> struct Sum<A, double> { using type = double; };
template <> struct Sum<double, double> { using type = double; };
template <class T> constexpr bool is_float = T(0.5) != T(0);
template <class T> constexpr bool is_integer = !__is_class(T) && !__is_same(T, float) && !__is_same(T, double);

template <class T> TF_INLINE T load_as(const auto* p) { return T(load1(p)); }

// ---------------------------------------------------------------- register block
// C[MR, NV vectors] (+)= A * B over K steps; b and c rows are contiguous
template <class T, int MR, int NV>
static __attribute__((noinline)) void micro(int64_t K, const T* a, int64_t sam, int64_t sak, const T* b, int64_t sbk,
                                            T* c, int64_t scm, bool accumulate) {
  constexpr int L = kWidth<T>;
  typedef typename V<T, L>::native vec;
  vec t[MR][NV];
  TF_UNROLL
  for (int m = 0; m < MR; ++m)
    TF_UNROLL
    for (int n = 0; n < NV; ++n) t[m][n] = accumulate ? load_full<L>(c + m * scm + n * L).r : vec{};
  for (int64_t k = 0; k < K; ++k) {
    vec bv[NV];
    TF_UNROLL
    for (int n = 0; n < NV; ++n) bv[n] = load_full<L>(b + n * L).r;
    TF_UNROLL
    for (int m = 0; m < MR; ++m) {
      const vec av = splat<L>(a[m * sam]).r;
      TF_UNROLL
      for (int n = 0; n < NV; ++n) t[m][n] += av * bv[n];
    }
    a += sak;
    b += sbk;
  }
  TF_UNROLL
  for (int m = 0; m < MR; ++m)
    TF_UNROLL
    for (int n = 0; n < NV; ++n) store_full(c + m * scm + n * L, V<T, L>{t[m][n]});
}
// all rows of one panel of NV vectors
template <class T, int MR, int NV>
static void panel(int64_t M, int64_t K, const T* a, int64_t sam, int64_t sak, const T* b, int64_t sbk, T* c, int64_t scm,
                  bool accumulate) {
  int64_t m = 0;
  for (; m + MR <= M; m += MR) micro<T, MR, NV>(K, a + m * sam, sam, sak, b, sbk, c + m * scm, scm, accumulate);
  if constexpr (MR > 1) {
    constexpr int next = MR > 8 ? 8 : MR > 4 ? 4 : MR / 2;
    if (m < M) panel<T, next, NV>(M - m, K, a + m * sam, sam, sak, b, sbk, c + m * scm, scm, accumulate);
  }
}

// ---------------------------------------------------------------- packing
// out[k * width + n] = b[k, n], zero for cols <= n < width
template <class T, class TB>
static void pack_panel(T* out, int64_t width, const TB* b, int64_t sbk, int64_t sbn, int64_t K, int64_t cols) {
  constexpr int L = kWidth<T>;
  if (sbn == 1) {
    for (int64_t k = 0; k < K; ++k)
      for (int64_t n = 0; n < width; n += L) {
        const TB* p = b + k * sbk + n;
        T* q = out + k * width + n;
        if (n + L <= cols) store_full(q, convert<T>(load(p, Full<L>{})));
        else if (n < cols) store_full(q, convert<T>(load(p, Part<L>{int(cols - n)})));
        else store_full(q, splat<L>(T(0)));
      }
    return;
  }
  int64_t done = 0;
  if constexpr (__is_same(T, float)) {
    if (sbk == 1) {
      for (; done + 8 <= K; done += 8)
        for (int64_t n = 0; n < width; n += 8) {
          V<float, 8> r[8];
          TF_UNROLL
          for (int i = 0; i < 8; ++i)
            r[i] = n + i < cols ? convert<float>(load(b + (n + i) * sbn + done, Full<8>{})) : splat<8>(0.0f);
          transpose8(r);
          if (n + 8 <= width)
            TF_UNROLL
            for (int i = 0; i < 8; ++i) store_full(out + (done + i) * width + n, r[i]);
          else
            TF_UNROLL
            for (int i = 0; i < 8; ++i) store_part(out + (done + i) * width + n, r[i], int(width - n));
        }
    }
  }
  for (int64_t k = done; k < K; ++k)
    for (int64_t n = 0; n < width; ++n) out[k * width + n] = n < cols ? load_as<T>(b + k * sbk + n * sbn) : T(0);
}
// rows of A as T, contiguous along whichever of m and k was; returns the strides
template <class T, class TA>
static void pack_rows(T* out, const TA* a, int64_t& sam, int64_t& sak, int64_t M, int64_t K) {
  constexpr int L = kWidth<T>;
  const bool along_m = sam == 1 && sak != 1;
  const int64_t rows = along_m ? K : M, cols = along_m ? M : K, row = along_m ? sak : sam, col = along_m ? sam : sak;
  for (int64_t r = 0; r < rows; ++r)
    strips<L>(0, cols, [&](auto w, int64_t c) TF_BODY {
      store(out + r * cols + c, convert<T>(load_strided(a + r * row + c * col, col, w)), w);
    });
  sam = along_m ? 1 : K;
  sak = along_m ? M : 1;
}

// ---------------------------------------------------------------- forms
template <class T, class TA, class TB>
static void gemm_blocks(int64_t M, int64_t N, int64_t K, const TA* a, int64_t sam, int64_t sak, const TB* b, int64_t sbk,
                        int64_t sbn, T* c, int64_t scm, bool accumulate) {
  constexpr int L = kWidth<T>, NR = kVectors * L;
  alignas(64) static thread_local T panel_b[kBlockK * NR];
  alignas(64) static thread_local T block_a[kBlockM * kBlockK];
  const bool a_in_place = __is_same(TA, T);
  for (int64_t k0 = 0; k0 < K; k0 += kBlockK) {
    const int64_t kc = min64(kBlockK, K - k0);
    const bool add = accumulate || k0 > 0;
    for (int64_t m0 = 0; m0 < M; m0 += kBlockM) {
      const int64_t mc = min64(kBlockM, M - m0);
      const TA* at = a + m0 * sam + k0 * sak;
      const T* rows = (const T*)at;
      int64_t rm = sam, rk = sak;
      if (!a_in_place) {
        pack_rows(block_a, at, rm, rk, mc, kc);
        rows = block_a;
      }
      for (int64_t n0 = 0; n0 < N;) {
        const int64_t left = N - n0, cols = left >= NR ? NR : left >= L ? L : left;
        const TB* bt = b + k0 * sbk + n0 * sbn;
        T* ct = c + m0 * scm + n0;
        n0 += cols;
        const bool whole = cols % L == 0;
        const T* from = panel_b;
        int64_t step = whole ? cols : L;
        if (__is_same(TB, T) && sbn == 1 && whole && (mc < 4 * kRows || sbk * int64_t(sizeof(T)) <= 1024)) {
          from = (const T*)bt;
          step = sbk;
        } else {
          pack_panel(panel_b, step, bt, sbk, sbn, kc, cols);
        }
        if (cols == NR) {
          panel<T, kRows, kVectors>(mc, kc, rows, rm, rk, from, step, ct, scm, add);
        } else if (whole) {
          panel<T, kRows, 1>(mc, kc, rows, rm, rk, from, step, ct, scm, add);
        } else {  // ragged columns: into a block of its own, then the live ones to C
          alignas(64) T edge[kBlockM * L];
          const Part<L> w{int(cols)};
          panel<T, kRows, 1>(mc, kc, rows, rm, rk, from, step, edge, L, false);
          for (int64_t m = 0; m < mc; ++m) {
            const V<T, L> x = load_full<L>(edge + m * L);
            store(ct + m * scm, add ? x + load(ct + m * scm, w) : x, w);
          }
        }
      }
    }
  }
}
#if defined(__AVX512BF16__) && defined(TF_AVX512)
// Pairs of bf16 along k multiplied and summed in f32 by one instruction. A: rows of pairs; B: pairs
// of rows interleaved, [K / 2][NR]; an odd last k is paired with zero.
template <int MR, int NV>
static __attribute__((noinline)) void micro_pairs(int64_t pairs, const uint32_t* a, int64_t row, const uint32_t* b, float* c,
                                                  int64_t scm, bool accumulate) {
  typedef float vf __attribute__((vector_size(64)));
  typedef uint32_t vu __attribute__((vector_size(64)));
  vf t[MR][NV];
  TF_UNROLL
  for (int m = 0; m < MR; ++m)
    TF_UNROLL
    for (int n = 0; n < NV; ++n) t[m][n] = accumulate ? load_full<16>(c + m * scm + n * 16).r : vf{};
  for (int64_t k = 0; k < pairs; ++k) {
    vu bv[NV];
    TF_UNROLL
    for (int n = 0; n < NV; ++n) bv[n] = load_full<16>(b + n * 16).r;
    TF_UNROLL
    for (int m = 0; m < MR; ++m) {
      const vu av = splat<16>(a[m * row]).r;
      TF_UNROLL
      for (int n = 0; n < NV; ++n) __asm__("vdpbf16ps %2, %1, %0" : "+v"(t[m][n]) : "v"(av), "v"(bv[n]));
    }
    a += 1;
    b += NV * 16;
  }
  TF_UNROLL
  for (int m = 0; m < MR; ++m)
    TF_UNROLL
    for (int n = 0; n < NV; ++n) store_full(c + m * scm + n * 16, V<float, 16>{t[m][n]});
}
template <int MR, int NV>
static void panel_pairs(int64_t M, int64_t pairs, const uint32_t* a, int64_t row, const uint32_t* b, float* c, int64_t scm,
                        bool accumulate) {
  int64_t m = 0;
  for (; m + MR <= M; m += MR) micro_pairs<MR, NV>(pairs, a + m * row, row, b, c + m * scm, scm, accumulate);
  if constexpr (MR > 1) {
    constexpr int next = MR > 8 ? 8 : MR > 4 ? 4 : MR / 2;
    if (m < M) panel_pairs<next, NV>(M - m, pairs, a + m * row, row, b, c + m * scm, scm, accumulate);
  }
}
TF_INLINE uint32_t pair_at(const bf16* p, int64_t stride, bool both) {
  return uint32_t(p[0].b) | (both ? uint32_t(p[stride].b) << 16 : 0);
}
static void gemm_pairs(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t sam, int64_t sak, const bf16* b, int64_t sbk,
                       int64_t sbn, float* c, int64_t scm, bool accumulate) {
  constexpr int NR = kVectors * 16;
  constexpr int64_t KP = kBlockK;  // pairs
  alignas(64) static thread_local uint32_t panel_b[KP * NR];
  alignas(64) static thread_local uint32_t block_a[kBlockM * KP];
  for (int64_t k0 = 0; k0 < K; k0 += 2 * KP) {
    const int64_t kc = min64(2 * KP, K - k0), pairs = (kc + 1) / 2;
    const bool add = accumulate || k0 > 0;
    for (int64_t m0 = 0; m0 < M; m0 += kBlockM) {
      const int64_t mc = min64(kBlockM, M - m0);
      for (int64_t m = 0; m < mc; ++m) {
        const bf16* p = a + (m0 + m) * sam + k0 * sak;
        if (sak == 1) {
          block_a[m * pairs + pairs - 1] = 0;
          memcpy(block_a + m * pairs, p, size_t(kc) * 2);
        } else {
          for (int64_t k = 0; k < pairs; ++k) block_a[m * pairs + k] = pair_at(p + 2 * k * sak, sak, 2 * k + 1 < kc);
        }
      }
      for (int64_t n0 = 0; n0 < N; n0 += NR) {
        const int64_t cols = min64(NR, N - n0);
        const bf16* bt = b + k0 * sbk + n0 * sbn;
        for (int64_t k = 0; k < pairs; ++k) {
          const bf16* p = bt + 2 * k * sbk;
          uint32_t* q = panel_b + k * NR;
          if (sbn == 1 && cols == NR && 2 * k + 1 < kc) {
            const auto even = convert<uint32_t>(load_full<NR>((const uint16_t*)p));
            const auto odd = convert<uint32_t>(load_full<NR>((const uint16_t*)(p + sbk)));
            store_full(q, even | (odd << 16));
          } else {
            for (int64_t n = 0; n < NR; ++n) q[n] = n < cols ? pair_at(p + n * sbn, sbk, 2 * k + 1 < kc) : 0;
          }
        }
        float* ct = c + m0 * scm + n0;
        if (cols == NR) {
          panel_pairs<kRows, kVectors>(mc, pairs, block_a, pairs, panel_b, ct, scm, add);
        } else {
          alignas(64) float edge[kBlockM * NR];
          panel_pairs<kRows, kVectors>(mc, pairs, block_a, pairs, panel_b, edge, NR, false);
          for (int64_t m = 0; m < mc; ++m)
            for (int64_t n = 0; n < cols; ++n) ct[m * scm + n] = (add ? ct[m * scm + n] : 0) + edge[m * NR + n];
        }
      }
    }
  }
}
#endif
// R rows at a time, B from memory
template <int R, class T, class TA, class TB>
static void gemm_rows(int64_t N, int64_t K, const TA* a, int64_t sam, int64_t sak, const TB* b, int64_t sbk, T* c,
                      int64_t scm, bool accumulate) {
  constexpr int W = (R == 1 ? 8 : R == 2 ? 4 : 2) * kWidth<T>;
  strips<W>(0, N, [&](auto w, int64_t n) TF_BODY {
    V<T, W> t[R];
    TF_UNROLL
    for (int r = 0; r < R; ++r) t[r] = accumulate ? convert<T>(load(c + r * scm + n, w)) : splat<W>(T(0));
    for (int64_t k = 0; k < K; ++k) {
      const V<T, W> bv = convert<T>(load(b + k * sbk + n, w));
      TF_UNROLL
      for (int r = 0; r < R; ++r) t[r] = t[r] + splat<W>(load_as<T>(a + r * sam + k * sak)) * bv;
    }
    TF_UNROLL
    for (int r = 0; r < R; ++r) store(c + r * scm + n, t[r], w);
  });
}
// c[r * scr + n * scn] (+)= dot(a row r, b row n) for R rows; b is contiguous along k
template <int R, class T, class TA, class TB>
static void gemm_dots(int64_t N, int64_t K, const TA* a, int64_t sar, int64_t sak, const TB* b, int64_t sbn, T* c,
                      int64_t scr, int64_t scn, bool accumulate) {
  constexpr int W = (R == 1 ? 4 : 2) * kWidth<T>;
  constexpr int64_t KC = 512;
  alignas(64) T rows[R][KC];
  for (int64_t k0 = 0; k0 < K; k0 += KC) {
    const int64_t kc = min64(KC, K - k0);
    TF_UNROLL
    for (int r = 0; r < R; ++r)
      for (int64_t k = 0; k < kc; ++k) rows[r][k] = load_as<T>(a + r * sar + (k0 + k) * sak);
    for (int64_t n = 0; n < N; ++n) {
      V<T, W> t[R];
      TF_UNROLL
      for (int r = 0; r < R; ++r) t[r] = splat<W>(T(0));
      strips<W>(0, kc, [&](auto w, int64_t k) TF_BODY {
        const V<T, W> bv = convert<T>(load(b + n * sbn + k0 + k, w));
        TF_UNROLL
        for (int r = 0; r < R; ++r) t[r] = t[r] + convert<T>(load(&rows[r][k], w)) * bv;
      });
      TF_UNROLL
      for (int r = 0; r < R; ++r) {
        T& out = c[r * scr + n * scn];
        out = (accumulate || k0 > 0 ? out : T(0)) + sum_lanes(t[r]);
      }
    }
  }
}
// calls f with 4 rows at a time, then with those that are left: each call streams the other operand once
template <class F> TF_INLINE void by_rows(int64_t M, F f) {
  int64_t m = 0;
  for (; m + 4 <= M; m += 4) f(Full<4>{}, m);
  if (m + 3 == M) f(Full<3>{}, m);
  else if (m + 2 == M) f(Full<2>{}, m);
  else if (m < M) f(Full<1>{}, m);
}

template <class TA, class TB, class TC>
static void gemm(int64_t M, int64_t N, int64_t K, const TA* a, int64_t sam, int64_t sak, const TB* b, int64_t sbk,
                 int64_t sbn, TC* c, int64_t scm, int64_t scn, bool accumulate) {
  if (M <= 0 || N <= 0) return;
  if constexpr (is_integer<TA> && is_integer<TB>) {
    for (int64_t m = 0; m < M; ++m)
      for (int64_t n = 0; n < N; ++n) {
        int64_t t = accumulate ? int64_t(load1(c + m * scm + n * scn)) : 0;
        for (int64_t k = 0; k < K; ++k) t += int64_t(a[m * sam + k * sak]) * int64_t(b[k * sbk + n * sbn]);
        store1(c + m * scm + n * scn, t);
      }
  } else {
    using T = typename Sum<TA, TB>::type;
    if (N == 1) scn = scm == 1 ? 0 : scn;  // a single column: its stride says nothing
    if (M == 1) scm = scn == 1 ? 0 : scm;
    if constexpr (!__is_same(TC, T)) {
      static thread_local Arena arena;
      T* t = (T*)arena.reserve(M * N * int64_t(sizeof(T)));
      gemm(M, N, K, a, sam, sak, b, sbk, sbn, t, N, int64_t(1), false);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n) {
          TC* p = c + m * scm + n * scn;
          store1(p, (accumulate ? load_as<T>(p) : T(0)) + t[m * N + n]);
        }
    } else if (K <= 0) {
      if (!accumulate)
        for (int64_t m = 0; m < M; ++m)
          for (int64_t n = 0; n < N; ++n) c[m * scm + n * scn] = T(0);
    } else if (M <= 4 && sbk == 1 && (sbn != 1 || N == 1)) {
      by_rows(M, [&](auto r, int64_t m) {
        gemm_dots<r.lanes>(N, K, a + m * sam, sam, sak, b, sbn, c + m * scm, scm, scn, accumulate);
      });
    } else if (N <= 4 && sak == 1 && (sam != 1 || M == 1)) {
      by_rows(N, [&](auto r, int64_t n) {
        gemm_dots<r.lanes>(M, K, b + n * sbn, sbn, sbk, a, sam, c + n * scn, scn, scm, accumulate);
      });
    } else if (scn != 1 && scm == 1) {
      gemm(N, M, K, b, sbn, sbk, a, sak, sam, c, scn, scm, accumulate);
    } else if (scn != 1) {  // C is scattered
      static thread_local Arena arena;
      T* t = (T*)arena.reserve(M * N * int64_t(sizeof(T)));
      gemm(M, N, K, a, sam, sak, b, sbk, sbn, t, N, int64_t(1), false);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n) {
          T* p = c + m * scm + n * scn;
          *p = (accumulate ? *p : T(0)) + t[m * N + n];
        }
    } else if (N < kWidth<T> && M > N && sam == 1 && scm != 1) {  // C is too narrow for vectors along n
      static thread_local Arena arena;
      T* t = (T*)arena.reserve(M * N * int64_t(sizeof(T)));
      gemm(N, M, K, b, sbn, sbk, a, sak, sam, t, M, int64_t(1), false);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n) {
          T* p = c + m * scm + n;
          *p = (accumulate ? *p : T(0)) + t[n * M + m];
        }
    } else if (M <= 4 && sbn == 1) {
      by_rows(M, [&](auto r, int64_t m) {
        gemm_rows<r.lanes>(N, K, a + m * sam, sam, sak, b, sbk, c + m * scm, scm, accumulate);
      });
    } else {
#if defined(__AVX512BF16__) && defined(TF_AVX512)
      if constexpr (__is_same(TA, bf16) && __is_same(TB, bf16))
        return gemm_pairs(M, N, K, a, sam, sak, b, sbk, sbn, c, scm, accumulate);
#endif
      gemm_blocks(M, N, K, a, sam, sak, b, sbk, sbn, c, scm, accumulate);
    }
  }
}

}  // namespace tf
