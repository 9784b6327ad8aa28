// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/outcome.h"

#include <functional>
#include <numeric>

namespace farandole {
namespace {

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

}  // namespace

std::vector<int64_t> rows_of(const std::vector<int64_t>& told, const Signature& signature,
                             int members) {
  if (signature.traits().rows != Rows::kKept) return told;
  std::vector<int64_t> rows;
  for (int m = 0; m < members; ++m) rows.push_back(kept_rows(signature.rows(), m, members));
  return rows;
}

Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows,
                   const ProcessSet& set, Submission& mine,
                   const std::shared_ptr<GpuDevice>& device) {
  Outcome outcome;
  outcome.value = mine.value;
  outcome.shape = std::move(mine.shape);
  auto member = static_cast<size_t>(set.member);
  switch (signature.traits().rows) {
    case Rows::kBrought: outcome.shape[0] = sum(rows); break;
    case Rows::kKept: outcome.shape[0] = rows[member]; break;
    case Rows::kPairs:
      for (size_t at = member; at < rows.size(); at += static_cast<size_t>(set.members())) {
        outcome.received.push_back(rows[at]);
      }
      outcome.shape[0] = sum(outcome.received);
      break;
    case Rows::kNone: outcome.output = mine.output; return outcome;
  }
  outcome.output = mine.output;
  if (!outcome.output) {
    int64_t elements = std::accumulate(outcome.shape.begin(), outcome.shape.end(), int64_t{1},
                                       std::multiplies<>());
    outcome.owned = allocate(static_cast<size_t>(elements) * size_of(signature.dtype), device);
    outcome.output = outcome.owned.get();
  }
  return outcome;
}

}  // namespace farandole
