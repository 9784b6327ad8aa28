// SPDX-License-Identifier: Apache-2.0
// The handler that XLA calls on a GPU, over the GPU double: in the order of XLA's stream.
#include <cstdlib>

#include "api/xla_frame.h"
#include "runtime/gpu_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

void init_with_gpu() {
  for (const char* library : {"CUDA", "NCCL", "NVRTC"}) {
    const std::string name = std::string("FARANDOLE_") + library + "_LIBRARY";
    setenv(name.c_str(), gpu_library().path.c_str(), 1);
  }
  init_alone();
}

// A call over memory of the GPU.
struct GpuFrame : Frame {
  const size_t n;
  UserStream stream{0};
  float* memory[4];  // two inputs, two results

  explicit GpuFrame(size_t count) : Frame(count), n(count) {
    handler = farandole_xla_collective_on;
    stream_now = stream.get();
    for (float*& each : memory) {
      void* made = nullptr;
      CHECK_EQ(farandole_allocate_on(0, n * sizeof(float), stream.number(), &made), FARANDOLE_OK);
      each = static_cast<float*>(made);
    }
    stream.synchronize();
    build();
    xla::Buffer* const buffers[] = {&tensors[0], &tensors[1], &outputs[0], &outputs[1]};
    for (int i = 0; i < 4; ++i) {
      std::fill_n(memory[i], n, -1.0F);
      buffers[i]->data = memory[i];
    }
  }
  ~GpuFrame() {
    for (float* each : memory) farandole_free_on(each, stream.number());
    stream.synchronize();
    stream_now = nullptr;
  }

  // XLA's stream produces the inputs after the call.
  std::string call_early() {
    const int gate = gpu_library().gate(stream.get());
    for (int i = 0; i < 2; ++i) stream.write(memory[i], i ? second : first);
    const std::string error = call();
    CHECK(holds(2, Floats(n, -1.0F)));
    gpu_library().open(gate);
    stream.synchronize();
    return error;
  }
  bool holds(int i, const Floats& values) const {
    return std::equal(values.begin(), values.end(), memory[i]);
  }
};

}  // namespace

TEST(xla_gets_results_in_the_order_of_its_stream) {
  init_with_gpu();
  for (size_t n : {size_t{1}, size_t{70'000}}) {
    GpuFrame call(n);
    CHECK_EQ(call.call_early(), "");
    CHECK(call.holds(2, tripled(call.first)));
    CHECK(call.holds(3, tripled(call.second)));
  }
  shut_down();
}

TEST(xla_gets_what_negotiation_sizes_copied_in_its_stream) {
  init_with_gpu();
  for (int repeat = 0; repeat < 3; ++repeat) {
    GpuFrame call(6000);
    call.head[0] = FARANDOLE_ALLGATHER;
    CHECK_EQ(call.call_early(), "");
    CHECK(call.holds(2, call.first));
    CHECK(call.holds(3, call.second));
    std::vector<int64_t> shorter{5999};
    call.outputs[0].shape = shorter.data();
    CHECK(contains(call.call(), "farandole.MismatchError: allgather 'of a program'"));
  }
  shut_down();
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(xla_hears_of_errors_on_a_gpu) {
  init_with_gpu();
  {
    GpuFrame call(3);
    call.head[1] = 17;
    CHECK(contains(call.call(), "farandole.ValueError: allreduce 'of a program': unknown reduce"));
    call.head[1] = FARANDOLE_SUM;
    stream_now = nullptr;
    CHECK(contains(call.call(), "can't read: it gives no stream or device"));
    CHECK_EQ(destroyed, 1);
    stream_now = call.stream.get();
    CHECK_EQ(call.call_early(), "");
    CHECK(call.holds(2, tripled(call.first)));
    for (xla::Buffer* buffer :
         {&call.tensors[0], &call.tensors[1], &call.outputs[0], &call.outputs[1]})
      buffer->data = nullptr;
    call.shape[0] = 0;
    CHECK_EQ(call.call(), "");
    shut_down();
    CHECK(contains(call.call(), "farandole.ShutdownError: farandole has not been initialized"));
  }
  CHECK_EQ(gpu_library().alive(), 0);
}
