// One call of a tape: its instructions, and the tensors of its slots.

#pragma once

#include "tape.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>

namespace tilefold {

inline Tensor view_of(const Tensor& base, const Tensor& like, const Numbers& sizes, const Numbers& strides, int64_t offset) {
  Tensor x = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()), like.key_set(), like.dtype());
  x.unsafeGetTensorImpl()->set_storage_offset(offset);
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return x;
}

inline Tensor allocated(const Tensor& like, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  if (like.device().is_cpu()) return at::detail::empty_strided_cpu(sizes, strides, like.scalar_type());
  // what `at::empty_strided` does below its dispatch; the current device is the tape's
  if (c10::Allocator* from = like.is_cuda() ? like.storage().allocator() : nullptr)
    return at::detail::empty_strided_generic(
        sizes, strides, from, c10::DispatchKeySet(c10::DispatchKey::CUDA), like.scalar_type());
  return at::empty_strided(sizes, strides, like.options());
}

// One call: tensors of slots, made when first needed.
struct Call {
  const Tape& tape;
  const Region& region;
  std::vector<Tensor> made;
  Tensor arena;
  std::vector<int64_t> words;
  driver::Parameters parameters;
  int64_t stream = 0;

  Call(const Tape& t, const Region& r, PyObject* const* args) : tape(t), region(r), made(t.slots.size()) {
    for (size_t i = 0; i < t.slots.size(); ++i)
      if (t.slots[i].kind == Kind::Argument) made[i] = THPVariable_Unpack(args[t.slots[i].from]);
  }

  const Tensor& tensor(int64_t n) {
    if (made[n].defined()) return made[n];
    const Slot& s = tape.slots[n];
    switch (s.kind) {
      case Kind::Constant: return s.like;
      case Kind::Arena:
        made[n] = view_of(memory(), s.like, s.sizes, s.strides, s.offset / static_cast<int64_t>(s.like.itemsize()));
        break;
      case Kind::Own: made[n] = allocated(s.like, s.sizes, s.strides); break;
      case Kind::View: {
        const Tensor& base = tensor(s.from);
        made[n] = view_of(base, base, s.sizes, s.strides, base.storage_offset() + s.offset);
        break;
      }
      default: TORCH_INTERNAL_ASSERT(false, "slot ", n, " is read before it is made");
    }
    return made[n];
  }

  const Tensor& memory() {
    if (!arena.defined()) arena = allocated(tape.like, {tape.arena}, {1});
    return arena;
  }

  int64_t address(int64_t n) {
    const Slot& s = tape.slots[n];
    if (!made[n].defined()) {
      if (s.kind == Kind::Arena) return reinterpret_cast<int64_t>(memory().mutable_data_ptr()) + s.offset;
      if (s.kind == Kind::View) return address(s.from) + s.offset * static_cast<int64_t>(tensor(s.from).itemsize());
    }
    const Tensor& x = tensor(n);
    const bool read_only = s.kind == Kind::Argument || s.kind == Kind::Constant;
    return reinterpret_cast<int64_t>(read_only ? x.const_data_ptr() : x.mutable_data_ptr());
  }

  void kernel(const Instruction& i) {
    words.clear();
    for (int64_t n : i.slots) words.push_back(address(n));
    words.insert(words.end(), i.numbers.begin() + 2, i.numbers.end());
    reinterpret_cast<void (*)(const char*, int64_t)>(i.numbers[0])(
        reinterpret_cast<const char*>(words.data()), at::get_num_threads());
    if (i.numbers[1] && reinterpret_cast<int (*)()>(i.numbers[1])())
      TORCH_CHECK_INDEX(false, "index out of range in ", i.name, " (TILEFOLD_INDEX_CHECKS=0 leaves the check out)");
  }

  // numbers: for each positional argument its slot, -1 (taken from `arguments`) or -2 (the stream).
  void launch(const Instruction& i) {
    const size_t count = i.numbers.size();
    std::vector<Object> own;
    std::vector<PyObject*> args(count);
    own.reserve(count);
    for (size_t a = 0; a < count; ++a) {
      const int64_t n = i.numbers[a];
      if (n == -1) {
        args[a] = PyTuple_GET_ITEM(i.arguments.p, a);
        continue;
      }
      args[a] = PyLong_FromLongLong(n == -2 ? stream : address(n));
      if (!args[a]) throw python_error();
      own.emplace_back().p = args[a];
    }
    Object done;
    done.p = PyObject_Vectorcall(i.callable.p, args.data(), count, nullptr);
    if (!done.p) throw_python();
  }

  // callable: the counter of a stream, where the kernel takes one.
  void start(const Instruction& i) {
    driver::launch(i.kernel, reinterpret_cast<driver::Handle>(stream), i.name.c_str(), parameters,
        [&](int64_t n) { return address(i.slots[n]); }, [&] { return counter(i); });
  }

  int64_t counter(const Instruction& i) const {
    Object found;
    found.p = PyObject_CallFunction(i.callable.p, "L", static_cast<long long>(stream));
    if (!found.p) throw_python();
    return PyLong_AsLongLong(found.p);
  }

