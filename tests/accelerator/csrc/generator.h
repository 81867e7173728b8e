// Random generators of the devices: a seed, and how many kernels have drawn.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// What one kernel draws from: a generator of the CPU, which no other kernel has.
at::Generator for_kernel(const at::Generator& generator);

}  // namespace sim
