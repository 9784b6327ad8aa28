// SPDX-License-Identifier: Apache-2.0
// Copies, scales, converts and fills many segments of device memory in one launch.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/types.h"
#include "data/gpu/gpu_module.h"
#include "kernels/gpu_chunk.h"

namespace farandole {

// The work of one launch. Each call adds a segment and cuts it into chunks, one for each thread block.
class MoveList {
 public:
  void copy(cuda::Address target, cuda::Address source, size_t bytes);
  // Sets target = source * factor / divisor in type `to`. Both types must be real. Copies if nothing needs conversion.
  void convert(cuda::Address target, DType to, cuda::Address source, DType from, size_t elements,
               double factor, int64_t divisor);
  void fill_identity(cuda::Address target, DType type, ReduceOp op, size_t elements);

  std::span<const gpu::MoveChunk> chunks() const { return chunks_; }
  size_t bytes() const { return chunks_.size() * sizeof(gpu::MoveChunk); }
  bool empty() const { return chunks_.empty(); }
  void clear() { chunks_.clear(); }

 private:
  void add(gpu::MoveChunk whole, size_t elements, size_t source_size, size_t target_size);

  std::vector<gpu::MoveChunk> chunks_;
};

class GpuMover {
 public:
  explicit GpuMover(std::shared_ptr<const GpuModule> module);

  // `table` is the device address to which the list's chunks were copied earlier in this stream.
  void launch(const MoveList& list, cuda::Address table, cuda::Stream stream) const;

 private:
  const std::shared_ptr<const GpuModule> module_;
  const cuda::Function function_;
};

}  // namespace farandole
