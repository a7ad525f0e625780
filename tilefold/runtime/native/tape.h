// Tapes and the regions that hold them (`runtime.tape`): which one is for some arguments.

#pragma once

#include <torch/csrc/python_headers.h>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include "driver.h"
#include "operator.h"
#include "product.h"

#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace tilefold {

using at::Tensor;
using Numbers = std::vector<int64_t>;

// Tapes a region keeps, the latest used: changing lengths make new ones.
constexpr size_t MOST_TAPES = 256;
// Alignment of addresses that kernels of GPUs are compiled for, in bytes.
constexpr uintptr_t DIVISOR = 16;

enum class Kind : int64_t { Argument, Constant, Arena, Own, View, Result };
enum class Op : int64_t { Kernel, Launch, Call, Mm, Bmm, Addmm, Baddbmm, Copy, Convolution, Start, ScaledMm, Named };

// In place of a result's slot: the first result that is no tensor.
constexpr int64_t GIVEN = -2;

// A reference to a Python object; made, copied and dropped with the GIL held.
struct Object {
  PyObject* p = nullptr;
  Object() = default;
  explicit Object(PyObject* o) : p(o) { Py_XINCREF(p); }
  Object(Object&& o) noexcept : p(o.p) { o.p = nullptr; }
  Object& operator=(Object&& o) noexcept { std::swap(p, o.p); return *this; }
  ~Object() { Py_XDECREF(p); }
};

// from: argument's position, or the slot that is viewed. offset: bytes into the arena, or elements into `from`.
// like: type and device of what is made; the tensor itself of a constant.
struct Slot {
  Kind kind;
  int64_t from = 0, offset = 0;
  Numbers sizes, strides;
  Tensor like;
};

// release: slots whose last use it is; -1 for the arena.
struct Instruction {
  Op op;
  std::string name, where;
  Numbers slots, numbers, release;
  std::vector<double> scalars;
  Object callable, arguments;
  driver::Kernel kernel;
  Operator named;
  std::shared_ptr<cublas::Product> product;  // of operations that cuBLASLt may compute
};

struct Tape {
  std::vector<Slot> slots;
  std::vector<Instruction> code;
  Numbers outputs;  // slots; -1 for None; GIVEN - n for the n-th of `fixed`
  Object fixed;  // a tuple of what is no tensor
  int64_t arena = 0;  // bytes
  Tensor like;  // device of the arena
  bool python = false;  // some instruction needs the GIL
  bool starts = false;  // some instruction needs the driver
};

struct Region {
  struct Known { Numbers key; std::shared_ptr<Tape> tape; };
  bool aligned = false;  // alignment counts
  Object stream;  // current stream of a device, as a number; of GPUs
  std::list<Known> tapes;  // the latest used first; guarded by the GIL
  std::unordered_multimap<size_t, std::list<Known>::iterator> by_hash;
};

inline size_t hash_of(const Numbers& key) {
  size_t h = key.size();
  for (int64_t n : key) h = (h ^ static_cast<size_t>(n)) * 0x9E3779B97F4A7C15ull + (h >> 29);
  return h;
}

// Whether a tensor is its memory and nothing else.
inline bool plain(const Tensor& x) {
  using at::DispatchKey;
  if (!x.defined() || !x.has_storage() || x.is_conj() || x.is_neg() || x._is_zerotensor()) return false;
  const auto keys = x.key_set();
  return !keys.has_any(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::FuncTorchGradWrapper,
      DispatchKey::FuncTorchBatched, DispatchKey::Functionalize})) && x.layout() == at::kStrided;
}

// Hands the numbers that describe arguments to `take`, until it answers false; false also for other arguments.
template <typename Take>
bool described(PyObject* const* args, Py_ssize_t count, bool aligned, Take take) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* o = args[i];
    if (THPVariable_Check(o)) {
      const Tensor& x = THPVariable_Unpack(o);
      if (!plain(x)) return false;
      const auto device = x.device();
      int64_t kind = static_cast<int64_t>(x.scalar_type()) | static_cast<int64_t>(device.type()) << 8 |
          static_cast<int64_t>(device.index() + 1) << 16 | x.dim() << 32;
      if (aligned && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % DIVISOR == 0) kind |= 1ll << 48;
      if (!take(kind)) return false;
      const auto sizes = x.sizes(), strides = x.strides();
      for (size_t a = 0; a < sizes.size(); ++a)
        if (!take(sizes[a]) || !take(strides[a])) return false;
    } else if (PyLong_CheckExact(o)) {
      int over = 0;
      const int64_t n = PyLong_AsLongLongAndOverflow(o, &over);
      if (over || !take(-1) || !take(n)) return false;
    } else if (o == Py_None) {
      if (!take(-2)) return false;
    } else {
      return false;
    }
  }
  return true;
}

inline bool matches(const Numbers& key, PyObject* const* args, Py_ssize_t count, bool aligned) {
  const int64_t *at = key.data(), *end = at + key.size();
  return described(args, count, aligned, [&](int64_t n) { return at != end && *at++ == n; }) && at == end;
}

inline std::shared_ptr<Tape> find(Region& r, PyObject* const* args, Py_ssize_t count) {
  if (r.tapes.empty()) return nullptr;
  if (matches(r.tapes.front().key, args, count, r.aligned)) return r.tapes.front().tape;
  Numbers key;
  if (!described(args, count, r.aligned, [&](int64_t n) { key.push_back(n); return true; })) return nullptr;
  auto [first, last] = r.by_hash.equal_range(hash_of(key));
  for (auto it = first; it != last; ++it) {
    if (it->second->key != key) continue;
    r.tapes.splice(r.tapes.begin(), r.tapes, it->second);
    return r.tapes.front().tape;
  }
  return nullptr;
}

}  // namespace tilefold
