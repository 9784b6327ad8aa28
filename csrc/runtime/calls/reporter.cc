// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/reporter.h"

#include <utility>

namespace farandole {

void Reporter::pass(Report&& report, Handle handle) {
  bundler_.pass(std::move(report), handle, passed_);
  send_passed();
}

void Reporter::pass_known(uint32_t id, Contribution&& given, Handle handle) {
  if (given.has_input && bundler_.withhold(id, handle, passed_)) return send_passed();
  pass(Ready{id, {}, 0, std::move(given)}, handle);
}

void Reporter::send(Report report) {
  pass(std::move(report), 0);
  ring();
}

void Reporter::send_passed() {
  for (const Report& report : passed_) {
    if (hurried_ && says_ready(report)) hurried_ = false;
    encoded_.clear();
    encode(report, encoded_);
    channel_.report(encoded_);
  }
  if (!passed_.empty()) news_.store(true, std::memory_order_release);
  passed_.clear();
  withheld_.store(bundler_.withheld(), std::memory_order_release);
}

void Reporter::ring() {
  if (take_news()) channel_.ring_leader();
}

bool Reporter::flush() {
  if (!channel_.can_flush()) return false;
  channel_.flush();
  channel_.ring_leader();
  return true;
}

void Reporter::await(std::span<const Handle> handles) {
  bundler_.await(handles, passed_);
  send_passed();
  ring();
}

void Reporter::hurry() {
  if (!hurried_.exchange(true)) send(Hurry{});
}

void Reporter::open(const Bundle& bundle, const std::function<bool(uint32_t)>& under_way) {
  bundler_.open(bundle, under_way);
}

void Reporter::close(const Unbundle& unbundle) {
  bundler_.close(unbundle.id, passed_);
  send_passed();
  ring();
}

void Reporter::clear() {
  bundler_.clear();
  withheld_ = 0;
}

}  // namespace farandole
