// SPDX-License-Identifier: Apache-2.0
// The dot product kernel in host code, written from its description in gpu_chunk.h.
#include <cstring>

#include "base/types.h"
#include "kernels/gpu_chunk.h"
#include "kernels/kernels_reference.h"
#include "lib/gpu/gpu_double/hardware.h"

namespace farandole::check {
namespace {

using Half = reference::SmallFloat<10, -14>;
using Brain = reference::SmallFloat<7, -126>;

double element(DType type, unsigned long long rows, unsigned long long index) {
  const auto* const at = reinterpret_cast<const char*>(rows) + index * size_of(type);
  uint16_t half = 0;
  float single = 0;
  double value = 0;
  switch (type) {
    case DType::kFloat16: return std::memcpy(&half, at, sizeof half), Half::decode(half);
    case DType::kBFloat16: return std::memcpy(&half, at, sizeof half), Brain::decode(half);
    case DType::kFloat32: return std::memcpy(&single, at, sizeof single), single;
    default: return std::memcpy(&value, at, sizeof value), value;
  }
}

}  // namespace

// Block b of a pair takes the b-th of equal shares of the columns; any division adds up to the same.
void dots_on_host(const gpu::DotTask& task, unsigned blocks) {
  const auto type = static_cast<DType>(task.type);
  auto* partial = reinterpret_cast<double*>(task.partials);
  const double* const end = partial + blocks;
  for (unsigned i = 0; i < task.count; ++i) {
    for (unsigned j = 0; j <= i; ++j) {
      for (unsigned block = 0; block < task.blocks && partial < end; ++block, ++partial) {
        *partial = 0;
        for (auto k = task.elements * block / task.blocks;
             k < task.elements * (block + 1) / task.blocks; ++k) {
          *partial += element(type, task.rows, i * task.elements + k) *
                      element(type, task.rows, j * task.elements + k);
        }
      }
    }
  }
}

}  // namespace farandole::check
