// The face to Python.
#include <Python.h>
#include <frameobject.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

#include <chrono>

#include "allocator.h"
#include "generator.h"
#include "kernel.h"

namespace py = pybind11;

namespace sim {
namespace {

bool is_of_torch(const std::string& file) {
  return file.find("/torch/") != std::string::npos || file[0] == '<';
}

// The innermost line that is not PyTorch's own. A thread that never ran Python has none: autograd.
std::string find_line() {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) return "autograd";
  py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  while (frame) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    auto code = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    auto file = code.attr("co_filename").cast<std::string>();
    if (!is_of_torch(file))
      return file + ":" + std::to_string(PyFrame_GetLineNumber(raw)) + " in " +
             code.attr("co_name").cast<std::string>();
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return "autograd";
}

// A kernel that does nothing for a while, on the current stream.
void sleep(uint64_t microseconds) {
  submit(current_stream(current_device()), "sleep", {},
         [=] { spend(std::chrono::microseconds(microseconds)); });
}

py::object generator(int device) {
  return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(device)));
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sim::python_line = sim::find_line;
  auto released = py::call_guard<py::gil_scoped_release>();
  m.attr("device_count") = sim::kDevices;
  m.def("is_forked", &sim::is_forked);
  m.def("default_generator", &sim::generator);
  m.def("set_delays", &sim::set_delays, released);
  m.def("set_copy_time", &sim::set_copy_time, released);
  m.def("set_memory_limit", &sim::set_memory_limit, released);
  m.def("synchronize", &sim::synchronize_device, released);
  m.def("sleep", &sim::sleep, released);
  m.def("detect", [](bool on, bool lines) {
    sim::Order order;
    sim::detector::set(on, lines);
  }, released);
  m.def("races", [] {
    sim::Order order;
    return sim::detector::races();
  }, released);
  m.def("is_ordered", &sim::is_ordered, released);
  m.def("clear_races", [] {
    sim::Order order;
    sim::detector::clear_races();
  }, released);
}
