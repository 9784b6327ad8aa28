// SPDX-License-Identifier: Apache-2.0
// Zero copy on GPUs: tensors that are reduced at their places in windows, over the GPU double, which ends the test
// when ranks disagree about registered memory, or free what a communicator knows.
#include "core/error.h"
#include "gpu_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

constexpr size_t kSizes[] = {1, 300, 5000, 400'000};

// Floats of a window, one tensor after the other at multiples of 16 bytes.
class Placed {
 public:
  Placed(TestRank& self, int device) : window_(self.runtime()->open_window(device, kBytes)) {
    uint64_t at = 0;
    for (size_t n : kSizes) {
      places_.push_back(at);
      at += (n * sizeof(float) + 15) / 16 * 16;
    }
    CHECK(at <= kBytes);
  }
  ~Placed() { window_->close(); }
  size_t count() const { return places_.size(); }
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
    const Placed placed(self, self.rank);
    for (int i = 0; i < 4; ++i) {
      step(self, stream, placed, [](size_t) { return Where::kInPlace; });
    }
  });
}

// NCCL must meet registered memory on all ranks or on none, so it is brought there.
TEST(who_has_a_tensor_elsewhere_brings_it_to_its_place) {
  run_gpu_jobs({2, 3}, [](TestRank& self) {
    UserStream stream(self.rank);
    const Placed placed(self, self.rank);
    for (size_t shift = 0; shift < 3; ++shift) {
      step(self, stream, placed, [&](size_t i) {
        return (i + shift + static_cast<size_t>(self.rank)) % 3 == 0 ? Where::kElsewhere
                                                                     : Where::kInPlace;
      });
    }
  });
}

TEST(who_brings_no_tensor_adds_nothing) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank);
    const Placed placed(self, self.rank);
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
      const Placed first(self, self.rank), second(self, self.rank);
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
        Placed placed(self, self.rank);
        step(self, stream, placed, [](size_t) { return Where::kInPlace; });
        kept[static_cast<size_t>(self.rank)] =
            self.runtime()->open_window(self.rank, 4096);  // never used
      },
      on_double);
  CHECK(gpu_library().alive() > 0);
  kept.clear();
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(places_are_checked_and_agreed_upon) {
  run_gpu_jobs({2}, [](TestRank& self) {
    UserStream stream(self.rank);
    Placed placed(self, self.rank);
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

TEST(through_host_memory_places_mean_nothing) {
  run_gpu_jobs(
      {2},
      [](TestRank& self) {
        UserStream stream(self.rank);
        CHECK(self.runtime()->open_window(self.rank, 4096) == nullptr);
        Floats data = values_of(self.rank, 3000);
        finish_on(self, stream, {self.submit(on_gpu(allreduce(data), self.rank, stream))});
        CHECK(data == sum_over(2, 3000));
      },
      [](Config& config) { config.gpu_plane = "host"; });
}
