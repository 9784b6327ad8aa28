// SPDX-License-Identifier: Apache-2.0
#include "data/gpu/gpu_mover.h"

#include <algorithm>
#include <utility>

#include "kernels/gpu_source.h"
#include "kernels/kernels.h"

namespace farandole {

void MoveList::add(gpu::MoveChunk whole, size_t elements, size_t source_size, size_t target_size) {
  const size_t step = gpu::kChunkBytes / std::max(source_size, target_size);
  for (size_t at = 0; at < elements; at += step) {
    gpu::MoveChunk chunk = whole;
    chunk.source += at * source_size;
    chunk.target += at * target_size;
    chunk.elements = static_cast<unsigned>(std::min(step, elements - at));
    chunks_.push_back(chunk);
  }
}

void MoveList::copy(cuda::Address target, cuda::Address source, size_t bytes) {
  if (target == source) return;
  gpu::MoveChunk chunk{};
  chunk.kind = gpu::kCopyBytes;
  chunk.source = source;
  chunk.target = target;
  add(chunk, bytes, 1, 1);
}

void MoveList::convert(cuda::Address target, DType to, cuda::Address source, DType from,
                       size_t elements, double factor, int64_t divisor) {
  if (to == from && factor == 1.0 && divisor == 1) {
    return copy(target, source, elements * size_of(to));
  }
  gpu::MoveChunk chunk{};
  chunk.kind = gpu::kConvert;
  chunk.source = source;
  chunk.target = target;
  chunk.factor = factor;
  chunk.divisor = static_cast<unsigned>(divisor);
  chunk.from = static_cast<unsigned char>(from);
  chunk.to = static_cast<unsigned char>(to);
  add(chunk, elements, size_of(from), size_of(to));
}

void MoveList::fill_identity(cuda::Address target, DType type, ReduceOp op, size_t elements) {
  gpu::MoveChunk chunk{};
  chunk.kind = gpu::kFill;
  chunk.target = target;
  chunk.to = static_cast<unsigned char>(type);
  kernels::fill_identity(type, op, &chunk.pattern, 1);
  add(chunk, elements, 0, size_of(type));
}

GpuMover::GpuMover(std::shared_ptr<const GpuModule> module)
    : module_(std::move(module)), function_(module_->function(gpu::kMoveKernel)) {}

void GpuMover::launch(const MoveList& list, cuda::Address table, cuda::Stream stream) const {
  if (list.empty()) return;
  void* parameters[] = {&table};
  const cuda::Api& api = module_->device()->api();
  api.check(api.launch(function_, static_cast<unsigned>(list.chunks().size()), 1, 1,
                       gpu::kMoveThreads, 1, 1, 0, stream, parameters, nullptr),
            "launching the move kernel");
}

}  // namespace farandole
