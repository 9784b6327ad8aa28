// SPDX-License-Identifier: Apache-2.0
// What Adasum needs of a GPU: dot products and scaled copies. Both block the calling thread, asleep, until the GPU
// is done: the next round of Adasum can't begin before.
#pragma once

#include <memory>

#include "base/types.h"
#include "data/gpu/gpu_module.h"
#include "data/gpu/gpu_mover.h"

namespace farandole {

class GpuAdasum {
 public:
  // `mover` outlives this.
  GpuAdasum(std::shared_ptr<const GpuModule> module, const GpuMover& mover);

  // dots[i * count + j]: the dot product of rows i and j of a (count, elements) matrix of floats that is complete at
  // this point of `stream`. Throws Error(kWrongType) for other dtypes.
  void dots(DType type, cuda::Address rows, size_t count, size_t elements, cuda::Stream stream,
            double* dots) const;
  // target = source * factor. Floats of one type, or 16-bit ones and float32; may be the same memory if the types
  // are.
  void scale(DType to, cuda::Address target, DType from, cuda::Address source, size_t elements,
             double factor, cuda::Stream stream) const;

 private:
  const std::shared_ptr<const GpuModule> module_;
  const GpuMover& mover_;
  const cuda::Function dots_;
};

}  // namespace farandole
