// SPDX-License-Identifier: Apache-2.0
// Batches of prepared calls in real ranks: training loops, and what disturbs them.
#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "runtime/runtime_ranks.h"

namespace farandole::check {
namespace {

constexpr int kSteps = 12;

// A rank's prepared gradients of several sizes, some of them tiny.
class Gradients {
 public:
  Gradients(TestRank& self, int tensors) : self_(self) {
    for (int t = 0; t < tensors; ++t) {
      data_.emplace_back(t % 3 == 0 ? 5 : 300 + 100 * static_cast<size_t>(t));
      calls_.push_back(self.prepare(allreduce(data_.back(), "grad." + std::to_string(t))));
    }
  }
  int count() const { return static_cast<int>(data_.size()); }

  // Submits these in one batch.
  std::vector<Handle> submit(int step, const std::vector<int>& tensors) {
    Batch batch;
    for (int t : tensors) {
      Floats& data = data_[static_cast<size_t>(t)];
      data = values_of(self_.rank + step, data.size());
      batch.add(calls_[static_cast<size_t>(t)], data.data(), data.data());
    }
    batch.submit(*self_.runtime());
    return batch.handles;
  }
  void check(int step, const std::vector<int>& tensors) const {
    for (int t : tensors) {
      const Floats& got = data_[static_cast<size_t>(t)];
      Floats sum(got.size());
      for (int r = 0; r < self_.size; ++r) {
        Floats one = values_of(r + step, got.size());
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += one[i];
      }
      CHECK(got == sum);
    }
  }
  // One step: all of them, cut into batches of so many.
  void train(int step, int batch, bool backwards = false) {
    std::vector<int> order = numbers_below(count());
    if (backwards) std::ranges::reverse(order);
    std::vector<Handle> handles;
    for (size_t at = 0; at < order.size(); at += static_cast<size_t>(batch)) {
      const auto size = std::min(static_cast<size_t>(batch), order.size() - at);
      const auto first = order.begin() + static_cast<ptrdiff_t>(at);
      for (Handle handle : submit(step, {first, first + static_cast<ptrdiff_t>(size)})) {
        handles.push_back(handle);
      }
    }
    self_.finish(handles);
    check(step, order);
  }

 private:
  TestRank& self_;
  std::vector<Floats> data_;
  std::vector<CheckedCall> calls_;
};

}  // namespace

// Within a batch a rank waits for one call, or asks whether it is done.
TEST(a_wait_for_one_of_a_batch_gets_its_tensor) {
  run_jobs({2, 3}, [](TestRank& self) {
    Gradients gradients(self, 9);
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<Handle> first = gradients.submit(step, {0, 1, 2, 3});
      const Deadline deadline = patience();
      while (self.rank == 0 && !self.runtime()->driver().done(first[2])) CHECK(!deadline.expired());
      if (self.rank > 0) self.finish(first[2]);
      gradients.check(step, {2});
      self.finish(gradients.submit(step, {4, 5, 6, 7, 8}));
      std::vector<Handle> left{first[0], first[1], first[3]};
      if (self.rank == 0) left.push_back(first[2]);
      self.finish(left);
      gradients.check(step, numbers_below(9));
    }
  });
}

// Rank 1 goes on when rank 0 tells it to, by other means than ours, and rank 0 has to wait first.
TEST(ranks_that_also_wait_for_each_other_elsewhere_go_on) {
  run_jobs({2}, [](TestRank& self) {
    Gradients gradients(self, 5);
    for (int step = 0; step < 4; ++step) gradients.train(step, 5);
    if (self.rank == 0) {
      const std::vector<Handle> batch = gradients.submit(4, {0, 1, 2, 3, 4});
      self.finish({batch[0], batch[1]});
      self.bootstrap.tell(1);
      self.finish({batch[2], batch[3], batch[4]});
    } else {
      std::vector<Handle> first = gradients.submit(4, {0, 1});
      self.bootstrap.await(1, 1);
      self.finish(gradients.submit(4, {2, 3, 4}));
      self.finish(first);
    }
    gradients.check(4, {0, 1, 2, 3, 4});
  });
}

// A few calls in flight take a single round trip each; from the eighth on they share buckets.
TEST(an_input_rides_along_while_few_others_do) {
  run_jobs({2, 3}, [](TestRank& self) {
    std::vector<Floats> values;
    std::vector<CheckedCall> calls;
    for (int i = 0; i < 8; ++i) {
      values.push_back(values_of(self.rank + i, 10));
      calls.push_back(self.prepare(allreduce(values.back(), std::to_string(i))));
    }
    for (uint32_t turn : {1, 2}) {
      const size_t count = 6 + turn;
      if (self.rank > 0) self.bootstrap.await(1, turn);
      std::vector<Handle> handles;
      for (size_t i = 0; i < count; ++i) {
        values[i] = values_of(self.rank, 10);
        handles.push_back(self.submit(calls[i], values[i].data(), values[i].data()));
      }
      if (self.rank == 0) self.bootstrap.tell(1);
      self.finish(handles);
      CHECK_EQ(self.buckets(), turn == 1 ? 0 : 1);
      for (size_t i = 0; i < count; ++i) CHECK(values[i] == sum_over(self.size, 10));
    }
  });
}

// The first that can't be submitted ends a batch, and its peers' call fails; those before it are reduced.
TEST(a_batch_ends_at_its_first_error) {
  run_jobs({2, 3}, [](TestRank& self) {
    Gradients gradients(self, 6);
    for (int step = 0; step < 3; ++step) gradients.train(step, 6);
    Floats ten = values_of(self.rank, 10), one_more = values_of(self.rank, 11);
    const std::string names[] = {"before", "bad", "after"};
    std::vector<CheckedCall> calls;
    for (const std::string& name : names) {
      calls.push_back(self.prepare(allreduce(ten, name)));
    }
    Floats before = ten, after = ten;
    const bool overlaps = self.rank == 0;  // input and output in part
    Handle last = 0;
    Batch batch;
    batch.add(calls[0], before.data(), before.data());
    batch.add(calls[1], overlaps ? one_more.data() : ten.data(),
              overlaps ? one_more.data() + 1 : ten.data());
    batch.add(calls[2], after.data(), after.data());
    if (overlaps) {
      CHECK_THROWS(batch.submit(*self.runtime()), ErrorCode::kInvalidArgument);
      CHECK(batch.handles[0] != 0 && batch.handles[1] == 0 && batch.handles[2] == 0);
      self.finish(batch.handles[0]);
      last = self.submit(calls[2], after.data(), after.data());
    } else {
      batch.submit(*self.runtime());
      self.finish(batch.handles[0]);
      last = batch.handles[2];
      const Failure failure = self.wait({batch.handles[1]});
      CHECK(failure.code == ErrorCode::kInvalidArgument);
      CHECK(contains(failure.text, "rank 0 refused") && contains(failure.text, "'bad'"));
    }
    self.finish(last);
    CHECK(before == sum_over(self.size, 10) && after == sum_over(self.size, 10));
  });
}

}  // namespace farandole::check
