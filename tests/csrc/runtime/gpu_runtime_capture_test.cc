// SPDX-License-Identifier: Apache-2.0
// Streams that somebody captures into a CUDA graph, over the GPU double: what the core does meanwhile leaves them alone.
#include "base/error.h"
#include "runtime/gpu_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// As cudaStreamCreate makes them, and CuPy: it and the default stream wait for each other.
class BlockingStream {
 public:
  explicit BlockingStream(int device) : device_(GpuDevice::open(gpu_library().cuda, device)) {
    const GpuDevice::Scope scope(*device_);
    device_->api().check(device_->api().stream_create(&stream_, 0, 0), "a blocking stream");
  }
  ~BlockingStream() { device_->api().stream_destroy(stream_); }
  BlockingStream(const BlockingStream&) = delete;
  BlockingStream& operator=(const BlockingStream&) = delete;
  cuda::Stream get() const { return stream_; }

 private:
  std::shared_ptr<GpuDevice> device_;
  cuda::Stream stream_ = nullptr;
};

}  // namespace

// CUDA allows no use of the default stream meanwhile.
TEST(the_default_stream_is_left_alone_while_a_blocking_stream_is_captured) {
  if (gpu_library().has_real_nccl) skip("NCCL does not connect meanwhile: a CUDA call fails");
  run_gpu_jobs({1, 2}, [](TestRank& self) {
    UserStream stream(self.rank);
    const BlockingStream captured(self.rank);
    gpu_library().capture(captured.get());
    for (int i = 0; i < 20; ++i) {
      Floats data = values_of(self.rank, 10);
      finish_on(self, stream, {self.submit(on_gpu(allreduce(data), self.rank, stream))});
    }
    Floats data(10);
    Ask in_default = on_gpu(allreduce(data), self.rank, stream);
    in_default.stream = 0;
    CHECK_THROWS(self.submit(in_default), ErrorCode::kInvalidArgument);
    CHECK_EQ(gpu_library().end_capture(captured.get()), 0);
  });
  const auto device = GpuDevice::open(gpu_library().cuda, 0);
  const BlockingStream captured(0);
  const cuda::Address kept = device->allocate(100, nullptr);
  gpu_library().capture(captured.get());
  CHECK(!device->free(kept, nullptr));  // work in the default stream may still read it
  int ordinal = -1;
  CHECK_EQ(device->api().pointer_attribute(&ordinal, cuda::kPointerOrdinal, kept), 0);
  CHECK_EQ(gpu_library().end_capture(captured.get()), 0);
  CHECK(device->free(kept, nullptr));
}

TEST(a_capture_is_not_spoiled_by_what_goes_on_meanwhile) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank), captured(self.rank);
    Floats data(1000, -1.0F), first = values_of(self.rank, 10);
    finish_on(self, stream, {self.submit(on_gpu(allreduce(first), self.rank, stream))});
    const int gate = gpu_library().gate(stream.get());
    stream.write(data, values_of(self.rank, data.size()));
    const Handle handle = self.submit(on_gpu(allreduce(data, "held up"), self.rank, stream));
    CHECK(!self.wait({handle}));
    gpu_library().capture(captured.get());
    gpu_library().open(gate);
    await_settled(self, handle);
    CHECK_EQ(gpu_library().end_capture(captured.get()), 0);
    self.runtime()->handles().release(handle);
    CHECK(data == sum_over(self.size, data.size()));
  });
}

TEST(memory_of_a_captured_stream_is_not_freed_yet) {
  {
    const auto device = GpuDevice::open(gpu_library().cuda, 0);
    const UserStream stream(0);
    const cuda::Address kept = device->allocate(100, stream.get());
    int ordinal = -1;
    const auto is_there = [&] {
      return device->api().pointer_attribute(&ordinal, cuda::kPointerOrdinal, kept) == 0;
    };
    gpu_library().capture(stream.get());
    CHECK(!device->free(kept, stream.get()));
    CHECK_EQ(gpu_library().end_capture(stream.get()), 0);
    CHECK(is_there());
    CHECK(device->free(kept, stream.get()));
    CHECK(!is_there());
  }
  CHECK_EQ(gpu_library().alive(), 0);
}

// What NCCL returns then does not tell; its last words quote CUDA.
TEST(an_error_of_nccl_during_a_capture_names_the_remedy) {
  nccl::Api api;
  api.error_text = [](nccl::Result) { return "unhandled cuda error"; };
  api.last_error = [](nccl::Comm) { return "Cuda failure 2 'out of memory'"; };
  CHECK_EQ(api.text_of(1, nullptr), "unhandled cuda error (Cuda failure 2 'out of memory')");
  api.last_error = [](nccl::Comm) {
    return "Cuda failure 900 'operation not permitted when stream is capturing'";
  };
  CHECK(api.text_of(1, nullptr).ends_with("because NCCL cannot connect during a capture"));
  CHECK(contains(api.text_of(nccl::kInProgress, nullptr), "unset NCCL_COMM_BLOCKING"));
}
