// SPDX-License-Identifier: Apache-2.0
#include "data/plane/part_layout.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace farandole {
namespace {

[[noreturn]] void contradiction(const Part& part, const std::string& what) {
  throw Error(ErrorCode::kInternal,
              std::string("bucket part (") + name_of(part.signature.op) + "): " + what);
}

}  // namespace

kernels::Factors factors_of(const Part& part) {
  const Signature& signature = part.signature;
  const bool average = signature.reduce_op == ReduceOp::kAverage;
  return {signature.prescale, signature.postscale, average ? part.divisor : 1};
}

size_t PartLayout::row_bytes() const {
  return static_cast<size_t>(part_.signature.row_elements()) * size_of(part_.signature.dtype);
}

size_t PartLayout::share_start(int owner) const {
  size_t before = 0;
  for (int member = 0; member < owner; ++member) before += rows(member);
  return row_bytes() * before;
}

size_t PartLayout::longest_share() const {
  return row_bytes() * static_cast<size_t>(*std::max_element(part_.rows.begin(), part_.rows.end()));
}

int PartLayout::receiver(int sender, int piece) const {
  return part_.signature.op == Op::kAlltoall ? (sender + 1 + piece) % members_ : kEverybody;
}

size_t PartLayout::piece_bytes(int sender, int piece) const {
  switch (part_.signature.op) {
    case Op::kBroadcast: return sender == part_.signature.root ? part_.signature.bytes() : 0;
    case Op::kAllgather: return row_bytes() * rows(sender);
    default: return row_bytes() * rows(sender * members_ + receiver(sender, piece));
  }
}

size_t PartLayout::piece_start(int sender, int receiver) const {
  if (part_.signature.op != Op::kAlltoall) return 0;
  size_t before = 0;
  for (int member = 0; member < receiver; ++member) before += rows(sender * members_ + member);
  return row_bytes() * before;
}

size_t PartLayout::landing_start(int sender, int receiver) const {
  if (part_.signature.op == Op::kBroadcast) return 0;
  const bool alltoall = part_.signature.op == Op::kAlltoall;
  size_t before = 0;
  for (int member = 0; member < sender; ++member) {
    before += rows(alltoall ? member * members_ + receiver : member);
  }
  return row_bytes() * before;
}

size_t PartLayout::input_bytes(int member) const {
  switch (part_.signature.op) {
    case Op::kAllreduce:
    case Op::kReducescatter: return part_.signature.bytes();
    case Op::kBroadcast:
    case Op::kAllgather: return piece_bytes(member, 0);
    case Op::kAlltoall: return piece_start(member, members_);
    default: return 0;
  }
}

void PartLayout::check_rows() const {
  const Op op = part_.signature.op;
  const auto count = static_cast<size_t>(members_);
  const size_t expected = op == Op::kAlltoall                                ? count * count
                          : op == Op::kAllgather || op == Op::kReducescatter ? count
                                                                             : 0;
  if (part_.rows.size() != expected) {
    contradiction(part_, std::to_string(part_.rows.size()) + " row counts instead of " +
                             std::to_string(expected));
  }
  int64_t sum = 0;
  for (int64_t rows : part_.rows) {
    if (rows < 0) contradiction(part_, "a negative row count");
    sum += rows;
  }
  if (op == Op::kReducescatter && sum != part_.signature.rows()) {
    contradiction(part_, "its members keep " + std::to_string(sum) + " rows of " +
                             std::to_string(part_.signature.rows()));
  }
}

void PartLayout::check(int member) const {
  const Signature& signature = part_.signature;
  if (!part_.rows.empty() || signature.op > Op::kBroadcast) check_rows();
  if (signature.op == Op::kBarrier) return;
  if (signature.op == Op::kBroadcast &&
      (signature.root < 0 || signature.root >= members_ || !part_.has(signature.root))) {
    contradiction(part_, "no input at root " + std::to_string(signature.root));
  }
  if (!part_.present.empty()) {
    if (part_.present.size() != static_cast<size_t>(members_)) {
      contradiction(part_, "presence of " + std::to_string(part_.present.size()) + " members");
    }
    bool anybody = false;
    const bool sends_rows = signature.op == Op::kAllgather || signature.op == Op::kAlltoall;
    for (int other = 0; other < members_; ++other) {
      anybody = anybody || part_.has(other);
      if (sends_rows && !part_.has(other) && input_bytes(other) > 0) {
        contradiction(part_, "rows of absent member " + std::to_string(other));
      }
    }
    if (!anybody) contradiction(part_, "nobody has an input");
  }
  if (part_.has(member) && part_.input == nullptr && input_bytes(member) > 0) {
    contradiction(part_, "member " + std::to_string(member) + " has no input, but is present");
  }
}

}  // namespace farandole
