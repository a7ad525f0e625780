// Scalar operations of the expression language on vectors and scalars, without branches.
//
// f32: exp, exp2, expm1, log, log1p, sin, cos, tanh, sigmoid and erf are evaluated in f32 (at most 2 ulp, most below
// 1.5); log2 and pow go through f64 and are rounded once. f64: exp and log are
// vectorised, the others call libm lane by lane. Coefficients: Cephes (exp, log, tanh), fdlibm
// (log in f64), own minimax fits (erf, sin, cos, log2, pow).
#pragma once
#include "tilefold_simd.h"

namespace tf {

#define TF_LANEWISE(name, call)                                               \
  template <int N> TF_INLINE V<double, N> name(V<double, N> x) {              \
    TF_UNROLL                                                                 \
    for (int l = 0; l < N; ++l) set_lane(x, l, call(lane(x, l)));             \
    return x;                                                                 \
  }
#define TF_THROUGH_F64(name)                                                  \
  template <int N> TF_INLINE V<float, N> name(V<float, N> x) {                \
    return convert<float>(name(convert<double>(x)));                          \
  }
#define TF_SCALAR(name)                                                       \
  TF_INLINE float name(float x) { return lane(name(splat<4>(x)), 0); }        \
  TF_INLINE double name(double x) { return lane(name(splat<2>(x)), 0); }

// ---------------------------------------------------------------- signs, bounds
template <class T> struct Bits;
template <> struct Bits<float> { using u = uint32_t; static constexpr u sign = 0x80000000u, inf = 0x7f800000u; };
template <> struct Bits<double> { using u = uint64_t; static constexpr u sign = 1ull << 63, inf = 0x7ffull << 52; };

template <class T, int N> TF_INLINE V<T, N> abs_float(V<T, N> x) {
  using U = typename Bits<T>::u;
  return bits<T>(bits<U>(x) & splat<N>(U(~Bits<T>::sign)));
}
template <class T, int N> TF_INLINE V<T, N> copy_sign(V<T, N> mag, V<T, N> from) {
  using U = typename Bits<T>::u;
  return bits<T>(bits<U>(abs_float(mag)) | (bits<U>(from) & splat<N>(Bits<T>::sign)));
}
template <class T, int N> TF_INLINE V<T, N> abs(V<T, N> x) {
  if constexpr (T(0.5) != T(0)) return abs_float(x);
  else return select(lt(x, splat<N>(T(0))), -x, x);
}
template <class T> TF_INLINE T abs(T x) {
  if constexpr (__is_same(T, float)) return __builtin_fabsf(x);
  else if constexpr (__is_same(T, double)) return __builtin_fabs(x);
  else return x < 0 ? -x : x;
}
template <class T, int N> TF_INLINE V<T, N> sign(V<T, N> x) {  // torch: sign(nan) = 0
  const V<T, N> z = splat<N>(T(0)), one = splat<N>(T(1));
  return select(gt(x, z), one, select(lt(x, z), -one, z));
}
template <class T> TF_INLINE T sign(T x) { return x > 0 ? T(1) : x < 0 ? T(-1) : T(0); }
// b where they are equal or one is NaN
template <class T, int N> TF_INLINE V<T, N> larger(V<T, N> a, V<T, N> b) {
  if constexpr (!V<T, N>::base) return {larger(a.lo, b.lo), larger(a.hi, b.hi)};
  else if constexpr (Unit<T, N * sizeof(T)>::exists) return {Unit<T, N * sizeof(T)>::larger(a.r, b.r)};
  else return select(gt(a, b), a, b);
}
template <class T, int N> TF_INLINE V<T, N> smaller(V<T, N> a, V<T, N> b) {
  if constexpr (!V<T, N>::base) return {smaller(a.lo, b.lo), smaller(a.hi, b.hi)};
  else if constexpr (Unit<T, N * sizeof(T)>::exists) return {Unit<T, N * sizeof(T)>::smaller(a.r, b.r)};
  else return select(lt(a, b), a, b);
}
// NaN propagates
template <class T, int N> TF_INLINE V<T, N> maximum(V<T, N> a, V<T, N> b) {
  const V<T, N> m = larger(a, b);
  if constexpr (T(0.5) != T(0)) return select(ne(a, a), a, m);
  else return m;
}
template <class T, int N> TF_INLINE V<T, N> minimum(V<T, N> a, V<T, N> b) {
  const V<T, N> m = smaller(a, b);
  if constexpr (T(0.5) != T(0)) return select(ne(a, a), a, m);
  else return m;
}
template <class T> TF_INLINE T maximum(T a, T b) { return a != a ? a : a > b ? a : b; }
template <class T> TF_INLINE T minimum(T a, T b) { return a != a ? a : a < b ? a : b; }
template <int N> TF_INLINE M<N> maximum(M<N> a, M<N> b) { return a | b; }
template <int N> TF_INLINE M<N> minimum(M<N> a, M<N> b) { return a & b; }
template <class T, int N> TF_INLINE M<N> isnan(V<T, N> x) { return ne(x, x); }
template <class T> TF_INLINE bool isnan(T x) { return x != x; }
template <class T, int N> TF_INLINE M<N> isinf(V<T, N> x) { return eq(abs_float(x), splat<N>(T(__builtin_inf()))); }
template <class T> TF_INLINE bool isinf(T x) { return abs(x) == T(__builtin_inf()); }

// ---------------------------------------------------------------- rounding
// mode: 0 half to even, 1 down, 2 up, 3 to zero
template <int mode, class T, int N> TF_INLINE V<T, N> rounded(V<T, N> x) {
  if constexpr (!V<T, N>::base) return {rounded<mode>(x.lo), rounded<mode>(x.hi)};
  else return {Unit<T, N * sizeof(T)>::template rounded<mode>(x.r)};
}
// whether a register (or the several that V<T, N> is) has the instructions of Unit
template <class T, int N> constexpr bool has_unit = Unit<T, V<T, N>::base ? N * sizeof(T) : kNative>::exists;
template <class T, int N> TF_INLINE V<T, N> round(V<T, N> x) {  // half to even
  if constexpr (has_unit<T, N>) return rounded<0>(x);
  const V<T, N> big = splat<N>(T(sizeof(T) == 4 ? 0x1p23 : 0x1p52)), mag = abs_float(x);
  return select(lt(mag, big), copy_sign((mag + big) - big, x), x);
}
template <class T, int N> TF_INLINE V<T, N> floor(V<T, N> x) {
  if constexpr (has_unit<T, N>) return rounded<1>(x);
  const V<T, N> r = round(x);
  return copy_sign(select(gt(r, x), r - splat<N>(T(1)), r), x);
}
template <class T, int N> TF_INLINE V<T, N> ceil(V<T, N> x) {
  if constexpr (has_unit<T, N>) return rounded<2>(x);
  return -floor(-x);
}
template <class T, int N> TF_INLINE V<T, N> trunc(V<T, N> x) {
  if constexpr (has_unit<T, N>) return rounded<3>(x);
  return copy_sign(floor(abs_float(x)), x);
}
TF_SCALAR(round) TF_SCALAR(floor) TF_SCALAR(ceil) TF_SCALAR(trunc)

template <class T, int N> TF_INLINE V<T, N> sqrt(V<T, N> x) {
  if constexpr (!V<T, N>::base) return {sqrt(x.lo), sqrt(x.hi)};
  else if constexpr (Unit<T, N * sizeof(T)>::exists) return {Unit<T, N * sizeof(T)>::sqrt(x.r)};
  TF_UNROLL
  for (int l = 0; l < N; ++l) set_lane(x, l, T(sizeof(T) == 4 ? __builtin_sqrtf(lane(x, l)) : __builtin_sqrt(lane(x, l))));
  return x;
}
TF_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
TF_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
template <class T, int N> TF_INLINE V<T, N> rsqrt(V<T, N> x) { return splat<N>(T(1)) / sqrt(x); }
template <class T> TF_INLINE T rsqrt(T x) { return T(1) / sqrt(x); }

// ---------------------------------------------------------------- division by one number
// A vector division takes as long as a dozen multiplications. x / c is q = x r with r = 1 / c, corrected once by what
// x - q c leaves: with a multiplication that is not rounded before it is subtracted this is the rounded quotient (Markstein
// 1990) wherever nothing overflows or is denormal, and one unit in the last place off at most elsewhere.
template <class T> struct Divisor { T c, r; bool near; };
template <class T> TF_INLINE Divisor<T> divisor(T c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const T mag = abs(c);
  return {c, T(1) / c, mag >= T(0x1p-60) && mag <= T(0x1p60)};
#else
  return {c, c, false};
#endif
}
template <class T, int N> TF_INLINE V<T, N> quotient(V<T, N> x, Divisor<T> d) {
  using U = typename Bits<T>::u;
  const V<T, N> c = splat<N>(d.c), r = splat<N>(d.r);
  if (__builtin_expect(!d.near, 0)) return x / c;
  const V<T, N> q = x * r, y = q + (x - q * c) * r;
  const V<T, N> signed_y = bits<T>(bits<U>(y) | (bits<U>(q) & splat<N>(Bits<T>::sign)));  // of zero
  return select(lt(abs_float(q), splat<N>(T(__builtin_inf()))), signed_y, q);
}

// ---------------------------------------------------------------- exp, log
// y * 2^n for integer n in [-252, 254], given as t = n + 1.5 * 2^23; also where the result is denormal
constexpr float kMagic = 0x1.8p23f;
template <int N> TF_INLINE V<float, N> scale(V<float, N> y, V<float, N> t) {
  if constexpr (!V<float, N>::base) {
    return {scale(y.lo, t.lo), scale(y.hi, t.hi)};
  } else if constexpr (Unit<float, N * sizeof(float)>::scales) {
    return {Unit<float, N * sizeof(float)>::scaled(y.r, (t - splat<N>(kMagic)).r)};
  } else {
    const V<int32_t, N> n = bits<int32_t>(t) - bits<int32_t>(splat<N>(kMagic)), half = n >> 1, rest = n - half;
    const V<int32_t, N> bias = splat<N>(int32_t(127));
    return y * bits<float>((half + bias) << 23) * bits<float>((rest + bias) << 23);
  }
}
template <int N> TF_INLINE V<float, N> exp_tail(V<float, N> r) {  // (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2
  V<float, N> p = splat<N>(1.9875691500e-4f);
  p = p * r + splat<N>(1.3981999507e-3f);
  p = p * r + splat<N>(8.3334519073e-3f);
  p = p * r + splat<N>(4.1665795894e-2f);
  p = p * r + splat<N>(1.6666665459e-1f);
  return p * r + splat<N>(5.0000001201e-1f);
}
template <int N> TF_INLINE V<float, N> exp_reduced(V<float, N> r) {
  return exp_tail(r) * (r * r) + (r + splat<N>(1.0f));
}
template <class T, int N> TF_INLINE V<T, N> clamp(V<T, N> x, T lo, T hi) {  // NaN stays
  return smaller(splat<N>(hi), larger(splat<N>(lo), x));
}
template <int N> TF_INLINE V<float, N> exp_within(V<float, N> x) {  // |x| <= 104, or NaN
  const V<float, N> t = x * splat<N>(1.44269504088896341f) + splat<N>(kMagic), n = t - splat<N>(kMagic);
  const V<float, N> r = (x - n * splat<N>(0.693359375f)) + n * splat<N>(2.12194440e-4f);
  return scale(exp_reduced(r), t);
}
// A result that is zero because it is too small costs some CPUs a hundred cycles (an assist), and masked scores are -inf:
// where e^x rounds to zero, f is evaluated at zero.
template <class T, int N, class F> TF_INLINE V<T, N> nonzero_from(V<T, N> x, T least, F f) {
  const M<N> none = lt(x, splat<N>(least));
  const V<T, N> zero = splat<N>(T(0));
  return select(none, zero, f(select(none, zero, x)));
}
template <int N> TF_INLINE V<float, N> exp(V<float, N> x) {
  return nonzero_from(smaller(splat<N>(89.0f), x), -103.9721f, [](V<float, N> y) TF_BODY { return exp_within(y); });
}
template <int N> TF_INLINE V<float, N> exp2(V<float, N> x) {
  return nonzero_from(smaller(splat<N>(129.0f), x), -150.0f, [](V<float, N> y) TF_BODY {
    const V<float, N> t = y + splat<N>(kMagic), n = t - splat<N>(kMagic);
    return scale(exp_reduced((y - n) * splat<N>(0.693147180559945f)), t);
  });
}
template <int N> TF_INLINE V<double, N> exp_scaled(V<double, N> n, V<double, N> r) {  // 2^n * e^r
  V<double, N> p = splat<N>(1.0 / 6227020800.0);
  const double c[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                      1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5};
  TF_UNROLL
  for (int k = 0; k < 11; ++k) p = p * r + splat<N>(c[k]);
  const V<double, N> y = p * (r * r) + r + splat<N>(1.0);
  const V<int64_t, N> e = convert<int64_t>(convert<int32_t>(n)), half = e >> 1, bias = splat<N>(int64_t(1023));
  return y * bits<double>((half + bias) << 52) * bits<double>((e - half + bias) << 52);
}
template <int N> TF_INLINE V<double, N> exp(V<double, N> x) {
  return nonzero_from(clamp(x, -746.0, 710.0), -745.14, [](V<double, N> y) TF_BODY {
    const V<double, N> m = select(ne(y, y), splat<N>(0.0), y), n = round(m * splat<N>(1.4426950408889634));
    const V<double, N> r = (m - n * splat<N>(6.93147180369123816490e-1)) - n * splat<N>(1.90821492927058770002e-10);
    return select(ne(y, y), y, exp_scaled(n, r));
  });
}
template <int N> TF_INLINE V<double, N> exp2(V<double, N> x) {
  return nonzero_from(clamp(x, -1076.0, 1025.0), -1075.0, [](V<double, N> y) TF_BODY {
    const V<double, N> m = select(ne(y, y), splat<N>(0.0), y), n = round(m);
    return select(ne(y, y), y, exp_scaled(n, (m - n) * splat<N>(0.6931471805599453)));
  });
}

// log of 0 is -inf, of a negative number NaN, of inf inf
template <class T, int N> TF_INLINE V<T, N> log_edges(V<T, N> x, V<T, N> y) {
  const V<T, N> inf = splat<N>(T(__builtin_inf())), zero = splat<N>(T(0));
  y = select(eq(x, inf), x, y);
  y = select(eq(x, zero), -inf, y);
  return select(ge(x, zero), y, splat<N>(T(__builtin_nan(""))));
}
template <int N> TF_INLINE V<float, N> log(V<float, N> x) {
  const M<N> tiny = lt(x, splat<N>(0x1p-126f));
  const V<int32_t, N> b = bits<int32_t>(select(tiny, x * splat<N>(0x1p23f), x));
  V<int32_t, N> e = (b >> 23) - splat<N>(int32_t(126)) - select(tiny, splat<N>(int32_t(23)), splat<N>(int32_t(0)));
  V<float, N> m = bits<float>((b & splat<N>(int32_t(0x7fffff))) | splat<N>(int32_t(0x3f000000)));  // [0.5, 1)
  const M<N> less = lt(m, splat<N>(0.707106781186547524f));
  e = e - select(less, splat<N>(int32_t(1)), splat<N>(int32_t(0)));
  m = select(less, m + m, m) - splat<N>(1.0f);
  const V<float, N> n = convert<float>(e), z = m * m;
  const float c[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                     -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  V<float, N> p = splat<N>(7.0376836292e-2f);
  TF_UNROLL
  for (int k = 0; k < 8; ++k) p = p * m + splat<N>(c[k]);
  V<float, N> y = p * m * z + n * splat<N>(-2.12194440e-4f);
  y = y - z * splat<N>(0.5f);
  return log_edges(x, (m + y) + n * splat<N>(0.693359375f));
}
template <int N> TF_INLINE V<double, N> log(V<double, N> x) {
  const M<N> tiny = lt(x, splat<N>(0x1p-1022));
  const V<int64_t, N> b = bits<int64_t>(select(tiny, x * splat<N>(0x1p54), x));
  V<int32_t, N> e = convert<int32_t>((bits<int64_t>(bits<uint64_t>(b) >> 52)) - splat<N>(int64_t(1022)));
  e = e - select(tiny, splat<N>(int32_t(54)), splat<N>(int32_t(0)));
  V<double, N> m = bits<double>((b & splat<N>(int64_t(0xfffffffffffffll))) | splat<N>(int64_t(0x3fe0000000000000ll)));
  const M<N> less = lt(m, splat<N>(0.70710678118654752440));
  e = e - select(less, splat<N>(int32_t(1)), splat<N>(int32_t(0)));
  const V<double, N> f = select(less, m + m, m) - splat<N>(1.0), n = convert<double>(e);
  const V<double, N> s = f / (f + splat<N>(2.0)), z = s * s, hfsq = splat<N>(0.5) * f * f;
  const double c[] = {1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
                      2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01};
  V<double, N> p = splat<N>(1.479819860511658591e-01);
  TF_UNROLL
  for (int k = 0; k < 6; ++k) p = p * z + splat<N>(c[k]);
  const V<double, N> tail = s * (hfsq + p * z) + n * splat<N>(1.90821492927058770002e-10);
  return log_edges(x, n * splat<N>(6.93147180369123816490e-1) - ((hfsq - tail) - f));
}
TF_SCALAR(exp) TF_SCALAR(exp2) TF_SCALAR(log)

// log2 in f64 to 2^-35 of itself, for what positive finite f32 numbers are in f64 (none is denormal there); no division
template <int N> TF_INLINE V<double, N> log2_of_single(V<double, N> a) {
  const V<int64_t, N> b = bits<int64_t>(a), root = splat<N>(int64_t(0x3fe6a09e667f3bcdll));  // of one half
  const V<int32_t, N> e = bits<int32_t>(convert<uint32_t>(bits<uint64_t>(b - root) >> 32)) >> 20;
  const V<double, N> f = bits<double>(b - (convert<int64_t>(e) << 52)) - splat<N>(1.0);  // of a number in [0.707, 1.414)
  const double c[] = {-0.14283952382697582, 0.14474866855744298,  -0.14315645933697429, 0.15876975543217913,
                      -0.18030059584461906, 0.20617536306938779,  -0.24045316611413522, 0.28853729335173858,
                      -0.36067367481313414, 0.48089836139696156,  -0.7213475208688355,  1.4426950408687015};
  V<double, N> p = splat<N>(0.077370289149922714);
  TF_UNROLL
  for (int k = 0; k < 12; ++k) p = p * f + splat<N>(c[k]);
  return p * f + convert<double>(e);
}
// 2^x in f64 to 2^-28 of itself, for |x| below 1000 or NaN
template <int N> TF_INLINE V<double, N> exp2_of_single(V<double, N> x) {
  const V<double, N> magic = splat<N>(0x1.8p52), t = x + magic, r = x - (t - magic);
  const double c[] = {0.0013398905371375235, 0.0096184371666547375, 0.055503323978282129, 0.24022647912717232,
                      0.69314720288529026,   1.0};
  V<double, N> p = splat<N>(0.00015353501319325173);
  TF_UNROLL
  for (int k = 0; k < 6; ++k) p = p * r + splat<N>(c[k]);
  return bits<double>(bits<int64_t>(p) + (bits<int64_t>(t) << 52));
}
template <int N> TF_INLINE V<float, N> log2(V<float, N> x) {
  return log_edges(x, convert<float>(log2_of_single(convert<double>(x))));
}
template <int N> TF_INLINE V<float, N> log1p(V<float, N> x) {  // what 1 + x lost by rounding is added over 1 + x
  const V<float, N> one = splat<N>(1.0f), u = x + one, y = log(u) + (x - (u - one)) / u;
  return select(lt(abs_float(x), splat<N>(0x1p-26f)), x, select(eq(x, splat<N>(__builtin_inff())), x,
         select(eq(x, -one), splat<N>(-__builtin_inff()), y)));
}
template <int N> TF_INLINE V<float, N> expm1(V<float, N> x) {  // 2^n e^r - 1 = 2 (2^(n-1) (e^r - 1) + (2^(n-1) - 1/2))
  const V<float, N> c = clamp(x, -18.0f, 89.0f);
  const V<float, N> t = c * splat<N>(1.44269504088896341f) + splat<N>(kMagic), n = t - splat<N>(kMagic);
  const V<float, N> r = (c - n * splat<N>(0.693359375f)) + n * splat<N>(2.12194440e-4f);
  const V<int32_t, N> power = bits<int32_t>(t) - bits<int32_t>(splat<N>(kMagic)) + splat<N>(int32_t(126));
  const V<float, N> s = bits<float>(power << 23), y = s * (exp_tail(r) * (r * r) + r) + (s - splat<N>(0.5f));
  return select(lt(abs_float(x), splat<N>(0x1p-26f)), x, y + y);
}
TF_LANEWISE(log2, __builtin_log2) TF_LANEWISE(log1p, __builtin_log1p) TF_LANEWISE(expm1, __builtin_expm1)
TF_SCALAR(log2) TF_SCALAR(log1p) TF_SCALAR(expm1)

// ---------------------------------------------------------------- sin, cos
TF_LANEWISE(sin, __builtin_sin) TF_LANEWISE(cos, __builtin_cos)
// x = n pi/2 + r + rest with |r| up to pi/4; the last bits of `quarters` are n's. For |x| < kFar.
template <int N> struct Turn { V<float, N> r, rest; V<int32_t, N> quarters; };
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
// pi/2 in three parts. With multiplications that are not rounded before they are subtracted, the first difference is a
// multiple of 2^-23 below one and exact, the second is rounded once, whatever cancels.
constexpr float kFar = 1e6f;
template <int N> TF_INLINE Turn<N> turn(V<float, N> x) {
  const V<float, N> t = x * splat<N>(0.63661977236758134f) + splat<N>(kMagic), n = t - splat<N>(kMagic);
  const V<float, N> r = (x - n * splat<N>(0x1.921fb6p+0f)) - n * splat<N>(-0x1.777a5cp-25f);
  return {r, n * splat<N>(0x1.ee59dap-50f), bits<int32_t>(t)};
}
#else
constexpr float kFar = 1e6f;
template <int N> TF_INLINE Turn<N> turn(V<float, N> x) {
  const V<double, N> magic = splat<N>(0x1.8p52), d = convert<double>(x), t = d * splat<N>(0.63661977236758134308) + magic;
  const V<double, N> n = t - magic;
  const V<double, N> r = (d - n * splat<N>(1.57079632673412561417)) - n * splat<N>(6.07710050650619224932e-11);
  return {convert<float>(r), splat<N>(0.0f), convert<int32_t>(bits<int64_t>(t))};
}
#endif
// sine of x + quarters * pi/2; far from zero libm takes over
template <int N> TF_INLINE V<float, N> sine(V<float, N> x, int quarters) {
  const Turn<N> turned = turn(x);
  const V<float, N> r = turned.r, z = r * r;
  V<float, N> p = splat<N>(2.71804649647e-6f);
  p = p * z + splat<N>(-0.000198393044376f);
  p = p * z + splat<N>(0.0083333292807f);
  p = p * z + splat<N>(-0.166666666406f);
  V<float, N> q = splat<N>(2.44324151134e-5f);
  q = q * z + splat<N>(-0.00138873098838f);
  q = q * z + splat<N>(0.0416666455547f);
  const V<float, N> s = r + (p * (z * r) + turned.rest), c = (q * z - splat<N>(0.5f)) * z + splat<N>(1.0f);
  const V<int32_t, N> at = turned.quarters + splat<N>(int32_t(quarters)), odd = splat<N>(int32_t(1));
  const V<float, N> y = select(eq(at & odd, odd), c, s);
  V<float, N> out = bits<float>(bits<int32_t>(y) ^ ((at & splat<N>(int32_t(2))) << 30));
  const M<N> far = !(lt(abs_float(x), splat<N>(kFar)));
  if (__builtin_expect(any(far), 0))
    for (int l = 0; l < N; ++l)
      if (lane(far.v, l)) set_lane(out, l, float(quarters ? __builtin_cos(lane(x, l)) : __builtin_sin(lane(x, l))));
  return out;
}
template <int N> TF_INLINE V<float, N> sin(V<float, N> x) { return select(eq(x, splat<N>(0.0f)), x, sine(x, 0)); }
template <int N> TF_INLINE V<float, N> cos(V<float, N> x) { return sine(x, 1); }
TF_SCALAR(sin) TF_SCALAR(cos)

// ---------------------------------------------------------------- tanh, sigmoid, erf
template <int N> TF_INLINE V<float, N> tanh(V<float, N> x) {
  const V<float, N> a = abs_float(x), z = x * x, one = splat<N>(1.0f);
  V<float, N> p = splat<N>(-5.70498872745e-3f);
  p = p * z + splat<N>(2.06390887954e-2f);
  p = p * z + splat<N>(-5.37397155531e-2f);
  p = p * z + splat<N>(1.33314422036e-1f);
  p = p * z + splat<N>(-3.33332819422e-1f);
  const V<float, N> large = one - splat<N>(2.0f) / (exp(a + a) + one);
  return select(lt(a, splat<N>(0.625f)), x + x * z * p, copy_sign(large, x));
}
template <int N> TF_INLINE V<float, N> erf(V<float, N> x) {
  const V<float, N> a = abs_float(x), z = x * x;
  V<float, N> p = splat<N>(7.853857823647559e-05f);
  p = p * z + splat<N>(-0.0008010192541405559f);
  p = p * z + splat<N>(0.005188327748328447f);
  p = p * z + splat<N>(-0.026853810995817184f);
  p = p * z + splat<N>(0.1128358542919159f);
  p = p * z + splat<N>(-0.3761262595653534f);
  p = p * z + splat<N>(0.1283791670955126f);  // 2 / sqrt(pi) - 1
  const V<float, N> b = smaller(splat<N>(4.0f), a);
  V<float, N> q = splat<N>(3.557007403287571e-06f);
  q = q * b + splat<N>(-2.8435380954761058e-05f);
  q = q * b + splat<N>(-0.0001387496158713475f);
  q = q * b + splat<N>(0.0031820153817534447f);
  q = q * b + splat<N>(-0.023091642186045647f);
  q = q * b + splat<N>(0.1056690588593483f);
  q = q * b + splat<N>(0.6354101300239563f);
  q = q * b + splat<N>(1.1285996437072754f);
  const V<float, N> large = copy_sign(splat<N>(1.0f) - exp_within(-(q * b)), x);
  return select(lt(a, splat<N>(1.0f)), x + x * p, large);
}
TF_LANEWISE(tanh, __builtin_tanh) TF_LANEWISE(erf, __builtin_erf)
template <class T, int N> TF_INLINE V<T, N> sigmoid(V<T, N> x) {
  const V<T, N> e = exp(-abs_float(x)), one = splat<N>(T(1));
  return select(ge(x, splat<N>(T(0))), one, e) / (one + e);
}
TF_SCALAR(tanh) TF_SCALAR(erf) TF_SCALAR(sigmoid)

// ---------------------------------------------------------------- erfinv, lgamma
// Winitzki's approximation, and Halley's method: what is left of the larger half is 1 - |x|, which is exact.
TF_INLINE double inverse_erf(double x) {
  const double a = __builtin_fabs(x);
  if (!(a < 1)) return a == 1 ? x * __builtin_inf() : __builtin_nan("");
  const double s = __builtin_log1p(-a * a), t = 4.330746750799873 + s / 2;
  double y = __builtin_sqrt(__builtin_fmax(__builtin_sqrt(t * t - s / 0.147) - t, 0.0));
  for (int n = 0; n < 3; ++n) {
    const double d = a < 0.5 ? __builtin_erf(y) - a : (1 - a) - __builtin_erfc(y);
    const double u = d * __builtin_exp(y * y) * 0.88622692545275801365;  // sqrt(pi) / 2
    y -= u / (1 + y * u);
  }
  return __builtin_copysign(y, x);
}
TF_LANEWISE(erfinv, inverse_erf) TF_LANEWISE(lgamma, __builtin_lgamma)
TF_THROUGH_F64(erfinv) TF_THROUGH_F64(lgamma)
TF_SCALAR(erfinv) TF_SCALAR(lgamma)

// ---------------------------------------------------------------- pow, division of integers
template <int N> TF_INLINE V<double, N> pow(V<double, N> x, V<double, N> y) {
  for (int l = 0; l < N; ++l) set_lane(x, l, __builtin_pow(lane(x, l), lane(y, l)));
  return x;
}
template <int N> TF_INLINE V<float, N> pow(V<float, N> x, V<float, N> y) {
  const V<float, N> a = abs_float(x), one = splat<N>(1.0f), zero = splat<N>(0.0f), inf = splat<N>(__builtin_inff());
  const V<double, N> power = convert<double>(y) * log2_of_single(convert<double>(a));
  V<float, N> p = convert<float>(nonzero_from(smaller(splat<N>(200.0), power), -150.0,
                                              [](V<double, N> e) TF_BODY { return exp2_of_single(e); }));
  const M<N> nought = eq(a, zero), above = eq(a, inf), falls = lt(y, zero);
  p = select(nought | above, select(ne(falls, nought), zero, inf), p);
  const V<float, N> whole = round(y), halves = y * splat<N>(0.5f);
  const M<N> odd = eq(whole, y) & ne(round(halves), halves), negative = lt(bits<int32_t>(x), splat<N>(int32_t(0)));
  p = select(odd & negative, -p, p);
  p = select(negative & !above & !nought & ne(whole, y), splat<N>(__builtin_nanf("")), p);
  p = select(ne(x, x) | ne(y, y), x + y, p);
  p = select(eq(a, one) & isinf(y), one, p);
  return select(eq(y, zero) | eq(x, one), one, p);
}
TF_INLINE float pow(float x, float y) { return lane(pow(splat<4>(x), splat<4>(y)), 0); }
TF_INLINE double pow(double x, double y) { return __builtin_pow(x, y); }
TF_INLINE int64_t pow(int64_t x, int64_t n) {  // a negative exponent leaves 0, or +-1
  if (n < 0) return x == 1 ? 1 : x == -1 ? ((n & 1) ? -1 : 1) : 0;
  uint64_t out = 1, b = uint64_t(x);
  for (; n > 0; n >>= 1, b *= b)
    if (n & 1) out *= b;
  return int64_t(out);
}
TF_INLINE int32_t pow(int32_t x, int32_t n) { return int32_t(pow(int64_t(x), int64_t(n))); }

template <class T> TF_INLINE T floordiv(T a, T b) {
  if constexpr (T(0.5) != T(0)) {
    // as torch: exact remainder first, so that the quotient is not rounded up
    if (b == T(0)) return a / b;
    const T m = T(__builtin_fmod(double(a), double(b)));
    T d = (a - m) / b;
    if (m != T(0) && ((b < T(0)) != (m < T(0)))) d -= T(1);
    if (d == T(0)) return T(__builtin_copysign(0.0, double(a) / double(b)));
    const T f = floor(d);
    return d - f > T(0.5) ? f + T(1) : f;
  } else {
    if (b == 0) return 0;
    if (b == -1) return T(0) - a;
    const T q = a / b;
    return q * b != a && ((a < 0) != (b < 0)) ? q - 1 : q;
  }
}
template <class T> TF_INLINE T mod(T a, T b) {
  if constexpr (T(0.5) != T(0)) {
    const T m = T(__builtin_fmod(double(a), double(b)));
    return m != T(0) && ((b < T(0)) != (m < T(0))) ? m + b : m;
  } else {
    if (b == 0 || b == -1) return 0;
    const T m = a % b;
    return m != 0 && ((m < 0) != (b < 0)) ? m + b : m;
  }
}
#define TF_PAIRWISE(name, T)                                                  \
  template <int N> TF_INLINE V<T, N> name(V<T, N> a, V<T, N> b) {             \
    TF_UNROLL                                                                 \
    for (int l = 0; l < N; ++l) set_lane(a, l, name(lane(a, l), lane(b, l))); \
    return a;                                                                 \
  }
TF_PAIRWISE(floordiv, float) TF_PAIRWISE(floordiv, double) TF_PAIRWISE(floordiv, int32_t) TF_PAIRWISE(floordiv, int64_t)
TF_PAIRWISE(mod, float) TF_PAIRWISE(mod, double) TF_PAIRWISE(mod, int32_t) TF_PAIRWISE(mod, int64_t)
TF_PAIRWISE(pow, int32_t) TF_PAIRWISE(pow, int64_t)

// ---------------------------------------------------------------- random numbers of a seed and a place
// Philox-4x32-10 of the counter (column / 4, row, 0, 0); of its four words that of column % 4 (algebra/philox.py)
TF_INLINE uint32_t high_word(uint32_t k, uint32_t x) { return uint32_t((uint64_t(k) * x) >> 32); }
template <int N> TF_INLINE V<uint32_t, N> high_word(V<uint32_t, N> k, V<uint32_t, N> x) {
  return convert<uint32_t>((convert<uint64_t>(k) * convert<uint64_t>(x)) >> 32);
}
template <int ROUNDS = 10, class U, class Spread> TF_INLINE void philox(U& a, U& b, U& c, U& d, int64_t seed, Spread spread) {
  uint32_t k = uint32_t(seed), m = uint32_t(uint64_t(seed) >> 32);
  const U first = spread(0xD2511F53u), second = spread(0xCD9E8D57u);
  TF_UNROLL
  for (int round = 0; round < ROUNDS; ++round) {
    const U next = high_word(second, c) ^ b ^ spread(k), other = high_word(first, a) ^ d ^ spread(m);
    b = second * c;
    d = first * a;
    a = next;
    c = other;
    k += 0x9E3779B9u;
    m += 0xBB67AE85u;
  }
}
TF_INLINE int32_t random(int64_t seed, int32_t row, int32_t column) {
  uint32_t word[4] = {uint32_t(column) >> 2, uint32_t(row), 0, 0};
  philox(word[0], word[1], word[2], word[3], seed, [](uint32_t x) { return x; });
  return int32_t(word[column & 3] >> 8);
}
template <int N> TF_INLINE V<int32_t, N> random(int64_t seed, V<int32_t, N> row, V<int32_t, N> column) {
  const auto spread = [](uint32_t x) { return splat<N>(x); };
  V<uint32_t, N> a = bits<uint32_t>(column) >> 2, b = bits<uint32_t>(row), c = spread(0), d = spread(0);
  philox(a, b, c, d, seed, spread);
  const M<N> odd = to_mask(column & splat<N>(int32_t(1))), upper = to_mask(column & splat<N>(int32_t(2)));
  return bits<int32_t>(select(upper, select(odd, d, c), select(odd, b, a)) >> 8);
}

// of 16 bits, of seven rounds: a counter's eight are those of two columns, in rows and columns 8 apart
TF_INLINE int32_t random16(int64_t seed, int32_t batch, int32_t row, int32_t column) {
  uint32_t a = uint32_t(column & ~9), b = uint32_t(row & ~8), c = 0, d = uint32_t(batch);
  philox<7>(a, b, c, d, seed, [](uint32_t x) { return x; });
  const uint32_t above = column & 8 ? b : a, below = column & 8 ? d : c, word = row & 8 ? below : above;
  return int32_t(column & 1 ? word >> 16 : word & 0xFFFF);
}
template <int N>
TF_INLINE V<int32_t, N> random16(int64_t seed, V<int32_t, N> batch, V<int32_t, N> row, V<int32_t, N> column) {
  const auto spread = [](uint32_t x) { return splat<N>(x); };
  V<uint32_t, N> a = bits<uint32_t>(column) & spread(~9u), b = bits<uint32_t>(row) & spread(~8u);
  V<uint32_t, N> c = spread(0), d = bits<uint32_t>(batch);
  philox<7>(a, b, c, d, seed, spread);
  const M<N> right = to_mask(column & splat<N>(int32_t(8))), below = to_mask(row & splat<N>(int32_t(8)));
  const M<N> odd = to_mask(column & splat<N>(int32_t(1)));
  const V<uint32_t, N> word = select(below, select(right, d, c), select(right, b, a));
  return bits<int32_t>(select(odd, word >> 16, word & spread(0xFFFFu)));
}

// ---------------------------------------------------------------- conversions between compute types
// float to integer truncates; what does not fit is unspecified, as in torch
template <class T, class X, int N> TF_INLINE auto to(V<X, N> x) {
  if constexpr (__is_same(T, bool)) return to_mask(x);
  else return convert<T>(x);
}
template <class T, int N> TF_INLINE auto to(M<N> m) {
  if constexpr (__is_same(T, bool)) return m;
  else return from_mask<T>(m);
}

// ---------------------------------------------------------------- reductions of the lanes of a vector
#define TF_FOLD_LANES(name, combine)                                          \
  template <class T, int N> TF_INLINE T name(V<T, N> x) {                     \
    if constexpr (N == 2) {                                                   \
      const T a = lane(x, 0), b = lane(x, 1);                                 \
      return combine;                                                         \
    } else {                                                                  \
      const V<T, N / 2> a = low(x), b = high(x);                              \
      return name(combine);                                                   \
    }                                                                         \
  }
TF_FOLD_LANES(sum_lanes, a + b) TF_FOLD_LANES(prod_lanes, a * b)
TF_FOLD_LANES(max_lanes, maximum(a, b)) TF_FOLD_LANES(min_lanes, minimum(a, b))
TF_FOLD_LANES(or_lanes, a | b) TF_FOLD_LANES(and_lanes, a & b)
template <int N> TF_INLINE bool any_lanes(M<N> m) { return any(m); }
template <int N> TF_INLINE bool all_lanes(M<N> m) { return !any(!m); }
template <int N> TF_INLINE bool max_lanes(M<N> m) { return any_lanes(m); }
template <int N> TF_INLINE bool min_lanes(M<N> m) { return all_lanes(m); }

}  // namespace tf
