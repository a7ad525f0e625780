// Operators of torch by their names (`runtime.operators`): their arguments are converted once, but for tensors.

#pragma once

#include <torch/csrc/python_headers.h>

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>

#include <optional>
#include <string>
#include <vector>

namespace tilefold {

enum class Given : int64_t { Tensor, Ints, Floats, Bools, Tensors, Optional, Number };

// An argument: a value that is the same in every call, or tensors by their places among an instruction's slots.
struct Argument {
  c10::IValue value;
  std::optional<Given> tensors;
  std::vector<int64_t> places;
};

struct Operator {
  std::optional<c10::OperatorHandle> handle;
  std::vector<Argument> arguments;
};

inline c10::IValue list_of(Given kind, PyObject* tuple) {
  c10::List<int64_t> ints;
  c10::List<double> floats;
  c10::List<bool> bools;
  for (Py_ssize_t k = 1; k < PyTuple_GET_SIZE(tuple); ++k) {
    PyObject* o = PyTuple_GET_ITEM(tuple, k);
    if (kind == Given::Ints) ints.push_back(PyLong_AsLongLong(o));
    else if (kind == Given::Floats) floats.push_back(PyFloat_AsDouble(o));
    else bools.push_back(o == Py_True);
  }
  if (kind == Given::Ints) return ints;
  if (kind == Given::Floats) return floats;
  return bools;
}

inline c10::IValue plain_value(PyObject* o) {
  if (o == Py_None) return {};
  if (PyBool_Check(o)) return o == Py_True;
  if (PyLong_Check(o)) return static_cast<int64_t>(PyLong_AsLongLong(o));
  if (PyFloat_Check(o)) return PyFloat_AsDouble(o);
  if (PyUnicode_Check(o)) return std::string(PyUnicode_AsUTF8(o));
  if (THPDtype_Check(o)) return reinterpret_cast<THPDtype*>(o)->scalar_type;
  if (THPDevice_Check(o)) return reinterpret_cast<THPDevice*>(o)->device;
  if (THPLayout_Check(o)) return reinterpret_cast<THPLayout*>(o)->layout;
  if (THPMemoryFormat_Check(o)) return reinterpret_cast<THPMemoryFormat*>(o)->memory_format;
  TORCH_CHECK(false, "a value of an operator that has no form");
}

// A number in place of a tensor: it decides no type (`2 * x` has that of x).
inline c10::IValue wrapped(PyObject* o) {
  at::Scalar number(PyBool_Check(o) ? at::Scalar(o == Py_True)
      : PyLong_Check(o) ? at::Scalar(static_cast<int64_t>(PyLong_AsLongLong(o))) : at::Scalar(PyFloat_AsDouble(o)));
  at::Tensor x = c10::scalar_to_tensor(number);
  x.unsafeGetTensorImpl()->set_wrapped_number(true);
  return x;
}

inline Argument argument_of(PyObject* o) {
  if (!PyTuple_Check(o)) return {plain_value(o), std::nullopt, {}};
  const auto kind = static_cast<Given>(PyLong_AsLongLong(PyTuple_GetItem(o, 0)));
  if (kind == Given::Ints || kind == Given::Floats || kind == Given::Bools) return {list_of(kind, o), std::nullopt, {}};
  if (kind == Given::Number) return {wrapped(PyTuple_GetItem(o, 1)), std::nullopt, {}};
  Argument a{{}, kind, {}};
  for (Py_ssize_t k = 1; k < PyTuple_GET_SIZE(o); ++k) a.places.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(o, k)));
  return a;
}

// form: (name, overload, value...)
inline Operator operator_of(PyObject* form) {
  Operator found;
  found.handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      PyUnicode_AsUTF8(PyTuple_GetItem(form, 0)), PyUnicode_AsUTF8(PyTuple_GetItem(form, 1)));
  for (Py_ssize_t k = 2; k < PyTuple_Size(form); ++k) found.arguments.push_back(argument_of(PyTuple_GET_ITEM(form, k)));
  return found;
}

// Calls it; tensor(place) gives an operand, take(tensor) gets every result that is one, in order.
template <typename Operand, typename Take>
void call_operator(const Operator& f, Operand tensor, Take take) {
  torch::jit::Stack stack;
  stack.reserve(f.arguments.size());
  for (const Argument& a : f.arguments) {
    if (!a.tensors) {
      stack.push_back(a.value);
    } else if (*a.tensors == Given::Tensor) {
      stack.emplace_back(tensor(a.places[0]));
    } else if (*a.tensors == Given::Tensors) {
      c10::List<at::Tensor> all;
      for (int64_t n : a.places) all.push_back(tensor(n));
      stack.emplace_back(std::move(all));
    } else {
      c10::List<std::optional<at::Tensor>> all;
      for (int64_t n : a.places) all.push_back(n < 0 ? std::optional<at::Tensor>() : tensor(n));
      stack.emplace_back(std::move(all));
    }
  }
  f.handle->callBoxed(stack);
  for (const c10::IValue& v : stack) {
    if (v.isTensor() && v.toTensor().defined()) take(v.toTensor());
    if (v.isTensorList())
      for (const at::Tensor& x : v.toTensorVector()) take(x);
  }
}

}  // namespace tilefold
