// Runs what `runtime.tape` describes: one call from Python for a whole region.
//
// A region holds tapes, each for arguments of one kind (types, devices, extents, strides, on GPUs the alignment of
// addresses; numbers by value). `run` finds the tape of its arguments, or answers None: then Python runs the definition
// and records a tape. A call has state of its own only, so that several threads may run a region at once.
//
// Instructions (names of `runtime.tape`):
//   kernel     a C function of ours: addresses, then integers
//   launch     a Python callable that takes addresses as integers (Triton's launcher), with the current stream
//   start      a compiled kernel of a GPU, launched by the driver (`driver.h`)
//   call       a Python callable that takes and returns tensors: what has no instruction of its own
//   others     a function of torch's library, into memory that the tape has chosen but for convolutions

#include <torch/csrc/python_headers.h>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "driver.h"

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using Numbers = std::vector<int64_t>;

// Tapes a region keeps, the latest used: changing lengths make new ones.
constexpr size_t MOST_TAPES = 256;
// Alignment of addresses that kernels of GPUs are compiled for, in bytes.
constexpr uintptr_t DIVISOR = 16;

enum class Kind : int64_t { Argument, Constant, Arena, Own, View, Result };
enum class Op : int64_t { Kernel, Launch, Call, Mm, Bmm, Addmm, Baddbmm, Copy, Convolution, Start, ScaledMm };

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

struct Instruction {
  Op op;
  std::string name, where;
  Numbers slots, numbers, release;
  std::vector<double> scalars;
  Object callable, arguments;
  driver::Kernel kernel;
};

struct Tape {
  std::vector<Slot> slots;
  std::vector<Instruction> code;
  Numbers outputs;  // slots; -1 for None
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

size_t hash_of(const Numbers& key) {
  size_t h = key.size();
  for (int64_t n : key) h = (h ^ static_cast<size_t>(n)) * 0x9E3779B97F4A7C15ull + (h >> 29);
  return h;
}

// Whether a tensor is its memory and nothing else.
bool plain(const Tensor& x) {
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

bool matches(const Numbers& key, PyObject* const* args, Py_ssize_t count, bool aligned) {
  const int64_t *at = key.data(), *end = at + key.size();
  return described(args, count, aligned, [&](int64_t n) { return at != end && *at++ == n; }) && at == end;
}

std::shared_ptr<Tape> find(Region& r, PyObject* const* args, Py_ssize_t count) {
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

Tensor view_of(const Tensor& base, const Tensor& like, const Numbers& sizes, const Numbers& strides, int64_t offset) {
  Tensor x = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()), like.key_set(), like.dtype());
  x.unsafeGetTensorImpl()->set_storage_offset(offset);
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return x;
}

Tensor allocated(const Tensor& like, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  if (like.device().is_cpu()) return at::detail::empty_strided_cpu(sizes, strides, like.scalar_type());
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
      case Op::Mm: out(s, [&](Tensor& y) { at::mm_out(y, tensor(s[1]), tensor(s[2])); }); break;
      case Op::Bmm: out(s, [&](Tensor& y) { at::bmm_out(y, tensor(s[1]), tensor(s[2])); }); break;
      case Op::Addmm:
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
    }
    for (int64_t n : i.release) made[n].reset();
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

void execute(Call& call, size_t& at) {
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

// The arguments that are results as well, by their places among these.
std::vector<Object> returned(const Tape& tape, PyObject* const* args) {
  std::vector<Object> found(tape.outputs.size());
  for (size_t k = 0; k < tape.outputs.size(); ++k) {
    const int64_t n = tape.outputs[k];
    if (n >= 0 && tape.slots[n].kind == Kind::Argument) found[k] = Object(args[tape.slots[n].from]);
  }
  return found;
}

PyObject* results_of(Call& call, const std::vector<Object>& same) {
  Object list;
  list.p = PyList_New(call.tape.outputs.size());
  for (size_t k = 0; k < call.tape.outputs.size(); ++k) {
    const int64_t n = call.tape.outputs[k];
    PyObject* o = same[k].p ? same[k].p : Py_None;
    if (n >= 0 && !same[k].p) o = THPVariable_Wrap(call.tensor(n));
    else Py_INCREF(o);
    PyList_SET_ITEM(list.p, k, o);
  }
  PyObject* found = list.p;
  list.p = nullptr;
  return found;
}

// Says where in the user's program an error came up.
void add_note(const std::string& where) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Object noted;
  if (value && !where.empty()) noted.p = PyObject_CallMethod(value, "add_note", "s", where.c_str());
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

constexpr const char* REGION = "tilefold.region";

Region* region_of(PyObject* o) { return static_cast<Region*>(PyCapsule_GetPointer(o, REGION)); }

// run(region, args) -> list of results; None where no tape is for such arguments. A list of arguments is emptied when
// the call begins, so that what nobody else has is freed after its last use; a tuple stays.
PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const bool sequence = count == 2 && (PyTuple_Check(given[1]) || PyList_CheckExact(given[1]));
  Region* region = sequence ? region_of(given[0]) : nullptr;
  if (!region) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "run(region, tuple or list)");
  PyObject* const* args = PySequence_Fast_ITEMS(given[1]);
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) Py_RETURN_NONE;
  const std::shared_ptr<Tape> tape = find(*region, args, PySequence_Fast_GET_SIZE(given[1]));
  if (!tape) Py_RETURN_NONE;
  Call call(*tape, *region, args);
  const std::vector<Object> same = returned(*tape, args);
  if (PyList_CheckExact(given[1]) && PyList_SetSlice(given[1], 0, PyList_GET_SIZE(given[1]), nullptr)) return nullptr;
  size_t at = 0;
  try {
    execute(call, at);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    if (at < tape->code.size()) add_note(tape->code[at].where);
    return nullptr;
  }
  return results_of(call, same);
  END_HANDLE_TH_ERRORS
}

