// SPDX-License-Identifier: Apache-2.0
// Zero copy on GPUs: tensors that are reduced at their places in windows, over the GPU double, which ends the test
// when ranks disagree about registered memory, or free what a communicator knows.
#include <atomic>

#include "base/error.h"
#include "runtime/gpu_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// Floats of a window, one tensor after the other at multiples of 16 bytes.
class Placed {
 public:
  explicit Placed(TestRank& self)
      : window_(self.runtime()->gpus().open_window(self.rank, kWorldSet, kBytes)) {
    uint64_t at = 0;
    for (size_t n : kSizes) {
      places_.push_back(at);
      at += (n * sizeof(float) + 15) / 16 * 16;
    }
    CHECK(at <= kBytes);
  }
  ~Placed() { window_->close(); }
  size_t count() const { return places_.size(); }
  GpuWindow& window() const { return *window_; }
  float* data(size_t i) const {
    return reinterpret_cast<float*>(static_cast<char*>(window_->data()) + places_[i]);
  }
  // Of the tensor at this place; `data`: where it lies.
  Ask ask(size_t i, float* data) const {
    Ask ask{FARANDOLE_ALLREDUCE,
            {static_cast<int64_t>(kSizes[i])},
            data,
            data,
            "grad " + std::to_string(i)};
    ask.window = window_->number();
    ask.place = places_[i];
    return ask;
  }

 private:
  static constexpr size_t kBytes = 2 << 20;
  std::shared_ptr<GpuWindow> window_;
  std::vector<uint64_t> places_;
};

enum class Where { kInPlace, kElsewhere };

// One step; each tensor lies where `where(i)` says.
template <class Choice>
void step(TestRank& self, UserStream& stream, const Placed& placed, Choice&& where) {
  std::vector<Floats> elsewhere;
  std::vector<Handle> handles;
  for (size_t n : kSizes) elsewhere.push_back(values_of(self.rank, n));
  for (size_t i = 0; i < placed.count(); ++i) {
    if (where(i) == Where::kInPlace) {
      std::ranges::copy(elsewhere[i], placed.data(i));
      elsewhere[i].assign(kSizes[i], -1.0F);
    }
    const Ask ask =
        placed.ask(i, where(i) == Where::kInPlace ? placed.data(i) : elsewhere[i].data());
    handles.push_back(self.submit(on_gpu(ask, self.rank, stream)));
  }
  finish_on(self, stream, handles);
  for (size_t i = 0; i < placed.count(); ++i) {
    const float* result = where(i) == Where::kInPlace ? placed.data(i) : elsewhere[i].data();
    CHECK(Floats(result, result + kSizes[i]) == sum_over(self.size, kSizes[i]));
  }
}

}  // namespace

TEST(gradients_are_summed_at_their_places) {
  run_gpu_jobs({1, 2, 3}, [](TestRank& self) {
    UserStream stream(self.rank);
    const Placed placed(self);
    for (int i = 0; i < 4; ++i) {
      step(self, stream, placed, [](size_t) { return Where::kInPlace; });
    }
  });
}

// NCCL must meet registered memory on all ranks or on none, so it is brought there.
TEST(a_tensor_outside_its_window_is_copied_there) {
  run_gpu_jobs({2, 3}, [](TestRank& self) {
    UserStream stream(self.rank);
    const Placed placed(self);
    for (size_t shift = 0; shift < 3; ++shift) {
      step(self, stream, placed, [&](size_t i) {
        return (i + shift + static_cast<size_t>(self.rank)) % 3 == 0 ? Where::kElsewhere
                                                                     : Where::kInPlace;
      });
    }
  });
}

TEST(a_rank_without_a_tensor_adds_nothing) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank);
    const Placed placed(self);
    Floats data = values_of(0, kSizes[2]);
    Ask ask = placed.ask(2, data.data());
    if (self.rank == 1) ask.input = ask.output = nullptr;
    finish_on(self, stream, {self.submit(on_gpu(ask, self.rank, stream))});
    CHECK(data == values_of(0, kSizes[2]));
  });
}

