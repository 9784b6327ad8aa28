// SPDX-License-Identifier: Apache-2.0
// Measures the limit that memory sets: an in-place allreduce in which all ranks map all buffers. Each rank sums its
// stripe of every buffer and stores the sum into all of them, block by block in cache. Waiting ranks spin.
// memory_limit RANKS BYTES CALLS: prints "min median" in microseconds; fails if a sum is wrong.
#include <cstdio>
#include <cstdlib>

#include "base/clock.h"
#include "kernels/kernels.h"
#include "lib/ipc/segment.h"
#include "ranks.h"

namespace {

using namespace farandole;

constexpr size_t kBarrierRoom = 4096;
constexpr size_t kBlockBytes = 32 << 10;  // of each buffer: a few of them fit the L2 cache

class Limit {
 public:
  Limit(int ranks, size_t bytes, int calls)
      : ranks_(ranks),
        count_(bytes / sizeof(float)),
        calls_(calls),
        stride_((bytes + 4095) / 4096 * 4096),
        segment_(
            Segment::create("limit", kBarrierRoom + stride_ * static_cast<size_t>(ranks), true)) {}

  int run(int rank) {
    std::vector<int64_t> times;
    int wrong = 0;
    for (int call = 0; call <= calls_; ++call) {  // the first is not counted
      fill(rank);
      meet();
      const int64_t start = now_ns();
      allreduce(rank);
      if (call > 0) times.push_back(now_ns() - start);
      wrong |= check(rank);
      meet();
    }
    if (rank == 0) {
      const double least = bench::quantile_us(times, 0);
      std::printf("%.2f %.2f\n", least, bench::quantile_us(times, 0.5));
      std::fflush(stdout);
    }
    return wrong;
  }

 private:
  float* buffer(int rank) const {
    return reinterpret_cast<float*>(segment_.data() + kBarrierRoom +
                                    stride_ * static_cast<size_t>(rank));
  }
  void meet() { reinterpret_cast<bench::SpinBarrier*>(segment_.data())->meet(ranks_); }
  static float value(size_t i, int rank) {
    return static_cast<float>(i % 1021 + 7 * static_cast<size_t>(rank));
  }

  void fill(int rank) {
    float* mine = buffer(rank);
    for (size_t i = 0; i < count_; ++i) mine[i] = value(i, rank);
  }

  void allreduce(int rank) {
    meet();  // a real call starts when everybody's input is ready
    const auto part = [&](int r) {
      return count_ * static_cast<size_t>(r) / static_cast<size_t>(ranks_);
    };
    const size_t step = kBlockBytes / sizeof(float);
    for (size_t i = part(rank); i < part(rank + 1); i += step) {
      reduce_block(i, std::min(step, part(rank + 1) - i));
    }
    meet();
  }

  void reduce_block(size_t first, size_t count) {
    std::vector<const void*>& inputs = inputs_;
    inputs.clear();
    for (int r = 0; r < ranks_; ++r) inputs.push_back(buffer(r) + first);
    kernels::reduce(DType::kFloat32, ReduceOp::kSum, buffer(0) + first, inputs.data(), ranks_,
                    count, {});
    for (int r = 1; r < ranks_; ++r) {
      kernels::copy(buffer(r) + first, buffer(0) + first, count * sizeof(float));
    }
  }

  int check(int rank) const {
    for (size_t i = 0; i < count_; ++i) {
      float sum = 0;
      for (int r = 0; r < ranks_; ++r) sum += value(i, r);
      if (buffer(rank)[i] != sum) {
        std::fprintf(stderr, "rank %d: element %zu is %g, not %g\n", rank, i,
                     static_cast<double>(buffer(rank)[i]), static_cast<double>(sum));
        return 1;
      }
    }
    return 0;
  }

  const int ranks_;
  const size_t count_;
  const int calls_;
  const size_t stride_;
  Segment segment_;
  std::vector<const void*> inputs_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "memory_limit RANKS BYTES CALLS\n");
    return 2;
  }
  kernels::select_target("");
  const int ranks = std::atoi(argv[1]);
  Limit limit(ranks, static_cast<size_t>(std::atoll(argv[2])), std::atoi(argv[3]));
  return bench::run_ranks(ranks, [&](int rank) { return limit.run(rank); }) ? 0 : 1;
}
