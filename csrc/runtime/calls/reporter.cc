// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/reporter.h"

#include <utility>

namespace farandole {

void Reporter::pass(const Report& report) {
  pass_batch();
  write(report);
}

void Reporter::pass_known(uint32_t id, Contribution&& given) {
  if (!given.plain()) return pass(Ready{id, {}, 0, std::move(given)});
  IdRuns& ids = std::get<ReadyMany>(batch_).ids;
  ids.add(id);
  if (ids.full()) pass_batch();
}

void Reporter::pass_batch() {
  IdRuns& ids = std::get<ReadyMany>(batch_).ids;
  if (ids.empty()) return;
  write(batch_);
  ids.clear();
}

void Reporter::write(const Report& report) {
  if (expedited_ && says_ready(report)) expedited_ = false;
  encoded_.clear();
  encode(report, encoded_);
  channel_.report(encoded_);
  news_.store(true, std::memory_order_release);
}

void Reporter::send(const Report& report) {
  pass(report);
  if (take_news()) channel_.wake_leader();
}

bool Reporter::flush() {
  if (!channel_.can_flush()) return false;
  channel_.flush();
  channel_.wake_leader();
  return true;
}

void Reporter::expedite() {
  if (!expedited_.exchange(true)) send(Expedite{});
}

}  // namespace farandole
