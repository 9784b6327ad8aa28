// SPDX-License-Identifier: Apache-2.0
// What a job does while all is well, and what it survives. How it ends is in runtime_end_test.cc.
#include "runtime/runtime.h"

#include <algorithm>
#include <numeric>

#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// Tiny ones travel in the log; the last is many blocks.
constexpr size_t kCallSizes[] = {0, 1, 5, 256, 257, 3000, 40'001};

Floats ramp(int rank, size_t rows, size_t width) { return values_of(rank, rows * width); }

// What the core allocates for the call's result.
Floats result_of(TestRank& self, const Ask& ask, std::vector<int64_t>* received = nullptr) {
  Floats values;
  const Handle handle = self.submit(ask);
  CHECK(!self.wait({handle}));
  self.runtime()->handles().look(handle, [&](const Outcome& outcome) {
    const auto* data = reinterpret_cast<const float*>(outcome.output);
    values.assign(data, data + std::accumulate(outcome.shape.begin(), outcome.shape.end(),
                                               int64_t{1}, std::multiplies<>()));
    if (received) *received = outcome.received;
  });
  self.runtime()->handles().release(handle);
  return values;
}

void allreduce_all_sizes(TestRank& self, bool named) {
  std::vector<Floats> data;
  std::vector<Handle> handles;
  for (size_t n : kCallSizes) {  // blocking
    Floats one = values_of(self.rank, n);
    self.run(allreduce(one, named ? "blocking " + std::to_string(n) : ""));
    CHECK(one == sum_over(self.size, n));
  }
  for (int i = 0; i < 4; ++i) {
    for (size_t n : kCallSizes) data.push_back(values_of(self.rank, n));
  }
  for (size_t i = 0; i < data.size(); ++i) {
    // Named ones may come in another order on every rank.
    size_t at = named ? (i * 5 + static_cast<size_t>(self.rank) * 3) % data.size() : i;
    handles.push_back(self.submit(allreduce(data[at], named ? "async " + std::to_string(at) : "")));
  }
  self.finish(handles);
  for (const Floats& one : data) CHECK(one == sum_over(self.size, one.size()));
}

void gather_rows(TestRank& self, size_t width) {
  Floats mine = ramp(self.rank, static_cast<size_t>(self.rank) + 1, width);
  Ask ask{FARANDOLE_ALLGATHER,
          {self.rank + 1, static_cast<int64_t>(width)},
          mine.data(),
          nullptr,
          "rows of " + std::to_string(width)};
  Floats expected;
  for (int r = 0; r < self.size; ++r) {
    Floats theirs = ramp(r, static_cast<size_t>(r) + 1, width);
    expected.insert(expected.end(), theirs.begin(), theirs.end());
  }
  CHECK(result_of(self, ask) == expected);
}

void scatter_rows(TestRank& self, size_t width) {
  size_t rows = static_cast<size_t>(self.size) * 2 + 1;  // rank 0 keeps 3, the others 2
  Floats mine = ramp(self.rank, rows, width);
  Ask ask{FARANDOLE_REDUCESCATTER,
          {static_cast<int64_t>(rows), static_cast<int64_t>(width)},
          mine.data(),
          nullptr,
          ""};
  Floats sum = sum_over(self.size, rows * width);
  size_t first = self.rank == 0 ? 0 : static_cast<size_t>(self.rank) * 2 + 1;
  size_t kept = self.rank == 0 ? 3 : 2;
  CHECK(result_of(self, ask) ==
        Floats(sum.begin() + static_cast<ptrdiff_t>(first * width),
               sum.begin() + static_cast<ptrdiff_t>((first + kept) * width)));
}

// Rank r sends s+1 rows to rank s, each full of 100r + s.
void exchange_rows(TestRank& self, size_t width) {
  Ask ask{FARANDOLE_ALLTOALL, {0, static_cast<int64_t>(width)}, nullptr, nullptr, "to all"};
  Floats mine;
  for (int to = 0; to < self.size; ++to) {
    ask.splits.push_back(to + 1);
    ask.shape[0] += to + 1;
    mine.resize(mine.size() + static_cast<size_t>(to + 1) * width,
                static_cast<float>(100 * self.rank + to));
  }
  ask.input = mine.data();
  Floats expected;
  for (int from = 0; from < self.size; ++from) {
    expected.resize(expected.size() + static_cast<size_t>(self.rank + 1) * width,
                    static_cast<float>(100 * from + self.rank));
  }
  std::vector<int64_t> received;
  CHECK(result_of(self, ask, &received) == expected);
  CHECK(received == std::vector<int64_t>(static_cast<size_t>(self.size), self.rank + 1));
}

// Rank r gets r + 1 rows, each full of what it is the first, second, ... row of all.
void deal_rows(TestRank& self, int root, size_t width) {
  const int n = self.size, all = n * (n + 1) / 2, first = self.rank * (self.rank + 1) / 2;
  Floats mine;
  Ask ask{FARANDOLE_SCATTER, {0, static_cast<int64_t>(width)}, nullptr, nullptr, "deal"};
  ask.root = root;
  if (self.rank == root) {
    ask.shape[0] = all;
    for (int row = 0; row < all; ++row) mine.resize(mine.size() + width, static_cast<float>(row));
    for (int to = 0; to < n; ++to) ask.splits.push_back(to + 1);
  }
  ask.input = mine.data();
  Floats expected;
  for (int row = first; row <= first + self.rank; ++row) {
    expected.resize(expected.size() + width, static_cast<float>(row));
  }
  CHECK(result_of(self, ask) == expected);
}

}  // namespace

TEST(allreduce_of_every_size) {
  run_jobs({1, 2, 3, 4}, [](TestRank& self) {
    allreduce_all_sizes(self, true);
    allreduce_all_sizes(self, false);
  });
}

TEST(every_collective) {
  run_jobs({1, 2, 3, 4}, [](TestRank& self) {
    for (size_t width : {size_t{2}, size_t{3001}}) {
      gather_rows(self, width);
      scatter_rows(self, width);
      exchange_rows(self, width);
      for (int root = 0; root < self.size; ++root) {
        deal_rows(self, root, width);
        Floats data = values_of(self.rank, width);
        Ask ask{FARANDOLE_BROADCAST, {static_cast<int64_t>(width)}, data.data(), data.data(), ""};
        ask.root = root;
        self.run(ask);
        CHECK(data == values_of(root, width));
      }
      self.run({FARANDOLE_BARRIER, {}, nullptr, nullptr, ""});
    }
  });
}

// Reports beyond the ring wait in the writer's memory, in order. One submit() rings nobody before its end.
TEST(a_full_ring_loses_nothing) {
  run_jobs({2, 3}, [](TestRank& self) {
    constexpr size_t kCalls = 200;
    const std::string padding(4000, 'x');
    Floats data(kCalls, static_cast<float>(self.rank + 1));
    std::vector<Ask> asks;
    for (size_t i = 0; i < kCalls; ++i) {
      asks.push_back({FARANDOLE_ALLREDUCE, {1}, &data[i], &data[i], std::to_string(i) + padding});
    }
    self.finish(self.submit(asks));
    CHECK(data == Floats(kCalls, static_cast<float>(self.size * (self.size + 1) / 2)));
  });
}
