// Launches of compiled kernels through CUDA's driver, whose addresses Python finds (`backends.triton.driver`): no CUDA
// is needed to build this. Structures as in cuda.h, whose layout is part of the driver's interface.

#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace driver {

using Handle = void*;

struct Attribute {
  int id;
  char pad[4];
  union { char bytes[64]; int on; } value;
};
static_assert(sizeof(Attribute) == 72);

struct Config {
  unsigned grid[3], block[3], shared;
  Handle stream;
  Attribute* attributes;
  unsigned count;
};
static_assert(sizeof(Config) == 56);

constexpr int COOPERATIVE = 2, DEPENDENT = 6;

struct alignas(64) Map { std::array<char, 128> bytes; };

struct Functions {
  int (*launch)(const Config*, Handle, void**, void**) = nullptr;
  int (*replace_address)(Map*, void*) = nullptr;
  int (*error_string)(int, const char**) = nullptr;
  int (*current)(Handle*) = nullptr;
  int (*make_current)(Handle) = nullptr;
  int (*primary)(Handle*, int) = nullptr;
  static constexpr size_t COUNT = 6;
};
inline Functions functions;

inline void check(int code, const char* what) {
  if (code == 0) return;
  const char* words = nullptr;
  if (functions.error_string(code, &words) || !words) words = "unknown";
  TORCH_CHECK(false, "CUDA error: ", words, " (", code, ") in ", what);
}

// A thread that has called nothing of CUDA yet has no context.
inline void ensure_context(int device) {
  Handle context = nullptr;
  check(functions.current(&context), "cuCtxGetCurrent");
  if (context) return;
  check(functions.primary(&context, device), "cuDevicePrimaryCtxRetain");
  check(functions.make_current(context), "cuCtxSetCurrent");
}

// What a parameter is.
enum class Is : int64_t { Number, Address, Map, Counter };

struct Kernel {
  Handle function = nullptr;
  int64_t grid = 0, threads = 0, shared = 0;
  bool dependent = false, cooperative = false;
  struct Parameter { Is is; int64_t value; };  // a number, or a place among the instruction's slots
  std::vector<Parameter> parameters;
  std::vector<Map> maps;  // in the order of the parameters that are maps
};

// numbers: handle, grid, threads, shared, dependent, cooperative, then two for each parameter.
inline Kernel kernel_of(const std::vector<int64_t>& n, std::vector<Map> maps) {
  Kernel k;
  k.function = reinterpret_cast<Handle>(n[0]);
  k.grid = n[1];
  k.threads = n[2];
  k.shared = n[3];
  k.dependent = n[4];
  k.cooperative = n[5];
  for (size_t at = 6; at < n.size(); at += 2) k.parameters.push_back({static_cast<Is>(n[at]), n[at + 1]});
  k.maps = std::move(maps);
  return k;
}

// Memory for parameters, kept from launch to launch of a call.
struct Parameters {
  std::vector<int64_t> words;
  std::vector<Map> maps;
  std::vector<void*> places;
};

// address(slot's place) and counter() give what is only known now.
template <typename Address, typename Counter>
void launch(const Kernel& k, Handle stream, const char* name, Parameters& p, Address address, Counter counter) {
  p.words.resize(k.parameters.size());
  p.maps.resize(k.maps.size());
  p.places.resize(k.parameters.size());
  size_t map = 0;
  for (size_t at = 0; at < k.parameters.size(); ++at) {
    const auto [is, value] = k.parameters[at];
    p.places[at] = &p.words[at];
    switch (is) {
      case Is::Number: p.words[at] = value; break;  // its low bytes, where the kernel takes fewer
      case Is::Address: p.words[at] = address(value); break;
      case Is::Counter: p.words[at] = counter(); break;
      case Is::Map:
        p.maps[map] = k.maps[map];
        check(functions.replace_address(&p.maps[map], reinterpret_cast<void*>(address(value))), name);
        p.places[at] = &p.maps[map++];
        break;
    }
  }
  Attribute attributes[2];
  std::memset(attributes, 0, sizeof(attributes));
  unsigned count = 0;
  for (const auto [wanted, id] : {std::pair{k.dependent, DEPENDENT}, std::pair{k.cooperative, COOPERATIVE}}) {
    if (!wanted) continue;
    attributes[count].id = id;
    attributes[count++].value.on = 1;
  }
  const Config config{{static_cast<unsigned>(k.grid), 1, 1}, {static_cast<unsigned>(k.threads), 1, 1},
      static_cast<unsigned>(k.shared), stream, attributes, count};
  check(functions.launch(&config, k.function, p.places.data(), nullptr), name);
}

}  // namespace driver
