// Products of 16-bit matrices by cuBLASLt, which is asked once for an instruction how to compute it: torch asks at every
// call, and that takes the host longer than a launch. Python finds the functions (`runtime.cublas`): no CUDA is needed to
// build this. Constants as in cublasLt.h, whose values are part of the library's interface.
//
// A long contraction of a small result is cut, and its parts need room: torch gives cuBLAS 32 MiB on an H200 and cuBLASLt 1,
// in which 256 x 768 sums over 122,880 stay whole, in tiles of 32 x 64 (a training step 480 us; Inductor's, whose product
// torch has cut, 378). What a product wants beyond that it has while it runs.

#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <type_traits>

namespace cublas {

using at::Tensor;
using Opaque = void*;

struct Algorithm { uint64_t words[8]; };
struct Found { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; };
static_assert(sizeof(Found) == 96);

// The library's, then torch's: the handle of this thread, the workspace that it gives the current stream, and the bytes of
// that which its calls of cuBLAS have.
struct Functions {
  int (*make_product)(Opaque*, int, int) = nullptr;
  int (*drop_product)(Opaque) = nullptr;
  int (*set_product)(Opaque, int, const void*, size_t) = nullptr;
  int (*make_layout)(Opaque*, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*drop_layout)(Opaque) = nullptr;
  int (*set_layout)(Opaque, int, const void*, size_t) = nullptr;
  int (*make_wish)(Opaque*) = nullptr;
  int (*drop_wish)(Opaque) = nullptr;
  int (*set_wish)(Opaque, int, const void*, size_t) = nullptr;
  int (*choose)(Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, int, Found*, int*) = nullptr;
  int (*multiply)(Opaque, Opaque, const void*, const void*, Opaque, const void*, Opaque, const void*, const void*, Opaque,
      void*, Opaque, const Algorithm*, void*, size_t, Opaque) = nullptr;
  Opaque (*handle)() = nullptr;
  size_t (*workspace_size)() = nullptr;
  void* (*workspace)() = nullptr;
  size_t (*most_workspace)() = nullptr;
  static constexpr size_t COUNT = 15;
};
inline Functions functions;
// Whose products they compute; none until the functions are known.
inline std::optional<c10::DeviceType> device;

constexpr int FLOAT32 = 0, FLOAT16 = 2, BFLOAT16 = 14, SUMS_IN_FLOAT32 = 68;
constexpr int TURN_A = 3, TURN_B = 4, EPILOGUE = 7, BIAS = 8, BIAS_TYPE = 26, WITH_BIAS = 4;
constexpr int BATCH = 5, BATCH_STRIDE = 6;
constexpr int WORKSPACE = 1, REDUCTIONS = 3, ALIGNMENT_A = 5;
// Partial sums are added in float32, or (any of the library's ways) rounded to 16 bits in between. The first, unless
// nothing it allows fills a quarter of the device and another way fills four times as much: rows that are no multiple of
// 16 bytes have kernels that cut a contraction only by rounding (H100, 60 x 50 sums over 393,216: 6 ms in one thread
// block, 0.03 cut).
constexpr uint32_t EXACT = 2, ANY = 7;
constexpr float IDLE = 0.25, FULLER = 4;
// The library's kernels want no more, and tapes are told apart by it.
constexpr uintptr_t MOST_ALIGNMENT = 16;

inline uintptr_t alignment_of(const void* p) {
  const auto n = reinterpret_cast<uintptr_t>(p);
  return n ? std::min(n & -n, MOST_ALIGNMENT) : MOST_ALIGNMENT;
}

// A matrix, or a batch of them, as the library sees the transpose of a row-major one.
struct Matrix {
  uint64_t rows, columns;  // of memory, the first contiguous
  int64_t lead, batch = 0, step = 0;
  bool turned;  // memory has the matrix itself, not its transpose
};

// None of a tensor whose rows and columns both have gaps.
inline std::optional<Matrix> matrix_of(const Tensor& x) {
  const int64_t d = x.dim(), rows = x.size(d - 2), columns = x.size(d - 1), down = x.stride(d - 2), across = x.stride(d - 1);
  Matrix m{};
  if ((columns == 1 || across == 1) && (rows == 1 || down >= columns)) {
    m = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), rows == 1 ? columns : down, 0, 0, false};
  } else if ((rows == 1 || down == 1) && (columns == 1 || across >= rows)) {
    m = {static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), columns == 1 ? rows : across, 0, 0, true};
  } else {
    return std::nullopt;
  }
  if (d == 3) {
    m.batch = x.size(0);
    m.step = x.size(0) == 1 ? 0 : x.stride(0);
  }
  return m;
}

// Whether torch lets its own calls round partial sums; a flag or, in later versions, an option whose first value does.
template <class Option> bool rounds(Option of) {
  if constexpr (std::is_same_v<Option, bool>) return of;
  else return static_cast<int>(of) == 0;
}

inline int type_of(const Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? BFLOAT16 : x.scalar_type() == at::kHalf ? FLOAT16 : -1;
}

struct Owned {
  Opaque p = nullptr;
  int (*drop)(Opaque) = nullptr;
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { if (p) drop(p); }
};

