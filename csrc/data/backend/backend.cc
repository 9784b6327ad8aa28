// SPDX-License-Identifier: Apache-2.0
#include "data/backend/backend.h"

#include <string>
#include <utility>

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
  return {signature.prescale, signature.postscale, part.divisor};
}

size_t PartLayout::share_start(int owner) const {
  size_t before = 0;
  for (int member = 0; member < owner; ++member) before += rows(member);
  return row_bytes() * before;
}

size_t PartLayout::bytes_between(int sender, int receiver) const {
  if (traits_.rooted() && sender != part_.signature.root) return 0;
  const size_t first =
      traits_.first_logged(static_cast<size_t>(sender), static_cast<size_t>(members_));
  return row_bytes() * rows(static_cast<int>(first) + receiver);
}

int PartLayout::receiver(int sender, int piece) const {
  return meets_each() ? (sender + 1 + piece) % members_ : kEverybody;
}

size_t PartLayout::piece_bytes(int sender, int piece) const {
  switch (traits_.pattern) {
    case Pattern::kOneToAll: return sender == part_.signature.root ? part_.signature.bytes() : 0;
    case Pattern::kEachToAll: return row_bytes() * rows(sender);
    default: return bytes_between(sender, receiver(sender, piece));
  }
}

size_t PartLayout::piece_start(int sender, int receiver) const {
  if (!meets_each()) return 0;
  size_t before = 0;
  for (int member = 0; member < receiver; ++member) before += bytes_between(sender, member);
  return before;
}

size_t PartLayout::landing_start(int sender, int receiver) const {
  if (traits_.pattern == Pattern::kOneToAll) return 0;
  size_t before = 0;
  for (int member = 0; member < sender; ++member) {
    before += meets_each() ? bytes_between(member, receiver) : row_bytes() * rows(member);
  }
  return before;
}

size_t PartLayout::input_bytes(int member) const {
  switch (traits_.pattern) {
    case Pattern::kReduceToAll:
    case Pattern::kReduceToOwners: return part_.signature.bytes();
    case Pattern::kOneToAll:
    case Pattern::kEachToAll: return piece_bytes(member, 0);
    case Pattern::kEachToEach: return piece_start(member, members_);
    case Pattern::kMeet:
    case Pattern::kNone: break;
  }
  return 0;
}

size_t PartLayout::output_bytes(int member) const {
  switch (traits_.rows) {
    case Rows::kNone: return part_.signature.bytes();
    case Rows::kKept: return share_bytes(member);
    case Rows::kBrought:
    case Rows::kPairs: return landing_start(members_, member);
  }
  return 0;
}

void PartLayout::check_rows() const {
  const auto count = static_cast<size_t>(members_);
  const size_t expected = traits_.rows == Rows::kKept ? count : traits_.logged_rows(count);
  if (part_.rows.size() != expected) {
    contradiction(part_, "it has " + std::to_string(part_.rows.size()) + " row counts instead of " +
                             std::to_string(expected));
  }
  for (int64_t rows : part_.rows) {
    if (rows < 0) contradiction(part_, "it has a negative row count");
  }
  for (int member = 0; traits_.rows == Rows::kKept && member < members_; ++member) {
    const int64_t kept = kept_rows(part_.signature.rows(), member, members_);
    if (std::cmp_equal(rows(member), kept)) continue;
    contradiction(part_, "member " + std::to_string(member) + " keeps " +
                             std::to_string(rows(member)) + " rows instead of " +
                             std::to_string(kept));
  }
}

void PartLayout::check(int member) const {
  const Signature& signature = part_.signature;
  check_rows();
  if (traits_.rooted() &&
      (signature.root < 0 || signature.root >= members_ || !part_.has(signature.root))) {
    contradiction(part_, "there is no input at root " + std::to_string(signature.root));
  }
  if (!part_.present.empty()) {
    if (part_.present.size() != static_cast<size_t>(members_)) {
      contradiction(part_, "`present` has " + std::to_string(part_.present.size()) + " entries");
    }
    bool anybody = false;
    for (int other = 0; other < members_; ++other) {
      anybody = anybody || part_.has(other);
      if (traits_.ragged() && !part_.has(other) && input_bytes(other) > 0) {
        contradiction(part_, "there are rows of absent member " + std::to_string(other));
      }
    }
    if (!anybody) contradiction(part_, "no member has an input");
  }
  if (part_.has(member) && part_.input == nullptr && input_bytes(member) > 0) {
    contradiction(part_, "member " + std::to_string(member) + " is present but has no input");
  }
}

}  // namespace farandole
