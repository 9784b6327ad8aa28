// SPDX-License-Identifier: Apache-2.0
#include "control/calls/call.h"

#include <utility>

#include "base/error.h"

namespace farandole {

void Call::open(CallKey key, uint32_t id, const Request* defined, const Request& request,
                int members, int64_t now_ns) {
  open_ = true;
  queued_ = false;
  set_ = key.set;
  key_ = std::move(key);
  id_ = id;
  if (members_ != members) arrived_ = MemberMask(members);
  members_ = members;
  arrived_.clear();
  terms_.begin(defined, request);
  inputs_.begin(members);
  times_ = {now_ns, now_ns};
  given_up_ = {};
  takes_plain_ = defined && !signature().traits().ragged() && !by_members(*defined);
}

void Call::close() {
  open_ = queued_ = false;
  inputs_.end();
}

void Call::take(int member) {
  if (arrived_.insert(member)) return;
  throw Error(ErrorCode::kInternal,
              "a rank reported " + text_of(key_, request()) + " twice before it was done");
}

void Call::arrive(int member, const Request& request, bool same, const Contribution& given) {
  const bool agrees = terms_.match(request, same);
  if (agrees && !Inputs::sound(signature(), given, members_)) {
    throw Error(ErrorCode::kInternal,
                "a rank brings to " + text_of(key_, request) + " what it could not have");
  }
  if (!terms_.agreed() || !terms_.equal(request, same)) {
    terms_.add(member, request, arrived_);
    takes_plain_ = false;
  }
  take(member);
  if (agrees) inputs_.add(member, signature(), given);
}

bool Call::arrive_plain(int member) {
  if (!takes_plain_ || !arrived_.insert(member)) return false;
  inputs_.add_plain(member);
  return true;
}

bool Call::arrive_plain(const MemberSlice& members) {
  if (!takes_plain_) return false;
  if (!arrived_.insert_all(members.first_word, members.words, members.count)) return false;
  inputs_.add_all(members);
  return true;
}

void Call::arrive_joined(int member) {
  take(member);
  terms_.add_joined(member);
  inputs_.add_none(signature());
}

void Call::refuse(int member, Failure failure) {
  take(member);
  terms_.refuse(member, std::move(failure));
}

}  // namespace farandole
