// SPDX-License-Identifier: Apache-2.0
// NCCL's Simple protocol over its connections, on the CPU: what a kernel does to move data along a ring, or to one peer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>

#include "base/reduce_op.h"
#include "base/types.h"
#include "lib/gpu/gpu_double/device_layout.h"

namespace farandole::check::device {

// "AllReduce_Sum_f32_RING_SIMPLE", taken apart.
struct Function {
  explicit Function(const std::string& name);
  std::string what;  // "AllReduce"
  std::string operation;
  std::string type;
  bool is_simple_ring;
};

// How a collective reduces: in `apply` two inputs, in `finish` the result.
class Reduction {
 public:
  Reduction(const Function& function, uint64_t scale);
  size_t size() const { return size_; }
  // out = scaled input, or scaled input op other; `last`: with what comes after the last rank.
  void apply(std::byte* out, const std::byte* input, const std::byte* other, size_t count,
             bool last) const;

 private:
  DType type_ = DType::kInt8;
  ReduceOp op_ = ReduceOp::kSum;
  size_t size_ = 1;
  double weight_ = 1.0;
  int divisor_ = 1;
};

// Ends a kernel's thread: NCCL has raised the communicator's abort flag.
struct Aborted {};

// A kernel spins; here peers may share a core.
template <class Condition>
void await(Condition&& is_true, const volatile uint32_t* abort) {
  for (int spins = 0; !is_true(); ++spins) {
    if (abort && *abort != 0) throw Aborted();
    if (spins < 50) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

// A connection to the peer before and after. Either may be absent.
class Link {
 public:
  struct Steps {
    int slices;  // of a chunk
    int each;    // steps of a slice
  };
  Link(const Communicator& communicator, Connection* from, Connection* to, Steps steps,
       int step_bytes, const Reduction* reduction);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Moves one chunk: `input` and what is received, reduced, go to `output` and are sent. Each may be null or false.
  void move(const std::byte* input, bool receives, std::byte* output, bool sends, size_t count,
            bool last = false);

 private:
  void await(const uint64_t* counter, uint64_t wanted) const;
  std::byte* slot(const Connection& connection, uint64_t step) const;

  const Communicator& communicator_;
  Connection* from_;
  Connection* to_;
  Steps steps_;
  size_t step_elements_;
  const Reduction* reduction_;
  uint64_t received_ = 0;  // steps
  uint64_t sent_ = 0;
};

}  // namespace farandole::check::device