TEST(windows_close_and_others_open) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank);
    for (int round = 0; round < 3; ++round) {
      const Placed first(self), second(self);
      step(self, stream, first, [](size_t) { return Where::kInPlace; });
      step(self, stream, second, [](size_t) { return Where::kInPlace; });
    }
  });
}

TEST(memory_of_a_window_may_outlive_the_job) {
  std::vector<std::shared_ptr<GpuWindow>> kept(2);
  run_job(
      Kind::kThreads, 2,
      [&](TestRank& self) {
        UserStream stream(self.rank);
        Placed placed(self);
        step(self, stream, placed, [](size_t) { return Where::kInPlace; });
        kept[static_cast<size_t>(self.rank)] =
            self.runtime()->gpus().open_window(self.rank, kWorldSet, 4096);  // never used
      },
      on_double);
  CHECK(gpu_library().alive() > 0);
  kept.clear();
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(places_are_checked_and_agreed_upon) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank);
    Placed placed(self);
    Floats data = values_of(self.rank, kSizes[2]);
    const Ask good = placed.ask(2, data.data());
    const auto fails = [&](uint32_t window, uint64_t place, ErrorCode code) {
      Ask ask = good;
      ask.window = window, ask.place = place;
      return self.fails(on_gpu(ask, self.rank, stream), code);
    };
    CHECK(contains(fails(77, 0, ErrorCode::kInvalidArgument), "window 77 is not open"));
    CHECK(contains(fails(good.window, 8, ErrorCode::kInvalidArgument), "multiples of 16"));
    CHECK(contains(fails(good.window, 2 << 20, ErrorCode::kInvalidArgument), "is no place for"));
    CHECK(contains(fails(good.window, self.rank == 0 ? 0 : 64, ErrorCode::kMismatch),
                   "place in GPU memory"));
    step(self, stream, placed, [](size_t) { return Where::kInPlace; });
  });
}

// Windows are ordinary memory then, on all ranks or on some.
TEST(through_host_memory_windows_are_ignored) {
  for (bool everywhere : {true, false}) {
    run_gpu_jobs(
        {2},
        [](TestRank& self) {
          UserStream stream(self.rank);
          const Placed placed(self);
          for (Where where : {Where::kInPlace, Where::kElsewhere}) {
            step(self, stream, placed, [&](size_t) { return where; });
          }
        },
        [&](Config& config) {
          if (everywhere) {
            config.gpu_backend = "host";
          } else {
            static std::atomic<int> rank{0};
            if (++rank % 2 == 0) config.nccl_library = "/no/such/libnccl.so.2";
          }
        });
  }
}