Numbers numbers_of(PyObject* tuple) {
  Numbers out(PyTuple_Size(tuple));
  for (size_t k = 0; k < out.size(); ++k) {
    out[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, k));
    if (PyErr_Occurred()) throw python_error();
  }
  return out;
}

std::string text_of(PyObject* o) {
  const char* s = PyUnicode_AsUTF8(o);
  if (!s) throw python_error();
  return s;
}

// (kind, from, offset, sizes, strides, like)
Slot slot_of(PyObject* o) {
  Slot s;
  const Numbers head = [&] { Object h; h.p = PyTuple_GetSlice(o, 0, 3); return numbers_of(h.p); }();
  s.kind = static_cast<Kind>(head[0]);
  s.from = head[1];
  s.offset = head[2];
  s.sizes = numbers_of(PyTuple_GetItem(o, 3));
  s.strides = numbers_of(PyTuple_GetItem(o, 4));
  PyObject* like = PyTuple_GetItem(o, 5);
  if (like != Py_None) s.like = THPVariable_Unpack(like);
  return s;
}

// Tensor maps among the arguments of an instruction; others only live as long as it does.
std::vector<driver::Map> maps_of(PyObject* arguments) {
  std::vector<driver::Map> found;
  for (Py_ssize_t k = 0; k < PyTuple_Size(arguments); ++k) {
    PyObject* o = PyTuple_GET_ITEM(arguments, k);
    if (!PyBytes_Check(o)) continue;
    TORCH_CHECK(PyBytes_GET_SIZE(o) == static_cast<Py_ssize_t>(sizeof(driver::Map)), "a tensor map has 128 bytes");
    std::memcpy(found.emplace_back().bytes.data(), PyBytes_AS_STRING(o), sizeof(driver::Map));
  }
  return found;
}

