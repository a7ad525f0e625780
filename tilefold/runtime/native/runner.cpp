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
//   named      an operator of torch by its name (`operator.h`): what has no instruction of its own
//   call       a Python callable that takes and returns tensors: what is no operator of torch's own
//   others     a function of torch's library, into memory that the tape has chosen but for convolutions

#include "call.h"

#include <torch/csrc/Exceptions.h>

namespace {

using namespace tilefold;

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
    PyObject* o = same[k].p ? same[k].p : n <= GIVEN ? PyTuple_GET_ITEM(call.tape.fixed.p, GIVEN - n) : Py_None;
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
  if (i.op == Op::Named) i.named = operator_of(i.arguments.p);
  if (i.op == Op::Mm || i.op == Op::Bmm || i.op == Op::Addmm) i.product = std::make_shared<cublas::Product>();
  if (i.op == Op::Start) i.kernel = driver::kernel_of(i.numbers, maps_of(i.arguments.p));
  return i;
}

// add(region, args, slots, code, outputs, arena, like, fixed): a tape for such arguments; whether they can have one.
PyObject* add(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Region* region = count == 8 ? region_of(given[0]) : nullptr;
  if (!region) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "add takes 8 arguments");
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
  tape->fixed = Object(given[7]);
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

// products(addresses, type of device): of the functions that compute products there, in the order of
// `cublas::Functions`.
PyObject* products_of(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2) return PyErr_Format(PyExc_TypeError, "products(addresses, type of device)");
  static_assert(sizeof(cublas::Functions) == cublas::Functions::COUNT * sizeof(int64_t));
  const Numbers found = numbers_of(given[0]);
  TORCH_CHECK(found.size() == cublas::Functions::COUNT, "products takes ", cublas::Functions::COUNT, " addresses");
  std::memcpy(static_cast<void*>(&cublas::functions), found.data(), sizeof(cublas::Functions));
  cublas::device = c10::Device(text_of(given[1])).type();
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
    {"products", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&products_of)), METH_FASTCALL, "where cuBLASLt is"},
    {"count", &count_of, METH_O, "tapes of a region"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "tilefold_runner", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_tilefold_runner() { return PyModule_Create(&MODULE); }
