// SPDX-License-Identifier: Apache-2.0
// Ranks with GPUs: the whole way from submit to the caller's stream, over the GPU double.
#include <cstdlib>

#include "base/error.h"
#include "runtime/gpu_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// Several steps of several tensors at once, written late in the user's stream.
void train(TestRank& self, int device, int steps = 5) {
  UserStream stream(device);
  for (int step = 0; step < steps; ++step) {
    std::vector<Floats> data;
    std::vector<Handle> handles;
    for (size_t n : kSizes) data.emplace_back(n, -1.0F);
    for (size_t i = 0; i < data.size(); ++i) {
      stream.write(data[i], values_of(self.rank, data[i].size()));
      handles.push_back(
          self.submit(on_gpu(allreduce(data[i], "grad " + std::to_string(i)), device, stream)));
    }
    finish_on(self, stream, handles);
    for (const Floats& one : data) CHECK(one == sum_over(self.size, one.size()));
  }
}

}  // namespace

TEST(gradients_written_late_are_summed) {
  run_gpu_jobs({1, 2, 3}, [](TestRank& self) { train(self, self.rank); });
}

TEST(gradients_through_host_memory_are_summed) {
  const Tune asked = [](Config& config) { config.gpu_backend = "host"; };
  const Tune no_nccl = [](Config& config) { config.nccl_library = "libfarandole-no-such-nccl.so"; };
  for (const Tune& tune : {asked, no_nccl}) {
    run_gpu_jobs({1, 2, 3}, [](TestRank& self) { train(self, self.rank); }, tune);
  }
}

// Between hosts, nobody wakes a rank whose messages have come: it looks again.
TEST(gradients_through_host_memory_are_summed_over_hosts) {
  for (const Nodes& nodes : {Nodes{0, 1}, Nodes{0, 0, 2}}) {
    const auto through_hosts = [](Config& config) {
      on_double(config);
      config.gpu_backend = "host";
    };
    run_job(
        Kind::kThreads, static_cast<int>(nodes.size()),
        [](TestRank& self) { train(self, self.rank); }, through_hosts, nodes);
    CHECK_EQ(gpu_library().alive(), 0);
  }
}

TEST(the_host_is_blocked_until_launch_only) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank);
    Floats data(1000, -1.0F);
    const int gate = gpu_library().gate(stream.get());  // a slow kernel of the user
    stream.write(data, values_of(self.rank, data.size()));
    const Handle handle = self.submit(on_gpu(allreduce(data, "slow"), self.rank, stream));
    CHECK(!self.wait({handle}));  // returns while the kernel runs
    CHECK(self.runtime()->handles().done(handle));
    CHECK(!self.runtime()->handles().settled(handle));
    CHECK_EQ(data[0], -1.0F);
    gpu_library().open(gate);
    self.runtime()->gpus().join_stream(std::vector{handle}, stream.number());
    stream.synchronize();
    CHECK(data == sum_over(self.size, data.size()));
    await_settled(self, handle);
    self.runtime()->handles().release(handle);
  });
}

TEST(results_that_only_negotiation_can_size_lie_in_our_memory) {
  run_gpu_jobs({2, 3}, [](TestRank& self) {
    UserStream stream(self.rank);
    Floats data = values_of(self.rank, static_cast<size_t>(2 * (self.rank + 1)));
    Ask ask{FARANDOLE_ALLGATHER, {self.rank + 1, 2}, data.data(), nullptr, "rows"};
    const Handle handle = self.submit(on_gpu(ask, self.rank, stream));
    CHECK(!self.wait({handle}));
    self.runtime()->gpus().join_stream(std::vector{handle}, stream.number());
    stream.synchronize();
    self.runtime()->handles().look(handle, [&](const Outcome& outcome) {
      CHECK_EQ(outcome.shape[0], self.size * (self.size + 1) / 2);
      const auto* rows = reinterpret_cast<const float*>(outcome.output);
      for (int rank = 0; rank < self.size; ++rank) {
        for (float value : values_of(rank, static_cast<size_t>(2 * (rank + 1)))) {
          CHECK_EQ(*rows++, value);
        }
      }
    });
    self.runtime()->handles().release(handle);
  });
}

TEST(handles_that_nobody_waits_for_free_their_buffers_late) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank);
    for (int i = 0; i < 20; ++i) {
      auto data = std::make_unique<Floats>(values_of(self.rank, 3000));
      const Handle handle = self.submit(on_gpu(allreduce(*data), self.rank, stream));
      await_settled(self, handle);
      data.reset();  // ASan sees any later access
      self.runtime()->handles().release(handle);
    }
  });
}

TEST(tensors_on_gpus_and_on_cpus_do_not_mix) {
  run_gpu_jobs({2, 3}, [](TestRank& self) {
    UserStream stream(self.rank);
    for (int step = 0; step < 10; ++step) {
      Floats there = values_of(self.rank, 2000), here = values_of(self.rank, 4000);
      const Handle far = self.submit(on_gpu(allreduce(there, "there"), self.rank, stream));
      const Handle near = self.submit(allreduce(here, "here"));
      self.finish(near);
      finish_on(self, stream, {far});
      CHECK(there == sum_over(self.size, 2000));
      CHECK(here == sum_over(self.size, 4000));
    }
  });
}