  // slots: result, operands, their scales.
  void scaled_mm(const Instruction& i) {
    const auto& s = i.slots;
    out(s, [&](Tensor& y) {
      at::_scaled_mm_out(y, tensor(s[1]), tensor(s[2]), tensor(s[3]), tensor(s[4]), std::nullopt, std::nullopt,
          y.scalar_type(), i.numbers[0] != 0);
    });
  }

  // Whether cuBLASLt computed the product itself.
  bool asked(const Instruction& i, int64_t a, int64_t b, int64_t bias = -1) {
    if (cublas::device != tape.like.device().type()) return false;
    Tensor y = tensor(i.slots[0]);
    const Tensor& x = tensor(a);
    const Tensor& w = tensor(b);
    return i.product->run(y, x, w, bias < 0 ? nullptr : &tensor(bias), reinterpret_cast<driver::Handle>(stream));
  }

  // numbers: the slots of results.
  void call(const Instruction& i) {
    Object given, done;
    given.p = PyTuple_New(i.slots.size());
    for (size_t a = 0; a < i.slots.size(); ++a) PyTuple_SET_ITEM(given.p, a, THPVariable_Wrap(tensor(i.slots[a])));
    done.p = PyObject_Call(i.callable.p, given.p, nullptr);
    if (!done.p) throw_python();
    for (size_t k = 0; k < i.numbers.size(); ++k)
      made[i.numbers[k]] = THPVariable_Unpack(PyTuple_GET_ITEM(done.p, k));
  }

  // numbers: the slots of results.
  void operate(const Instruction& i) {
    size_t k = 0;
    call_operator(
        i.named, [&](int64_t n) -> const Tensor& { return tensor(i.slots[n]); },
        [&](const Tensor& x) { if (k < i.numbers.size()) made[i.numbers[k++]] = x; });
  }

  [[noreturn]] static void throw_python() {
    python_error error;
    error.persist();
    throw error;
  }

  void convolution(const Instruction& i) {
    const auto& s = i.slots;
    const Numbers& n = i.numbers;
    const int64_t dims = n[0];
    const c10::IntArrayRef all(n);
    std::optional<Tensor> bias;
    if (s.size() > 3) bias = tensor(s[3]);
    made[s[0]] = at::convolution(tensor(s[1]), tensor(s[2]), bias, all.slice(3, dims), all.slice(3 + dims, dims),
        all.slice(3 + 2 * dims, dims), n[2] != 0, all.slice(3 + 3 * dims, dims), n[1]);
  }

  void run(const Instruction& i) {
    RECORD_FUNCTION(i.name.c_str(), c10::ArrayRef<const c10::IValue>{});
    const auto& s = i.slots;
    switch (i.op) {
      case Op::Kernel: kernel(i); break;
      case Op::Launch: launch(i); break;
      case Op::Call: call(i); break;
      case Op::Mm:
        if (!asked(i, s[1], s[2])) out(s, [&](Tensor& y) { at::mm_out(y, tensor(s[1]), tensor(s[2])); });
        break;
      case Op::Bmm:
        if (!asked(i, s[1], s[2])) out(s, [&](Tensor& y) { at::bmm_out(y, tensor(s[1]), tensor(s[2])); });
        break;
      case Op::Addmm:
        if (i.scalars[0] == 1 && i.scalars[1] == 1 && asked(i, s[2], s[3], s[1])) break;
        out(s, [&](Tensor& y) {
          at::addmm_out(y, tensor(s[1]), tensor(s[2]), tensor(s[3]), i.scalars[0], i.scalars[1]);
        });
        break;
      case Op::Baddbmm:
        out(s, [&](Tensor& y) {
          at::baddbmm_out(y, tensor(s[1]), tensor(s[2]), tensor(s[3]), i.scalars[0], i.scalars[1]);
        });
        break;
      case Op::Copy: out(s, [&](Tensor& y) { y.copy_(tensor(s[1])); }); break;
      case Op::Convolution: convolution(i); break;
      case Op::Start: start(i); break;
      case Op::ScaledMm: scaled_mm(i); break;
      case Op::Named: operate(i); break;
    }
    for (int64_t n : i.release) (n < 0 ? arena : made[n]).reset();
  }

  template <typename Compute>
  void out(const Numbers& s, Compute compute) {
    Tensor y = tensor(s[0]);
    compute(y);
  }
};

struct Unlocked {
  PyThreadState* state;
  explicit Unlocked(bool wanted) : state(wanted ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() { if (state) PyEval_RestoreThread(state); }
};

inline void execute(Call& call, size_t& at) {
  const Tape& tape = call.tape;
  c10::OptionalDeviceGuard guard;
  if (!tape.like.device().is_cpu()) guard.reset_device(tape.like.device());
  if (call.region.stream.p && !tape.like.device().is_cpu()) {
    Object n;
    n.p = PyObject_CallFunction(call.region.stream.p, "i", static_cast<int>(tape.like.device().index()));
    if (!n.p) Call::throw_python();
    call.stream = PyLong_AsLongLong(n.p);
    if (tape.starts) driver::ensure_context(tape.like.device().index());
  }
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Unlocked unlocked(!tape.python);
  for (; at < tape.code.size(); ++at) call.run(tape.code[at]);
}

}  // namespace tilefold