// Some ranks give memory of a window, others do not; NCCL must not meet it.
TEST(calls_without_a_place_take_memory_of_windows) {
  run_gpu_jobs({2, 3}, [](TestRank& self) {
    UserStream stream(self.rank);
    const Placed placed(self);
    for (int turn = 0; turn < 2 * self.size; ++turn) {
      const bool inside = (turn + self.rank) % 2 == 0;
      for (size_t n : {size_t{3000}, size_t{400'000}}) {
        const size_t i = n == 3000 ? 2 : 3;
        Floats outside = values_of(self.rank, n);
        if (inside) std::ranges::copy(outside, placed.data(i));
        float* const data = inside ? placed.data(i) : outside.data();
        const auto own = [&](Op op) {
          Ask ask{static_cast<int32_t>(op), {static_cast<int64_t>(n)}, data, data, ""};
          ask.root = turn % self.size;
          return on_gpu(ask, self.rank, stream);
        };
        finish_on(self, stream, {self.submit(own(Op::kAllreduce))});
        CHECK(Floats(data, data + n) == sum_over(self.size, n));
        std::ranges::copy(values_of(self.rank, n), data);
        finish_on(self, stream, {self.submit(own(Op::kBroadcast))});
        CHECK(Floats(data, data + n) == values_of(turn % self.size, n));
        const size_t rows = 1000;
        std::ranges::copy(values_of(self.rank, rows), data);
        Floats gathered(rows * static_cast<size_t>(self.size));
        Ask gather{FARANDOLE_ALLGATHER, {static_cast<int64_t>(rows)}, data, gathered.data(), ""};
        finish_on(self, stream, {self.submit(on_gpu(gather, self.rank, stream))});
        for (int r = 0; r < self.size; ++r) {
          const auto begin = gathered.begin() + r * static_cast<long>(rows);
          CHECK(Floats(begin, begin + static_cast<long>(rows)) == values_of(r, rows));
        }
      }
    }
  });
}

TEST(memory_of_a_window_says_where_it_lies) {
  run_gpu_jobs({2}, [](TestRank& self) {
    const Placed placed(self);
    CHECK_EQ(self.runtime()->gpus().device_of(placed.window().address()), self.rank);
    CHECK_EQ(
        self.runtime()->gpus().device_of(placed.window().address() + placed.window().bytes() - 1),
        self.rank);
  });
}

TEST(closing_a_window_waits_for_streams_that_use_it) {
  run_gpu_jobs({1, 2}, [](TestRank& self) {
    UserStream stream(self.rank), other(self.rank);
    auto placed = std::make_unique<Placed>(self);
    step(self, stream, *placed, [](size_t) { return Where::kInPlace; });
    std::fill_n(placed->data(1), kSizes[1], 5.0F);
    const cuda::Address lies = placed->window().address();
    const int gate = gpu_library().gate(stream.get());
    Floats seen(kSizes[1]);
    std::pair<float*, Floats*> both{placed->data(1), &seen};
    gpu_library().call(
        stream.get(),
        [](void* argument) {
          auto [from, to] = *static_cast<const std::pair<float*, Floats*>*>(argument);
          std::copy_n(from, to->size(), to->begin());
        },
        &both);
    placed.reset();  // does not wait
    const auto go_on = [&] {
      Floats data = values_of(self.rank, 10);
      finish_on(self, other, {self.submit(on_gpu(allreduce(data), self.rank, other))});
    };
    const auto is_there = [&] {
      try {
        return self.runtime()->gpus().device_of(lies) == self.rank;
      } catch (const Error&) {
        return false;
      }
    };
    for (int i = 0; i < 20; ++i) go_on();
    CHECK(is_there());
    gpu_library().open(gate);
    stream.synchronize();
    CHECK(seen == Floats(kSizes[1], 5.0F));
    for (int i = 0; i < 200; ++i) go_on();
    CHECK(!is_there());
  });
}

// Only streams of calls with a place are asked later: the double ends the test where a stream is used after its end.
TEST(other_calls_streams_may_end_before_a_window) {
  run_gpu_jobs({1, 2}, [](TestRank& self) {
    UserStream stream(self.rank);
    auto placed = std::make_unique<Placed>(self);
    step(self, stream, *placed, [](size_t) { return Where::kInPlace; });
    {
      UserStream other(self.rank);
      Floats data = values_of(self.rank, 10);
      finish_on(self, other, {self.submit(on_gpu(allreduce(data), self.rank, other))});
      CHECK(data == sum_over(self.size, data.size()));
    }
    placed.reset();
    self.check_usable();
  });
}

TEST(a_capture_is_not_spoiled_by_what_goes_on_meanwhile) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank), captured(self.rank);
    auto placed = std::make_unique<Placed>(self);
    step(self, stream, *placed, [](size_t) { return Where::kInPlace; });
    Floats data(1000, -1.0F);
    const int gate = gpu_library().gate(stream.get());
    stream.write(data, values_of(self.rank, data.size()));
    const Handle handle = self.submit(on_gpu(allreduce(data, "held up"), self.rank, stream));
    CHECK(!self.wait({handle}));
    gpu_library().capture(captured.get());
    placed.reset();  // as Python's garbage collector may
    gpu_library().open(gate);
    const Deadline deadline = patience();
    while (!self.runtime()->handles().settled(handle) && !deadline.expired()) {
      std::this_thread::yield();
    }
    CHECK(self.runtime()->handles().settled(handle));
    CHECK_EQ(gpu_library().end_capture(captured.get()), 0);
    self.runtime()->handles().release(handle);
    CHECK(data == sum_over(self.size, data.size()));
  });
}