// (op, name, where, slots, numbers, scalars, callable, arguments, release)
Instruction instruction_of(PyObject* o) {
  Instruction i;
  i.op = static_cast<Op>(PyLong_AsLongLong(PyTuple_GetItem(o, 0)));
  i.name = text_of(PyTuple_GetItem(o, 1));
  i.where = text_of(PyTuple_GetItem(o, 2));
  i.slots = numbers_of(PyTuple_GetItem(o, 3));
  i.numbers = numbers_of(PyTuple_GetItem(o, 4));
  PyObject* scalars = PyTuple_GetItem(o, 5);
  for (Py_ssize_t k = 0; k < PyTuple_Size(scalars); ++k)
    i.scalars.push_back(PyFloat_AsDouble(PyTuple_GET_ITEM(scalars, k)));
  i.callable = Object(PyTuple_GetItem(o, 6));
  i.arguments = Object(PyTuple_GetItem(o, 7));
  i.release = numbers_of(PyTuple_GetItem(o, 8));
  if (i.op == Op::Start) i.kernel = driver::kernel_of(i.numbers, maps_of(i.arguments.p));
  return i;
}

// add(region, args, slots, code, outputs, arena, like): a tape for such arguments; whether they can have one.
PyObject* add(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Region* region = count == 7 ? region_of(given[0]) : nullptr;
  if (!region) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "add takes 7 arguments");
  Numbers key;
  const bool known = described(&PyTuple_GET_ITEM(given[1], 0), PyTuple_GET_SIZE(given[1]), region->aligned,
      [&](int64_t n) { key.push_back(n); return true; });
  if (!known) Py_RETURN_FALSE;
  auto tape = std::make_shared<Tape>();
  for (Py_ssize_t k = 0; k < PyTuple_Size(given[2]); ++k) tape->slots.push_back(slot_of(PyTuple_GET_ITEM(given[2], k)));
  for (Py_ssize_t k = 0; k < PyTuple_Size(given[3]); ++k) {
    tape->code.push_back(instruction_of(PyTuple_GET_ITEM(given[3], k)));
    const Instruction& last = tape->code.back();
    tape->starts |= last.op == Op::Start;
    tape->python |= last.op == Op::Launch || last.op == Op::Call || (last.op == Op::Start && last.callable.p != Py_None);
  }
  tape->outputs = numbers_of(given[4]);
  tape->arena = PyLong_AsLongLong(given[5]);
  tape->like = THPVariable_Unpack(given[6]);
  if (region->tapes.size() >= MOST_TAPES) {
    const auto last = std::prev(region->tapes.end());
    auto [from, to] = region->by_hash.equal_range(hash_of(last->key));
    for (auto it = from; it != to; ++it)
      if (it->second == last) { region->by_hash.erase(it); break; }
    region->tapes.erase(last);
  }
  region->tapes.push_front({std::move(key), std::move(tape)});
  region->by_hash.emplace(hash_of(region->tapes.front().key), region->tapes.begin());
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// region(aligned, stream or None) -> a region without tapes.
PyObject* region(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "region(aligned, stream)");
  auto* r = new Region;
  r->aligned = given[0] == Py_True;
  if (given[1] != Py_None) r->stream = Object(given[1]);
  return PyCapsule_New(r, REGION, [](PyObject* o) { delete region_of(o); });
}

// driver(addresses): of the functions of CUDA's driver that `start` needs, in the order of `driver::Functions`.
PyObject* driver_of(PyObject*, PyObject* o) {
  HANDLE_TH_ERRORS
  static_assert(sizeof(driver::Functions) == driver::Functions::COUNT * sizeof(int64_t));
  const Numbers found = numbers_of(o);
  TORCH_CHECK(found.size() == driver::Functions::COUNT, "driver takes ", driver::Functions::COUNT, " addresses");
  std::memcpy(static_cast<void*>(&driver::functions), found.data(), sizeof(driver::Functions));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// count(region) -> how many tapes it has.
PyObject* count_of(PyObject*, PyObject* o) {
  Region* r = region_of(o);
  return r ? PyLong_FromSize_t(r->tapes.size()) : nullptr;
}

PyMethodDef METHODS[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&run)), METH_FASTCALL, "results, or None"},
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&add)), METH_FASTCALL, "one more tape"},
    {"region", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&region)), METH_FASTCALL, "a region"},
    {"driver", &driver_of, METH_O, "where the driver's functions are"},
    {"count", &count_of, METH_O, "tapes of a region"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "tilefold_runner", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_tilefold_runner() { return PyModule_Create(&MODULE); }