TEST(two_ranks_may_share_a_gpu_through_host_memory) {
  run_gpu_jobs(
      {2}, [](TestRank& self) { train(self, 0); },
      [](Config& config) { config.shared_gpu = "host"; });
}

TEST(a_rank_keeps_its_gpu) {
  run_gpu_jobs({1}, [](TestRank& self) {
    UserStream first(0), second(1);
    Floats data = values_of(self.rank, 10);
    finish_on(self, first, {self.submit(on_gpu(allreduce(data), 0, first))});
    CHECK(contains(self.fails(on_gpu(allreduce(data), 1, second), ErrorCode::kInvalidArgument),
                   "a rank uses one GPU"));
  });
}

TEST(a_captured_stream_is_refused) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank);
    Floats data = values_of(self.rank, 10);
    gpu_library().capture(stream.get());
    const std::string text = self.fails(on_gpu(allreduce(data, "graph"), self.rank, stream),
                                        ErrorCode::kInvalidArgument);
    CHECK(contains(text, "CUDA graph"));
    CHECK_EQ(gpu_library().end_capture(stream.get()), 0);
    train(self, self.rank, 1);
  });
}

TEST(in_program_order_only_waits_launch) {
  run_gpu_jobs(
      {2},
      [](TestRank& self) {
        UserStream stream(self.rank);
        Floats first = values_of(self.rank, 400'000), second = values_of(self.rank, 400'000);
        const Handle one = self.submit(on_gpu(allreduce(first, "1"), self.rank, stream));
        const Handle two = self.submit(on_gpu(allreduce(second, "2"), self.rank, stream));
        Floats host = values_of(self.rank, 5000);
        self.run(allreduce(host, "host"));  // a wait for the CPU launches nothing
        CHECK(self.runtime()->handles().unlaunched(one));
        CHECK(!self.wait({one}));
        CHECK(self.runtime()->handles().unlaunched(two));
        finish_on(self, stream, {two});
        self.runtime()->handles().release(one);
        CHECK(first == sum_over(2, first.size()) && second == sum_over(2, second.size()));
      },
      [](Config& config) {
        config.gpu_order = "program";
        config.gpu_fusion_bytes = 1024;  // a bucket each
      });
}

// NCCL asks for it when it makes a communicator.
TEST(the_algorithm_is_pinned_before_communicators_are_made) {
  gpu_library().needs_nccl_double();
  ::unsetenv("NCCL_ALGO");
  run_job(
      Kind::kThreads, 1, [](TestRank& self) { train(self, 0, 1); },
      [](Config& config) {
        on_double(config);
        config.nccl_algo = "ring";
      });
  CHECK_EQ(std::string(gpu_library().algorithm()), "allreduce:ring");
  ::unsetenv("NCCL_ALGO");
}

TEST(a_profiler_sees_buckets_and_their_tensors) {
  gpu_library().needs_nccl_double();
  gpu_library().ranges();
  run_job(
      Kind::kThreads, 1, [](TestRank& self) { train(self, 0, 1); },
      [](Config& config) {
        on_double(config);
        config.nvtx = "1";
        config.nvtx_library = gpu_library().path;
      });
  const std::string ranges = gpu_library().ranges();
  CHECK(contains(ranges, "bucket ") && contains(ranges, ": grad "));
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    CHECK(contains(ranges, "grad " + std::to_string(i)));
  }
}

namespace {

// Allreduces until the job breaks. `drives`: this thread drives meanwhile, else the background thread does.
Failure work_until_failure(TestRank& self, const UserStream& stream, bool drives) {
  Floats data = values_of(self.rank, 1000);
  const Deadline deadline = patience();
  while (!deadline.expired()) {
    try {
      const Handle handle = self.submit(on_gpu(allreduce(data, "late"), self.rank, stream));
      while (!drives && !self.runtime()->driver().done(handle) && !deadline.expired()) {
        std::this_thread::yield();
      }
      if (Failure failure = self.wait({handle})) return failure;
      self.runtime()->handles().release(handle);
    } catch (const Error& error) {
      return {error.code(), error.what()};
    }
  }
  fail("the job never broke");
}

}  // namespace

// Whoever finds it leaves at once, whichever of its threads found it; its peers hear why.
TEST(an_asynchronous_error_of_nccl_reaches_every_rank) {
  gpu_library().needs_nccl_double();
  for (const int broken : {0, 1, 0, 1}) {
    for (const bool drives : {true, false}) {
      run_job(
          Kind::kThreads, 2,
          [&](TestRank& self) {
            UserStream stream(self.rank);
            train(self, self.rank, 1);
            self.bootstrap.barrier();
            if (self.rank == broken) gpu_library().break_rank(broken, 6);
            const Failure failure = work_until_failure(self, stream, drives);
            CHECK_EQ(failure.code, self.rank == broken ? ErrorCode::kLibrary : ErrorCode::kPeer);
            CHECK(contains(failure.text, "words of the double"));
          },
          on_double);
      gpu_library().break_rank(broken, 0);
      CHECK_EQ(gpu_library().alive(), 0);
    }
  }
}
