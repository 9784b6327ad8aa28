// SPDX-License-Identifier: Apache-2.0
// Measures calls without Python: forked ranks use the C ABI. Results are checked.
// c_calls RANKS [BATCHES [blocking|async]]: blocking 4 B allreduces, and batches of 1,000 asynchronous ones of 1 KB.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/abi.h"
#include "base/clock.h"
#include "ranks.h"

namespace {

using namespace farandole;

constexpr int kMostRanks = 64;
constexpr int kBlobRoom = 4096;
constexpr int kTensors = 1000;
constexpr int64_t kElements = 256;

// All ranks' blobs, and a barrier that does not use farandole.
struct Meeting {
  bench::SpinBarrier barrier;
  char blobs[kMostRanks][kBlobRoom];
  int32_t bytes[kMostRanks];
};

uintptr_t address(float* x) { return reinterpret_cast<uintptr_t>(x); }

class Rank {
 public:
  Rank(Meeting& meeting, int rank, int ranks) : meeting_(meeting), rank_(rank), ranks_(ranks) {
    meeting_.bytes[rank] = checked(farandole_prepare(meeting_.blobs[rank], kBlobRoom));
    meet();
    std::vector<int32_t> node(static_cast<size_t>(ranks), 0);
    std::vector<const char*> blobs;
    for (int r = 0; r < ranks; ++r) blobs.push_back(meeting_.blobs[r]);
    const farandole_world world = {rank,           ranks,   node.data(), blobs.data(),
                                   meeting_.bytes, nullptr, 0,           "a key of 16 byte"};
    checked(-farandole_start(&world));
  }
  ~Rank() { farandole_shutdown(0, "", 10); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void blocking(int calls) {
    const int64_t call = make("scalar", 1);
    std::vector<int64_t> times;
    for (int i = 0; i < calls; ++i) {
      float x = static_cast<float>(rank_ + i);
      const int64_t start = now_ns();
      int64_t handle = checked(farandole_submit_one(call, address(&x), address(&x)));
      wait(&handle, 1);
      times.push_back(now_ns() - start);
      expect(x, i);
    }
    if (rank_ == 0) {
      std::printf("blocking 4 B: p50 %.1f us, p99 %.1f us, %d calls\n",
                  bench::quantile_us(times, 0.5), bench::quantile_us(times, 0.99), calls);
    }
  }

  void async(int batches) {
    std::vector<int64_t> prepared;
    for (int i = 0; i < kTensors; ++i) prepared.push_back(make("t" + std::to_string(i), kElements));
    std::vector<std::vector<float>> memory(kTensors, std::vector<float>(kElements));
    std::vector<int64_t> handles(kTensors), submitting, whole;
    for (int batch = 0; batch < batches; ++batch) {
      for (auto& x : memory) std::fill(x.begin(), x.end(), static_cast<float>(rank_ + batch));
      meet();
      const int64_t start = now_ns();
      for (size_t i = 0; i < kTensors; ++i) {
        handles[i] = checked(farandole_submit_one(prepared[i], address(memory[i].data()),
                                                  address(memory[i].data())));
      }
      const int64_t submitted = now_ns();
      wait(handles.data(), kTensors);
      whole.push_back(now_ns() - start);
      submitting.push_back(submitted - start);
      for (auto& x : memory) {
        for (float value : x) expect(value, batch);
      }
    }
    if (rank_ == 0) {
      std::printf(
          "1,000 async 1 KB: %.2f us each (%.2f of them submitting), best %.2f, %d batches\n",
          bench::quantile_us(whole, 0.5) / kTensors, bench::quantile_us(submitting, 0.5) / kTensors,
          bench::quantile_us(whole, 0) / kTensors, batches);
    }
  }

 private:
  void meet() { meeting_.barrier.meet(ranks_); }

  int64_t make(const std::string& name, int64_t elements) {
    farandole_request request{};
    request.op = FARANDOLE_ALLREDUCE;
    request.reduce_op = FARANDOLE_SUM;
    request.dtype = FARANDOLE_FLOAT32;
    request.device = -1;
    request.prescale = request.postscale = 1;
    request.ndim = 1;
    request.shape = &elements;
    request.name = name.c_str();
    return checked(farandole_prepare_call(&request, 1));
  }

  void wait(const int64_t* handles, int32_t count) {
    while (checked(-farandole_wait(handles, count, 10)) == -FARANDOLE_PENDING) {
    }
    for (int32_t i = 0; i < count; ++i) farandole_release(handles[i]);
  }

  // Checks an answer of the C ABI: a count, or -code. FARANDOLE_PENDING is not an error.
  template <class T>
  T checked(T answer) const {
    if (answer >= 0 || answer == -FARANDOLE_PENDING) return answer;
    std::fprintf(stderr, "rank %d: %s\n", rank_, farandole_error());
    ::_exit(1);
  }

  void expect(float value, int shift) const {
    const int sum = ranks_ * (ranks_ - 1) / 2 + ranks_ * shift;
    if (value == static_cast<float>(sum)) return;
    std::fprintf(stderr, "rank %d: %g, not %d\n", rank_, static_cast<double>(value), sum);
    ::_exit(1);
  }

  Meeting& meeting_;
  const int rank_;
  const int ranks_;
};

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const int batches = argc > 2 ? std::atoi(argv[2]) : 30;
  void* shared =
      ::mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (ranks < 1 || ranks > kMostRanks || shared == MAP_FAILED) return 2;
  auto* meeting = new (shared) Meeting;
  const std::string only = argc > 3 ? argv[3] : "";
  const auto wanted = [&](const char* part) { return only.empty() || only == part; };
  const auto rank = [&](int number) {
    Rank here(*meeting, number, ranks);
    if (wanted("blocking")) here.blocking(100 * batches);
    if (wanted("async")) here.async(batches);
    return 0;
  };
  return bench::run_ranks(ranks, rank) ? 0 : 1;
}