// The product of one instruction, whose operands have the same types, extents and strides in every call.
class Product {
 public:
  // Whether the library computed y = a b (+ bias of the columns); else nothing happened.
  bool run(Tensor& y, const Tensor& a, const Tensor& b, const Tensor* bias, Opaque stream) {
    const std::lock_guard<std::mutex> alone(_mutex);
    const void* places[3] = {b.const_data_ptr(), a.const_data_ptr(), y.const_data_ptr()};
    const Opaque handle = _refused ? nullptr : functions.handle();
    if (!_ready && !_refused) _refused = !prepare(handle, y, a, b, bias, places);
    if (_refused) return false;
    for (size_t k = 0; k < 3; ++k)
      if (reinterpret_cast<uintptr_t>(places[k]) % _alignments[k]) return false;
    if (bias) {
      const void* at = bias->const_data_ptr();
      if (functions.set_product(_product.p, BIAS, &at, sizeof(at))) return false;
    }
    const float one = 1, zero = 0;
    void* const result = y.mutable_data_ptr();
    Tensor own;  // more than there is: parts of a contraction that is cut
    void* space = nullptr;
    if (_found.workspace > _shared) {
      own = at::empty({static_cast<int64_t>(_found.workspace)}, y.options().dtype(at::kByte));
      space = own.mutable_data_ptr();
    } else if (_found.workspace) {
      space = functions.workspace();
    }
    return !functions.multiply(handle, _product.p, &one, places[0], _layouts[0].p, places[1], _layouts[1].p, &zero, result,
        _layouts[2].p, result, _layouts[2].p, &_found.algorithm, space, _found.workspace, stream);
  }

 private:
  bool prepare(Opaque handle, const Tensor& y, const Tensor& a, const Tensor& b, const Tensor* bias,
      const void* const (&places)[3]) {
    const int type = type_of(y);
    if (type < 0 || type_of(a) != type || type_of(b) != type || !y.numel() || !a.numel()) return false;
    const std::optional<Matrix> found[3] = {matrix_of(b), matrix_of(a), matrix_of(y)};
    if (!found[0] || !found[1] || !found[2] || found[2]->turned) return false;
    if (bias && (bias->dim() != 1 || bias->stride(0) != 1 || bias->numel() != y.size(1) || type_of(*bias) != type))
      return false;
    const auto& f = functions;
    _product.drop = f.drop_product;
    if (f.make_product(&_product.p, SUMS_IN_FLOAT32, FLOAT32)) return false;
    for (size_t k = 0; k < 3; ++k) {
      const Matrix& m = *found[k];
      const int turn = m.turned;
      if (k < 2 && f.set_product(_product.p, k ? TURN_B : TURN_A, &turn, sizeof(turn))) return false;
      _layouts[k].drop = f.drop_layout;
      if (f.make_layout(&_layouts[k].p, type, m.rows, m.columns, m.lead)) return false;
      const auto batch = static_cast<int32_t>(m.batch);
      if (batch && (f.set_layout(_layouts[k].p, BATCH, &batch, sizeof(batch)) ||
          f.set_layout(_layouts[k].p, BATCH_STRIDE, &m.step, sizeof(m.step)))) return false;
      _alignments[k] = alignment_of(places[k]);
    }
    const int epilogue = WITH_BIAS;
    if (bias && (f.set_product(_product.p, EPILOGUE, &epilogue, sizeof(epilogue)) ||
        f.set_product(_product.p, BIAS_TYPE, &type, sizeof(type)))) return false;
    Owned wish;
    wish.drop = f.drop_wish;
    _shared = f.workspace_size();
    const size_t space = std::max(_shared, f.most_workspace());
    if (f.make_wish(&wish.p) || f.set_wish(wish.p, WORKSPACE, &space, sizeof(space))) return false;
    for (int k = 0; k < 4; ++k) {
      const auto n = static_cast<uint32_t>(_alignments[std::min(k, 2)]);
      if (f.set_wish(wish.p, ALIGNMENT_A + k, &n, sizeof(n))) return false;
    }
    const std::optional<Found> exact = choose(handle, wish.p, EXACT);
    if (!exact) return false;
    _found = *exact;
    const auto& context = at::globalContext();
    const bool may = type == BFLOAT16 ? rounds(context.allowBF16ReductionCuBLAS()) : rounds(context.allowFP16ReductionCuBLAS());
    if (may && 0 < exact->waves && exact->waves < IDLE) {
      const std::optional<Found> rounded = choose(handle, wish.p, ANY);
      if (rounded && rounded->waves >= FULLER * exact->waves) _found = *rounded;
    }
    _ready = true;
    return true;
  }

  // The library's first choice, with partial sums in these ways.
  std::optional<Found> choose(Opaque handle, Opaque wish, uint32_t reductions) {
    Found found{};
    int count = 0;
    if (functions.set_wish(wish, REDUCTIONS, &reductions, sizeof(reductions)) ||
        functions.choose(handle, _product.p, _layouts[0].p, _layouts[1].p, _layouts[2].p, _layouts[2].p, wish, 1, &found,
            &count)) return std::nullopt;
    return count > 0 && !found.state ? std::optional(found) : std::nullopt;
  }

  std::mutex _mutex;
  bool _ready = false, _refused = false;
  Owned _product, _layouts[3];
  std::array<uintptr_t, 3> _alignments{};
  Found _found{};
  size_t _shared = 0;  // bytes of the workspace that is there
};

}  // namespace cublas
