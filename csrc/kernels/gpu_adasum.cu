// SPDX-License-Identifier: Apache-2.0
// The GPU kernel of dot products for Adasum, in float64 for all row types. Sums are taken in a fixed order,
// so the bits are always the same. Compiled after gpu_move.cu, whose element types it uses.

namespace farandole::gpu {

template <unsigned char kType>
__device__ double dot_of(const DotTask& task, unsigned i, unsigned j, unsigned block) {
  using Element = typename ElementOf<kType>::type;
  using Raw = typename Element::Raw;
  const Raw* const a = (const Raw*)task.rows + i * task.elements;
  const Raw* const b = (const Raw*)task.rows + j * task.elements;
  const unsigned long long step = (unsigned long long)task.blocks * blockDim.x;
  double sum = 0;
  for (unsigned long long k = block * blockDim.x + threadIdx.x; k < task.elements; k += step) {
    sum += double(Element::load(a[k])) * double(Element::load(b[k]));
  }
  return sum;
}

__device__ double dot_of_any(const DotTask& task, unsigned i, unsigned j, unsigned block) {
  switch (task.type) {
    case 8: return dot_of<8>(task, i, j, block);
    case 9: return dot_of<9>(task, i, j, block);
    case 10: return dot_of<10>(task, i, j, block);
    case 11: return dot_of<11>(task, i, j, block);
    default: __trap();
  }
}

}  // namespace farandole::gpu

extern "C" __global__ void __launch_bounds__(farandole::gpu::kDotThreads)
    farandole_dots(const farandole::gpu::DotTask task) {
  using namespace farandole::gpu;
  __shared__ double sums[kDotThreads];
  const unsigned pair = blockIdx.x / task.blocks;
  unsigned i = 0;
  while ((i + 1) * (i + 2) / 2 <= pair) ++i;
  const unsigned j = pair - i * (i + 1) / 2;
  sums[threadIdx.x] = dot_of_any(task, i, j, blockIdx.x % task.blocks);
  __syncthreads();
  for (unsigned half = kDotThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) ((double*)task.partials)[blockIdx.x] = sums[0];
}
